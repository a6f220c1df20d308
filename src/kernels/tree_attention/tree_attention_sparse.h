// Tree attention in which some queries attend only to chosen blocks of their paths (kernels/page_choice).
// Training uses it to compute the same as generation with sparse attention. CPU only.
//
//   o[i] = sum_j p_ij v[j], per key/value head, over the keys j of the blocks that query i chose.
//
// A query that does not choose attends to all keys. Only the chosen blocks get gradients of keys and values.
// Summaries and scores get no gradient. Equations: tree_attention.h.
//
// Forward is paged attention to the paths of the pass (tree_attention_paged.h) with the chosen blocks
// selected. The output is bit-identical to generation. Backward visits, for each query and head, the pages of
// the query's list in order. The bf16 kernel (tree_attention_sparse_bf16.cpp) instead visits page by page,
// and for each page 32 of the queries that attend to it at a time. Each key/value head is computed by one
// thread, so results do not depend on the number of threads.
#pragma once

#include "kernels/page_choice/block_chooser.h"
#include "kernels/tree_attention/tree_attention_paged.h"

namespace bough {

struct SparseTreePass {
  const TreePages& pages;
  BlockChooser& chooser;  // made from pages.segments()
};

// Returns the pages that the queries of the pass choose in this layer. The result is empty if queries choose
// single keys instead of pages (BlockSummary::kExact). layer_pages: the result of fill_pages(in, pass.pages).
BlockChooser::Lists choose_in_tree(const TreeAttentionInput& in, const at::Tensor& layer_pages,
                                   const SparseTreePass& pass);

// layer_pages: as for choose_in_tree(). chosen: the result of choose_in_tree(), or the pages that generation
// chose.
TreeAttentionOutput tree_attention_forward_sparse(const TreeAttentionInput& in, const at::Tensor& layer_pages,
                                                  const SparseTreePass& pass,
                                                  const BlockChooser::Lists& chosen);

// Like tree_attention_backward, adds the gradients of the stack's keys and values to d_k_stack_PGH and
// d_v_stack_PGH. Throws InternalError if d_o or a stack gradient is not contiguous, or a stack gradient does
// not have the accumulator type.
TreeAttentionGradient tree_attention_backward_sparse(
    const TreeAttentionInput& in, const TreeAttentionOutput& out, const at::Tensor& d_o_TNH,
    const at::Tensor& d_k_stack_PGH, const at::Tensor& d_v_stack_PGH, const SparseTreePass& pass,
    const BlockChooser::Lists& chosen);

}  // namespace bough
