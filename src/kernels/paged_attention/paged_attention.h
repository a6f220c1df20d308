// Attention of the tokens of a pass to keys and values in pages. A pass may mix decode and chunked prefill. N
// / G query heads share a key/value head. The keys and values of the pass are stored in the pages first.
//
//   o[t, n]   = sum_j p_j v_j,  p = softmax_j(scale · q[t, n] · k_j)
//   lse[t, n] = log sum_j exp(scale · q[t, n] · k_j)
//   j: keys in the pages that t's sequence lists, or in those selected, at positions up to t's position
//
// A page holds up to kPageTokens consecutive tokens of one sequence. Sequences with a common prefix list the
// same pages. All sequences that list a page give the same position to its first key. Scores, softmax and
// sums are in the accumulator type, and o is rounded once. The bf16 kernels that use tiles round p to bf16
// before the product with v, as in training.
//
// All layers that attend to the same pages use one PagedPlan. A layer that selects pages needs a PagedPlan
// for this layer alone. A selection of all pages gives the same bits as no selection.
//
// On the CPU, a token visits its keys in ascending order, one page at a time, with a running maximum and sum.
// The result does not depend on the rest of the pass, on chunk borders or on the number of threads. On CUDA,
// a token's keys are divided into parts: pages that other tokens also attend to, and the remaining pages. The
// parts are computed in parallel and merged by their log-sum-exp. The same pass gives the same bits; a token
// may be rounded differently in another pass.
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

// Sizes of the tensor of a layer's pages: on the CPU [B, G, 2, kPageTokens · padded H] (pages.h), on CUDA
// [2, B, G, kPageTokens, H]. The tensor need not be initialized.
std::vector<int64_t> page_sizes(const PagedShape& shape, int64_t num_pages);
// Views of a layer's pages: keys [B, G, H' / P, kPageTokens, P], values [B, G, kPageTokens / P, H', P]. H' is
// the padded H, P is 2 or 1 (pages.h). On CUDA, H' = H and P = 1.
at::Tensor keys_of_pages(const at::Tensor& pages, int64_t head_dim);
at::Tensor values_of_pages(const at::Tensor& pages, int64_t head_dim);

// The plan of a paged attention call: which tokens attend to which pages, as integers on the kernel's device.
class PagedPlan {
 public:
  PagedPlan() = default;
  // Plans one pass. Does not keep references to the segments. Throws InternalError if the page of a token of
  // the pass is not listed or not selected, or if a list does not ascend.
  PagedPlan(std::span<const PagedSegment> segments, const PagedShape& shape,
            const PageSelection* selection = nullptr, AttentionPath path = AttentionPath::kFastest);
  // On CUDA, a plan that set_work() fills for one pass after another. The tensors keep their addresses, as
  // captured CUDA graphs need. capacities, max_pages: limits of a pass. parts: from make_parts() with
  // num_parts of at least capacities.max_rows.
  PagedPlan(const PagedShape& shape, const PagedLayout& capacities, int64_t max_pages, at::Tensor parts);

  // Whether the CUDA kernels support the shape: fp32 or bf16, heads of up to 256; and are not left out
  // (cuda_library.h). If not, paged_attention_reference() computes the attention.
  static bool on_cuda(const PagedShape& shape);
  // Returns uninitialized memory for the parts of rows that several items compute (paged_work.h).
  static at::Tensor make_parts(const PagedShape& shape, int64_t num_parts);

  // On CUDA, sets the pass that paged_attention() computes with this plan from now on. Returns false and
  // changes nothing if `work` exceeds the capacities.
  bool set_work(const PagedWork& work);

  int64_t num_tokens() const { return num_tokens_; }  // of the pass; if the plan has capacities: the maximum
  bool by_reference() const { return by_reference_; }
  const at::Tensor& work() const {
    return work_;
  }  // PagedSchedule::as_tensor(); on CUDA in the layout of paged_work.h
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
  at::Tensor k_TGH, v_TGH;  // as q; on the CPU undefined if all keys and values are stored already
  at::Tensor pages;         // of the layer; the kernel writes k and v to them
  const PagedPlan& plan;
  double scale;  // usually 1/sqrt(H)
};

// Checks shapes, dtypes and devices (throws InternalError), then calls the kernel of q's device through
// torch's dispatcher. Returns o_TNH, contiguous, in q's dtype. Overwrites lse_TN (contiguous, accumulator
// type) if it is not nullptr. CUDA kernels do not support lse_TN and throw InternalError.
at::Tensor paged_attention(const PagedAttentionInput& in, at::Tensor* lse_TN = nullptr);

// A token (index into k and v) and its slot: page · kPageTokens + place in the page. In a list of TokenSlots,
// the token at place 0 of a page must come before the page's others, because storing it clears the page's
// values.
struct TokenSlot {
  int64_t token, slot;
};
void store_in_pages(const at::Tensor& pages, const at::Tensor& k_TGH, const at::Tensor& v_TGH,
                    std::span<const TokenSlot> tokens);
void store_in_pages_reference(const at::Tensor& pages, const at::Tensor& k_TGH, const at::Tensor& v_TGH,
                              std::span<const TokenSlot> tokens);  // the same in tensor ops

// Paged attention in tensor ops, on any device. Gathers the pages of each token, masks the scores, and
// computes the softmax. work: PagedSchedule::as_tensor().
at::Tensor paged_attention_reference(const at::Tensor& q_TNH, const std::optional<at::Tensor>& k_TGH,
                                     const std::optional<at::Tensor>& v_TGH, const at::Tensor& pages,
                                     const at::Tensor& work, double scale,
                                     const std::optional<at::Tensor>& lse_TN);

}  // namespace bough
