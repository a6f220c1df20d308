#include "tree/branch_tree.h"

#include <algorithm>
#include <numeric>

namespace bough {

namespace {

// Returns one past the last token of the node that begins at t. A later token e belongs to this node if and
// only if two conditions hold:
// - The tokens from t to e form a chain (depth grows with the token number).
// - None of the tokens from t to e - 1 has another child (the subtrees end together).
// If the conditions hold for e, they hold for all tokens between t and e. So the end is found by doubling,
// then by binary search.
int32_t stretch_end(const PrefixTree& tree, int32_t t) {
  const int32_t limit = tree.subtree_end[t];
  const auto belongs = [&](int32_t e) {
    return tree.subtree_end[e] == limit && tree.depth[e] - tree.depth[t] == e - t;
  };
  int32_t inside = t, step = 1;
  while (inside + step < limit && belongs(inside + step)) {
    inside += step;
    step *= 2;
  }
  for (; step > 0; step /= 2)
    if (inside + step < limit && belongs(inside + step)) inside += step;
  return inside + 1;
}

}  // namespace

BranchTree::BranchTree(const PrefixTree& tree) : tree_(&tree) {
  std::vector<int32_t> open;  // nodes whose subtree is not finished
  for (int32_t t = 0; t < tree.num_tokens();) {
    const int32_t end = stretch_end(tree, t);
    while (!open.empty() && tree.subtree_end[nodes[open.back()].begin] <= t) open.pop_back();
    const int32_t parent = open.empty() ? -1 : open.back();
    if (parent >= 0) ++nodes[parent].num_children;
    open.push_back(size());
    nodes.push_back({t, end, parent, tree.depth[end - 1] + 1});
    t = end;
  }
  child_begin_.assign(nodes.size() + 3, 0);
  child_list_.resize(nodes.size());
  for (const auto& node : nodes) ++child_begin_[node.parent + 3];
  std::partial_sum(child_begin_.begin(), child_begin_.end(), child_begin_.begin());
  for (int32_t n = 0; n < size(); ++n) child_list_[child_begin_[nodes[n].parent + 2]++] = n;

  std::vector<int32_t> first_leaf(nodes.size());
  for (int32_t n = size() - 1; n >= 0; --n) first_leaf[n] = nodes[n].is_leaf() ? n : first_leaf[n + 1];
  // The node of every kStride-th token. The search for a sequence's end node starts from there.
  constexpr int32_t kStride = 16;
  std::vector<int32_t> near;
  near.reserve(tree.num_tokens() / kStride + 1);
  for (int32_t n = 0; n < size(); ++n)
    for (int32_t t = std::ssize(near) * kStride; t < nodes[n].end; t += kStride) near.push_back(n);
  sequence_leaf.reserve(tree.sequence_end.size());
  for (const int32_t token : tree.sequence_end) {
    if (token < 0) {
      sequence_leaf.push_back(-1);
      continue;
    }
    int32_t n = near[token / kStride];
    while (nodes[n].end <= token) ++n;
    sequence_leaf.push_back(first_leaf[n]);
  }
}

std::span<int32_t> BranchTree::children(int32_t n) {
  return std::span(child_list_).subspan(child_begin_[n + 1], child_begin_[n + 2] - child_begin_[n + 1]);
}

std::span<const int32_t> BranchTree::children(int32_t n) const {
  return std::span(child_list_).subspan(child_begin_[n + 1], child_begin_[n + 2] - child_begin_[n + 1]);
}

void BranchTree::sort_lexicographically() {
  for (int32_t n = -1; n < size(); ++n)
    std::ranges::sort(children(n), {}, [&](int32_t child) { return tree_->tokens[nodes[child].begin]; });
}

std::vector<LeafVisit> BranchTree::visit() const {
  std::vector<LeafVisit> visits;
  std::vector<int32_t> todo;
  const auto open = [&](int32_t n) {
    const auto list = children(n);
    todo.insert(todo.end(), list.rbegin(), list.rend());
  };
  open(-1);
  int32_t lcp = 0;
  bool descending = true;  // false if the node before n was a leaf: only then does `lcp` change
  while (!todo.empty()) {
    const int32_t n = todo.back();
    todo.pop_back();
    if (!descending) lcp = nodes[n].parent < 0 ? 0 : nodes[nodes[n].parent].depth;
    descending = !nodes[n].is_leaf();
    if (nodes[n].is_leaf()) visits.push_back({n, nodes[n].depth, lcp});
    else open(n);
  }
  return visits;
}

std::vector<std::vector<int64_t>> BranchTree::sequences_of_leaves() const {
  std::vector<std::vector<int64_t>> result(nodes.size());
  for (size_t s = 0; s < sequence_leaf.size(); ++s)
    if (sequence_leaf[s] >= 0) result[sequence_leaf[s]].push_back(static_cast<int64_t>(s));
  return result;
}

}  // namespace bough
