// A part of the batch that is planned as a tree of its own, by what it takes of the whole tree: no tree is built for it
// until a plan is chosen.
#pragma once

#include <vector>

#include "plan/tree_view.h"

namespace bough {

struct TreePart {
  std::vector<int32_t>
      path;  // nodes from a root down that the part repeats; none: roots, and empty sequences
  std::vector<int32_t> nodes;  // children of the path's last, in the tree's order, with all below them
  std::vector<int32_t> ends;   // nodes of the path: sequences that end there are the part's
};

// Reads parts of a tree. Both outlive it.
class PartReader {
 public:
  PartReader(const PlanRequest& request, const IndexedTree& whole) : request_(request), whole_(whole) {}

  // Indices of the request's sequences, as TreePart names them.
  std::vector<int64_t> sequences(const TreePart& part);

  // Of a part of one node below a path.
  TreeView view(const TreePart& part);

  // The leaf block that a part with a path is where it fits into a pass.
  Block leaf_block(const TreePart& part);

  // From the whole tree's numbers to those of a tree of these roots alone.
  void renumber(const TreePart& roots, PlannedTree& planned) const;

 private:
  using Sums = IndexedTree::Sums;
  TokenRange subtree(int32_t node) const;
  void append_sequences(TokenRange range, std::vector<int64_t>& to);  // that end in the range
  // Sums before each token of the path, and after the last. Beside `starts`, as if the path were all.
  std::vector<Sums> path_sums(const TreePart& part);
  const std::vector<int64_t>& by_end();

  const PlanRequest& request_;
  const IndexedTree& whole_;
  std::vector<int64_t> by_end_;  // sequences by the token they end at; once they are asked for
};

}  // namespace bough
