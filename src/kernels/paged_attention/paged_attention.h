// Attention of a pass's tokens to keys and values in pages: decode and chunked prefill mixed, grouped heads.
// The pass's own keys and values are stored first.
//
//   o[t, n]   = sum_j p_j v_j,  p = softmax_j(scale · q[t, n] · k_j)
//   lse[t, n] = log sum_j exp(scale · q[t, n] · k_j)
//   j: the keys of the pages that t's sequence lists (or of those that are selected of them), at positions up
//   to t's own
//
// A page holds kPageTokens consecutive positions of one sequence, from its first key on; sequences with a
// common prefix list the same pages. Who lists a page says the same first key of it. Scores, softmax and sums
// are in the accumulator type, and o is rounded once; where bf16 is computed in blocks, p is rounded to bf16
// before it meets v, as in training.
//
// What a call does is planned once for all layers that take the same pages (PagedPlan); a layer that selects
// pages of its own has a plan of its own. A selection of all pages is the plan without one, bit for bit.
//
// On the CPU a token visits its keys in ascending order, a page at a time, with a running maximum and sum:
// its result does not depend on what else is in the pass, on chunk borders or on thread count. On CUDA the
// parts of a token's keys, shared pages and its own, are computed side by side and joined by their
// log-sum-exp: the same pass gives the same bits, another pass may round otherwise.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "kernels/paged_attention/paged_plan.h"

namespace bough {

enum class AttentionPath { kFastest, kReference };  // kReference: tensor ops, any device

struct PagedShape {
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
};

// Sizes of a layer's pages, uninitialised: on the CPU [B, G, 2, kPageTokens · padded H] (pages.h), on CUDA
// [2, B, G, kPageTokens, H].
std::vector<int64_t> page_sizes(const PagedShape& shape, int64_t num_pages);
// Views of a layer's pages: keys [B, G, H' / P, kPageTokens, P], values [B, G, kPageTokens / P, H', P], with
// H' = padded H and P of pages.h; on CUDA H' = H and P = 1.
at::Tensor keys_of_pages(const at::Tensor& pages, int64_t head_dim);
at::Tensor values_of_pages(const at::Tensor& pages, int64_t head_dim);

// What a call computes, as integers where its kernel reads them.
class PagedPlan {
 public:
  PagedPlan() = default;
  // Plans one pass. The segments' pages are read now, not later. InternalError where a token's own page is
  // not listed or not selected, or lists are not in ascending order.
  PagedPlan(std::span<const PagedSegment> segments, const PagedShape& shape,
            const PageSelection* selection = nullptr, AttentionPath path = AttentionPath::kFastest);
  // On CUDA, plans passes of up to these capacities one after the other, always at the same addresses, as
  // captured graphs need. parts: of make_parts(), for as many as there are rows.
  PagedPlan(const PagedShape& shape, const PagedLayout& capacities, int64_t max_pages, at::Tensor parts);

  // Whether CUDA kernels compute this shape: fp32 or bf16, heads not too wide. Else the reference does.
  static bool on_cuda(const PagedShape& shape);
  // Uninitialised room for parts of rows that are cut.
  static at::Tensor make_parts(const PagedShape& shape, int64_t num_parts);

  // On CUDA, sets what the next call computes. False, and nothing is changed, if it does not fit.
  bool set_work(const PagedWork& work);

  int64_t num_tokens() const { return num_tokens_; }  // of the pass; with capacities: the most
  bool by_reference() const { return by_reference_; }
  const at::Tensor& work() const {
    return work_;
  }  // PagedSchedule::as_tensor(); on CUDA as paged_work.h lays it out
  const at::Tensor& parts() const { return parts_; }
  const PagedLayout& layout() const { return layout_; }

 private:
  bool by_reference_ = false;
  int64_t num_tokens_ = 0, max_pages_ = 0;
  at::Tensor work_, parts_;
  PagedLayout layout_;
};

struct PagedAttentionInput {
  at::Tensor q_TNH;         // fp32, bf16 or fp64; last dimension contiguous; N a multiple of G
  at::Tensor k_TGH, v_TGH;  // as q; on the CPU undefined where all is stored already
  at::Tensor pages;         // the layer's; k and v are written to them
  const PagedPlan& plan;
  double scale;  // usually 1/sqrt(H)
};

// Checks shapes, dtypes and devices (InternalError), then calls the kernel of q's device through torch's
// dispatcher. Returns o_TNH, contiguous, q's dtype. lse_TN: contiguous, accumulator type, overwritten; not by
// CUDA kernels; may be null.
at::Tensor paged_attention(const PagedAttentionInput& in, at::Tensor* lse_TN = nullptr);

// A token of k and v, and the slot it goes to: page · kPageTokens + place in it. Of the tokens of
// a page that of its first place comes first.
struct TokenSlot {
  int64_t token, slot;
};
void store_in_pages(const at::Tensor& pages, const at::Tensor& k_TGH, const at::Tensor& v_TGH,
                    std::span<const TokenSlot> tokens);
void store_in_pages_reference(const at::Tensor& pages, const at::Tensor& k_TGH, const at::Tensor& v_TGH,
                              std::span<const TokenSlot> tokens);  // in tensor ops

// Paged attention in tensor ops, on any device: gathers each token's pages, masks, softmax. work:
// PagedSchedule::as_tensor().
at::Tensor paged_attention_reference(const at::Tensor& q_TNH, const std::optional<at::Tensor>& k_TGH,
                                     const std::optional<at::Tensor>& v_TGH, const at::Tensor& pages,
                                     const at::Tensor& work, double scale,
                                     const std::optional<at::Tensor>& lse_TN);

}  // namespace bough
