// Tree attention in which some queries see chosen pages of their paths only (kernels/page_choice): what
// generation under sparse attention computes, for training. On the CPU.
//
//   o[i] = sum_j p_ij v[j] over the keys j of the pages that i chose, and of all pages for queries that do
//   not choose; per key/value head. Backward goes through chosen pages only; summaries and scores carry no
//   gradient. Equations: tree_attention.h.
//
// Forward is paged attention over the pass's paths in pages, as in tree_attention_paged.h, with the pages of
// each choosing query selected: generation's bits. Backward visits, for each query and head, the pages of its
// list in order; in bf16, by blocks, for each page the queries that attend to it, 32 at a time
// (tree_attention_sparse_bf16.cpp). The threads divide the key/value heads, so that its bits do not depend on
// their number.
#pragma once

#include "kernels/page_choice/page_choice.h"
#include "kernels/tree_attention/tree_attention_paged.h"

namespace bough {

struct SparseTreePass {
  const TreePages& pages;
  PageChooser& chooser;  // of pages.segments()
};

// What the pass's queries choose in this layer, of fill_pages(in, pass.pages).
PageChooser::Lists choose_in_tree(const TreeAttentionInput& in, const at::Tensor& layer_pages,
                                  const SparseTreePass& pass);

// Over the same pages. `chosen`: of choose_in_tree(), or generation's own.
TreeAttentionOutput tree_attention_forward_sparse(const TreeAttentionInput& in, const at::Tensor& layer_pages,
                                                  const SparseTreePass& pass,
                                                  const PageChooser::Lists& chosen);

// As tree_attention_backward: d_k_stack_PGH and d_v_stack_PGH are added to.
TreeAttentionGradient tree_attention_backward_sparse(
    const TreeAttentionInput& in, const TreeAttentionOutput& out, const at::Tensor& d_o_TNH,
    const at::Tensor& d_k_stack_PGH, const at::Tensor& d_v_stack_PGH, const SparseTreePass& pass,
    const PageChooser::Lists& chosen);

}  // namespace bough
