// Exact top-k attention: each query head attends only to the keys of its context with the highest scores.
// Block top-k attention (page_choice.h) approximates it. This is a slow baseline in plain loops on the CPU,
// which computes the scores of all keys.
//
//   K     = the budget · block_tokens keys j with the highest s_j = scale · q · k_j; on a tie the earlier
//   o     = sum_{j in K} p_j v_j,  p = softmax_K(s);   lse = log sum_{j in K} exp(s_j)
//   d_s_j = p_j (d_o · v_j - d_o · o) · scale;   d_q = sum_K d_s_j k_j,  d_k_j += d_s_j q,  d_v_j += p_j d_o
//
// Scores and sums are in the accumulator type, in order of h and of positions, so generation and training get
// the same bits.
#pragma once

#include "kernels/page_choice/page_choice.h"

namespace bough {

struct TopKeysInput {
  const at::Tensor& q_TNH;  // last dimension contiguous
  const at::Tensor& pages;  // pages of a layer on the CPU
  std::span<const ChoosingQuery> queries;
  int64_t block_tokens;  // SparsePolicy::block_tokens
  double scale;
};

// Overwrites the output of the tokens of in.queries in o_TNH (contiguous, q's dtype) and in *lse_TN
// (contiguous, accumulator type; lse_TN may be nullptr). Throws InternalError if an input does not fit.
void attend_to_top_keys(const TopKeysInput& in, const at::Tensor& o_TNH, at::Tensor* lse_TN);

// Overwrites the gradient of the tokens of in.queries in d_q_TNH (contiguous, q's dtype). Adds to d_k_SGH and
// d_v_SGH, the gradients of keys and values by slot: [16 · pages, G, H], accumulator type. Throws
// InternalError if an input does not fit.
void top_keys_backward(const TopKeysInput& in, const at::Tensor& o_TNH, const at::Tensor& lse_TN,
                       const at::Tensor& d_o_TNH, const at::Tensor& d_q_TNH, const at::Tensor& d_k_SGH,
                       const at::Tensor& d_v_SGH);

}  // namespace bough
