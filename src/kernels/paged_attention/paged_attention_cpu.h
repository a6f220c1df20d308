// Attention on the CPU of some tokens to keys and values in pages, decode and chunked prefill mixed, grouped heads.
//
//   o[t, n] = sum_j p_j v_j,  p = softmax_j(scale · q[t, n] · k_j),  j = 0 ... position of t, same sequence
//   lse[t, n] = log sum_j exp(scale · q[t, n] · k_j)
//
// Scores, softmax and sums are in the accumulator type (fp32 for fp32 and bf16, fp64 for fp64), and o is rounded once;
// where bf16 is computed in blocks (paged_attention_bf16.cpp), p is rounded to bf16 before it meets v, as in training. Keys of a sequence are
// visited in ascending order, a page at a time, with a running maximum and sum (online softmax), so a token's result
// does not depend on what else is in the pass, on chunk borders or on thread count. Pages that several sequences hold
// are read once for all of them: their queries go through the page together and part where their tables part, each
// taking its running state along (no merge is needed).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "kernels/paged_attention/attention_schedule.h"

namespace bough {

// Of all: fp32, bf16 and fp64, one dtype; last dimensions of q, k and v are contiguous. pages: a layer's (pages.h).

// Token t of k and v goes to a slot: page * kPageTokens + place in it. Of a page the first place comes first.
struct TokenSlot {
  int64_t token, slot;
};
void store_in_pages(const at::Tensor& pages, const at::Tensor& k_TGH, const at::Tensor& v_TGH,
                    std::span<const TokenSlot> tokens);

// The pass's own keys and values, which are stored before anything reads them: token t at slots[t]. May be undefined.
struct NewTokens {
  at::Tensor k_TGH, v_TGH;
  std::span<const int64_t> slots;
};
// Returns o_TNH, q's dtype. lse_TN: contiguous, accumulator type, overwritten; may be null.
at::Tensor paged_attention_cpu(const at::Tensor& q_TNH, const NewTokens& tokens, const at::Tensor& pages,
                               const AttentionSchedule& schedule, double scale,
                               const at::Tensor* lse_TN = nullptr);

}  // namespace bough
