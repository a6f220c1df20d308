// Attention on the CPU of some tokens to keys and values in pages, decode and chunked prefill mixed, grouped heads.
//
//   o[t, n] = sum_j p_j v_j,  p = softmax_j(scale · q[t, n] · k_j),  j = 0 ... position of t, same sequence
//   lse[t, n] = log sum_j exp(scale · q[t, n] · k_j)
//
// Scores, softmax and sums are in the accumulator type (fp32 for fp32 and bf16, fp64 for fp64), and o is
// rounded once. Keys of a sequence are visited in ascending order, a page at a time, with a running maximum
// and sum (online softmax), so a token's result does not depend on what else is in the pass, on chunk borders
// or on thread count. Pages that several sequences hold are read once for all of them: their queries go through
// the page together and part where their tables part, each taking its running state along (no merge is needed).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "kernels/paged_attention/attention_schedule.h"

namespace bough {

// fp32, bf16 and fp64; keys [pages, G, H, kPageTokens], values [pages, G, kPageTokens, padded H], both of
// q's dtype. Last dimensions of q, k and v are contiguous.

// slots: where each token's key and value go, page * kPageTokens + place in it.
void store_in_pages(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH, std::span<const int64_t> slots);

// Returns o_TNH, q's dtype. lse_TN: contiguous, accumulator type, overwritten; may be null.
at::Tensor paged_attention(const at::Tensor& q_TNH, const at::Tensor& keys, const at::Tensor& values,
                           const AttentionSchedule& schedule, double scale,
                           const at::Tensor* lse_TN = nullptr);

}  // namespace bough
