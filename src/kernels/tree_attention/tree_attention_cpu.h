// The CPU kernels of tree attention and the types they use. tree_attention_cpu.cpp selects a kernel.
#pragma once

#include <cstdint>

#include "kernels/tree_attention/tree_attention.h"

namespace bough {

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

struct AttentionShape {
  int64_t num_queries, num_heads, num_groups, head_dim, num_stack;
  int64_t heads_per_group() const { return num_heads / num_groups; }
  int64_t num_keys() const { return num_stack + num_queries; }
  int64_t q_stride() const { return num_heads * head_dim; }
  int64_t k_stride() const { return num_groups * head_dim; }

  explicit AttentionShape(const TreeAttentionInput& in)
      : num_queries(in.q_TNH.size(0)),
        num_heads(in.q_TNH.size(1)),
        num_groups(in.k_TGH.size(1)),
        head_dim(in.q_TNH.size(2)),
        num_stack(in.k_stack_PGH.size(0)) {}
};

// Compute attention by bf16 tiles (matrix_product_tiles.h). has_tiles(at::kBFloat16) must be true.
// Probabilities and their gradients are rounded to bf16. Scores, sums and gradients of keys and values are
// fp32. o: shape and dtype of q. lse: fp32 [T, N].
void tree_attention_forward_bf16(const TreeAttentionInput& in, const at::Tensor& o, const at::Tensor& lse);
TreeAttentionGradient tree_attention_backward_bf16(const TreeAttentionInput& in,
                                                   const TreeAttentionOutput& out, const at::Tensor& d_o,
                                                   const at::Tensor& d_k_stack, const at::Tensor& d_v_stack);

// Compute attention of fp32 or bf16 inputs in fp32. has_avx() must be true.
void tree_attention_forward_fp32(const TreeAttentionInput& in, const at::Tensor& o, const at::Tensor& lse);
TreeAttentionGradient tree_attention_backward_fp32(const TreeAttentionInput& in,
                                                   const TreeAttentionOutput& out, const at::Tensor& d_o,
                                                   const at::Tensor& d_k_stack, const at::Tensor& d_v_stack);

}  // namespace bough
