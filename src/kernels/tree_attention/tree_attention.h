// Attention of one pass over the stack and itself: the only operation that knows the tree (engine.md 3).
//
// Keys 0..P-1 lie on the stack, keys P..P+T-1 are the pass's own tokens in pre-order. With `end_local[j]` =
// number of the pass's tokens numbered below key j's subtree_end:
//
//   query i sees key j   iff   j - P <= i < end_local[j]
//
// One softmax over all visible keys, in the accumulator type. A query always sees itself.
//   o[i] = sum_j p_ij v[j],  p_ij = exp(scale · q[i]·k[j] - lse[i])
//   lse[i] = log sum_j exp(scale · q[i]·k[j])
// Backward, D[i] = d_o[i]·o[i]:
//   dS_ij  = p_ij (d_o[i]·v[j] - D[i]) · scale
//   d_q[i] = sum_j dS_ij k[j]                  (overwritten)
//   d_k[j] = sum_i dS_ij q[i], d_v[j] = sum_i p_ij d_o[i]
//            summed over the query heads of the group; the pass's own rows are returned (overwritten), the
//            stack's rows are added to d_k_stack, d_v_stack; accumulator type.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <tuple>

#include "kernels/common/upload.h"

namespace bough {

struct TreeAttentionInput {
  at::Tensor q_TNH, k_TGH, v_TGH;       // the pass; contiguous; N a multiple of G
  at::Tensor k_stack_PGH, v_stack_PGH;  // rows 0..P-1 of the stack, contiguous; P may be 0
  at::Tensor end_local;                 // int32 [P + T], q's device
  double scale;                         // usually 1/sqrt(H)
  at::Tensor spans = {};                // KeyEnds::spans
};

// What says which keys a pass's queries see, on their device.
struct KeyEnds {
  at::Tensor end_local;  // int32 [P + T]
  at::Tensor spans;      // int32: key_spans.h; on the CPU, whose kernels find their own, undefined
};
// They are there when `upload` is sent; `*to` must live until then.
void add_key_ends(Upload& upload, std::span<const int32_t> end_local, int64_t num_stack, KeyEnds* to);
// By an upload of their own.
KeyEnds upload_key_ends(std::span<const int32_t> end_local, int64_t num_stack, at::Device device);

struct TreeAttentionOutput {
  at::Tensor o_TNH;   // q's dtype
  at::Tensor lse_TN;  // accumulator type
};

struct TreeAttentionGradient {
  at::Tensor d_q_TNH;           // q's dtype
  at::Tensor d_k_TGH, d_v_TGH;  // accumulator type: the caller adds what descendants sent before it rounds
};

// Checks shapes, dtypes and devices, then calls the kernel of q's device through torch's dispatcher.
TreeAttentionOutput tree_attention_forward(const TreeAttentionInput& input);

// Returns d_q, d_k and d_v of the pass. d_k_stack_PGH, d_v_stack_PGH: accumulator type, added to.
TreeAttentionGradient tree_attention_backward(const TreeAttentionInput& input,
                                              const TreeAttentionOutput& output, const at::Tensor& d_o_TNH,
                                              const at::Tensor& d_k_stack_PGH,
                                              const at::Tensor& d_v_stack_PGH);

// Reference of forward: one dense masked softmax in the accumulator type; any device and dtype; memory N · T
// · (P + T).
TreeAttentionOutput tree_attention_forward_reference(const TreeAttentionInput& input);
TreeAttentionGradient tree_attention_backward_reference(const TreeAttentionInput& input,
                                                        const TreeAttentionOutput& output,
                                                        const at::Tensor& d_o_TNH,
                                                        const at::Tensor& d_k_stack_PGH,
                                                        const at::Tensor& d_v_stack_PGH);

}  // namespace bough
