// Types and functions of the two CPU kernels for the backward pass of tree_attention_sparse.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/op.h"
#include "kernels/tree_attention/tree_attention_sparse.h"

namespace bough {

struct SparseBackward {
  const TreeAttentionInput& in;
  const TreeAttentionOutput& out;
  const at::Tensor &d_o_TNH, &d_k_stack_PGH, &d_v_stack_PGH;
  const SparseTreePass& pass;
  const BlockChooser::Lists& chosen;
  TreeAttentionGradient& d;
};

// Calls visit(token, position, pages, masks) for the queries of the pass in order. pages: the pages that the
// query attends to in key/value head g. The last of these pages has the query's own token. The query sees the
// keys of the last page only up to this token. masks: which keys of each page the query sees (kAllKeys);
// empty if it sees all keys.
template <class Visit>
void for_each_query(const SparseBackward& of, int64_t g, Visit&& visit) {
  const int64_t G = of.in.k_TGH.size(1);
  const std::vector<size_t>& choosing = of.pass.chooser.choosing();
  std::vector<int32_t> listed;
  PagesOfBlocks own;
  int64_t token = 0;
  size_t next_choosing = 0;
  const std::vector<PagedSegment>& segments = of.pass.chooser.segments();
  for (size_t s = 0; s < segments.size(); ++s) {
    const PagedSegment& segment = segments[s];
    const bool chooses = next_choosing < choosing.size() && choosing[next_choosing] == s;
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i, ++token) {
      std::span<const int32_t> pages(segment.pages.begin(), static_cast<size_t>(pages_for(i + 1)));
      if (chooses) {
        listed.clear();
        own.set(of.chosen[next_choosing * static_cast<size_t>(G) + static_cast<size_t>(g)], std::ssize(pages),
                of.pass.chooser.policy());
        for (const int32_t page : own.pages) listed.push_back(segment.pages[static_cast<size_t>(page)]);
        pages = listed;
      }
      visit(token, i, pages, chooses ? std::span<const uint16_t>(own.masks) : std::span<const uint16_t>());
    }
    next_choosing += chooses;
  }
}

// Adds the gradients of one head's pages, [pages][16][stride], times `factor`, to the rows (tokens) of d_TGH.
// A token that lies in several pages, because paths branch there, gets the sum.
template <class Acc>  // float or double
void add_page_rows(const Acc* pages, int64_t stride, Acc factor, std::span<const TokenSlot> slots, int64_t g,
                   const at::Tensor& d_TGH);

// Backward of key/value head g by bf16 tiles (matrix_product_tiles.h). has_tiles(at::kBFloat16) must be true.
// Visits page by page and gathers the queries that attend to the page.
void sparse_backward_head_bf16(const SparseBackward& of, int64_t g);

}  // namespace bough
