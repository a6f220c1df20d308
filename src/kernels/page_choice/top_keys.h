// Exact top-k attention: each query head attends to the keys of its context with the highest scores of its
// own, and to nothing else. What block top-k attention (page_choice.h) approximates, at the price of all
// scores: a yardstick, slow, in plain loops on the CPU.
//
//   K     = the budget's pages · 16 keys j with the highest s_j = scale · q · k_j; of equal ones the lower
//   o     = sum_{j in K} p_j v_j,  p = softmax_K(s);   lse = log sum_{j in K} exp(s_j)
//   d_s_j = p_j (d_o · v_j - d_o · o) · scale;   d_q = sum_K d_s_j k_j,  d_k_j += d_s_j q,  d_v_j += p_j d_o
//
// Scores and sums are in the accumulator type, in order of h and of positions: the same bits in generation
// and in training.
#pragma once

#include "kernels/page_choice/page_choice.h"

namespace bough {

struct TopKeysInput {
  const at::Tensor& q_TNH;  // last dimension contiguous
  const at::Tensor& pages;  // a layer's on the CPU
  std::span<const ChoosingQuery> queries;
  double scale;
};

// Overwrites the queries' rows of o_TNH (contiguous, q's dtype) and of lse_TN (contiguous, accumulator type),
// which may be null.
void attend_to_top_keys(const TopKeysInput& in, const at::Tensor& o_TNH, at::Tensor* lse_TN);

// Overwrites the queries' rows of d_q_TNH (contiguous, q's dtype) and adds to the gradients of keys and
// values by slot, [16 · pages, G, H] in the accumulator type.
void top_keys_backward(const TopKeysInput& in, const at::Tensor& o_TNH, const at::Tensor& lse_TN,
                       const at::Tensor& d_o_TNH, const at::Tensor& d_q_TNH, const at::Tensor& d_k_SGH,
                       const at::Tensor& d_v_SGH);

}  // namespace bough
