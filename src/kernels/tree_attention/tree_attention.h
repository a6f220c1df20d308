// Attention of the queries of one pass to the keys of the prefix KV stack and of the pass. Only this
// operation knows the shape of the prefix tree (engine.md 3).
//
// Keys 0..P-1 lie on the stack. Keys P..P+T-1 are the tokens of the pass, in pre-order. `end_local[j]` is the
// number of tokens of the pass whose number in the tree is below subtree_end of key j.
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
//            Also summed over the query heads that share the key/value head, in the accumulator type.
//            Overwritten for keys of the pass, added to d_k_stack and d_v_stack for keys of the stack.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <tuple>

#include "kernels/common/host_to_device.h"

namespace bough {

struct TreeAttentionInput {
  at::Tensor q_TNH, k_TGH, v_TGH;       // of the pass; contiguous; N a multiple of G
  at::Tensor k_stack_PGH, v_stack_PGH;  // keys 0..P-1 of the stack; q's dtype; contiguous; P may be 0
  at::Tensor end_local;                 // int32 [P + T], on q's device
  double scale;                         // usually 1/sqrt(H)
  at::Tensor spans = {};                // KeyEnds::spans; required by CUDA kernels
};

// Tells which queries of a pass see which keys. On the device of the queries.
struct KeyEnds {
  at::Tensor end_local;  // int32 [P + T]
  at::Tensor spans;      // int32, key_spans.h; undefined on the CPU, whose kernels compute the spans
};
// Adds end_local, and on a GPU its spans, to `upload`. upload.send() sets the tensors of `*to`. `*to` must
// stay alive and in place until then.
void add_key_ends(HostToDeviceBatch& upload, std::span<const int32_t> end_local, int64_t num_stack,
                  KeyEnds* to);
// Uploads end_local, and to a GPU its spans, with a HostToDeviceBatch of its own, and returns the tensors.
KeyEnds upload_key_ends(std::span<const int32_t> end_local, int64_t num_stack, at::Device device);

struct TreeAttentionOutput {
  at::Tensor o_TNH;   // q's dtype
  at::Tensor lse_TN;  // accumulator type
};

struct TreeAttentionGradient {
  at::Tensor d_q_TNH;           // q's dtype
  at::Tensor d_k_TGH, d_v_TGH;  // accumulator type: the caller adds gradients from later blocks, then rounds
};

// Checks shapes, dtypes and devices, then calls the kernel of q's device through torch's dispatcher. Throws
// InternalError if an input does not fit.
TreeAttentionOutput tree_attention_forward(const TreeAttentionInput& input);

// Returns d_q, d_k and d_v of the pass. Adds the gradients of the stack's keys and values to d_k_stack_PGH
// and d_v_stack_PGH (accumulator type, contiguous). Throws InternalError if an input does not fit.
TreeAttentionGradient tree_attention_backward(const TreeAttentionInput& input,
                                              const TreeAttentionOutput& output, const at::Tensor& d_o_TNH,
                                              const at::Tensor& d_k_stack_PGH,
                                              const at::Tensor& d_v_stack_PGH);

// References: dense masked softmax in the accumulator type, on any device and dtype. Memory grows with
// N · T · (P + T).
TreeAttentionOutput tree_attention_forward_reference(const TreeAttentionInput& input);
TreeAttentionGradient tree_attention_backward_reference(const TreeAttentionInput& input,
                                                        const TreeAttentionOutput& output,
                                                        const at::Tensor& d_o_TNH,
                                                        const at::Tensor& d_k_stack_PGH,
                                                        const at::Tensor& d_v_stack_PGH);

}  // namespace bough
