#include "plan/plan_strategies.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

namespace bough {

namespace {

class RootSplitter {
 public:
  RootSplitter(const IndexedTree& whole, const PassCosts& costs, int64_t limit, int64_t held)
      : tree_(whole.tree()), costs_(costs), limit_(limit), held_(held), branches_(whole.branches()) {}

  std::vector<TreePart> run() {
    TreePart rest;  // the roots whose tokens are computed only once form one part
    for (const int32_t root : branches_.children(-1)) {
      const auto& node = branches_.nodes[root];
      if (auto groups = groups_if_worth(node, 0)) open_.push_back({root, 0, {}, {}, std::move(*groups)});
      else rest.nodes.push_back(root);
    }
    if (open_.empty()) return {};
    const bool has_empty = std::ranges::find(tree_.sequence_end, -1) != tree_.sequence_end.end();
    if (!rest.nodes.empty() || has_empty) parts_.push_back(std::move(rest));
    while (!open_.empty()) {
      auto root = std::move(open_.back());
      open_.pop_back();
      split(std::move(root));
    }
    return std::move(parts_);
  }

 private:
  using Groups = std::vector<std::vector<int32_t>>;
  // A node whose children are split into several parts. Each part computes the path and the node's tokens.
  struct Root {
    int32_t node;
    int64_t above;              // tokens of the path above the node
    std::vector<int32_t> path;  // the path's nodes
    std::vector<int32_t> ends;  // nodes of `path`; the sequences that end in them go to this root's parts
    Groups groups;              // of the children
  };

  TokenRange subtree(const BranchNode& node) const { return {node.begin, tree_.subtree_end[node.begin]}; }
  std::span<const int32_t> children_of(const BranchNode& node) const {
    return branches_.children(static_cast<int32_t>(&node - branches_.nodes.data()));
  }
  bool is_big(const BranchNode& node, int64_t above) const { return above + subtree(node).size() > limit_; }

  // Groups the node's children such that the tokens of each group plus `path` (tokens down to the node's end)
  // fit one pass, in as few groups as best fit gives. A child that does not fit (big) is a group of its own.
  Groups groups_of(const BranchNode& node, int64_t path) const {
    Groups groups;
    std::multimap<int64_t, size_t> by_room;          // groups of small children, for best fit
    for (const int32_t child : children_of(node)) {  // heaviest first
      const int64_t size = subtree(branches_.nodes[child]).size();
      size_t group = groups.size();
      if (!is_big(branches_.nodes[child], path)) {
        int64_t room = limit_ - path;
        if (const auto found = by_room.lower_bound(size); found != by_room.end()) {
          room = found->first;
          group = found->second;
          by_room.erase(found);
        }
        by_room.insert({room - size, group});
      }
      if (group == groups.size()) groups.emplace_back();
      groups[group].push_back(child);
    }
    return groups;
  }

  // Returns groups_of() if computing the path down to the node's end in each group costs less than in a pass
  // of its own. Otherwise nullopt.
  std::optional<Groups> groups_if_worth(const BranchNode& node, int64_t above) const {
    if (!is_big(node, above)) return std::nullopt;
    const int64_t path = above + node.end - node.begin;
    // Computing the path again saves at most the fixed costs of two passes. So long paths are rejected early.
    if (node.num_children < 2 || path * 4 > limit_) return std::nullopt;
    const auto shape = [&](int64_t tokens) { return PassShape{tokens, 0, tokens * (tokens + 1) / 2, 0}; };
    const double again = path + limit_ <= held_ ? 0 : costs_.forward_seconds(shape(path));
    const double own_pass =
        costs_.forward_seconds(shape(path)) + costs_.backward_seconds(shape(path)) + again;
    const auto both = [&](int64_t tokens) {
      return costs_.forward_seconds(shape(tokens)) + costs_.backward_seconds(shape(tokens));
    };
    // cost of the path in a pass that runs anyway
    const double in_a_group = both(limit_) - both(limit_ - path);
    if (in_a_group * 2 >= own_pass) return std::nullopt;
    auto groups = groups_of(node, path);
    if (in_a_group * static_cast<double>(groups.size()) >= own_pass) return std::nullopt;
    return groups;
  }

  void split(Root root) {
    const auto& node = branches_.nodes[root.node];
    const int64_t path = root.above + node.end - node.begin;
    root.path.push_back(root.node);
    root.ends.push_back(root.node);
    std::vector<Root> opened;
    Groups closed;
    for (auto& group : root.groups) {
      if (auto groups = groups_if_worth(branches_.nodes[group.front()], path))
        opened.push_back({group.front(), path, root.path, {}, std::move(*groups)});
      else closed.push_back(std::move(group));
    }
    // Sequences that end on the path go to the first group that is not split further. If all groups are split
    // further, they go to the first of these.
    if (closed.empty()) opened.front().ends = std::exchange(root.ends, {});
    for (auto& group : closed) parts_.push_back({root.path, std::move(group), std::exchange(root.ends, {})});
    std::ranges::move(opened, std::back_inserter(open_));
  }

  const PrefixTree& tree_;
  const PassCosts& costs_;
  int64_t limit_;
  int64_t held_;
  const BranchTree& branches_;
  std::vector<Root> open_;
  std::vector<TreePart> parts_;
};

}  // namespace

std::vector<TreePart> split_short_roots(const IndexedTree& whole, const PassCosts& costs,
                                        int64_t max_tokens_per_pass, int64_t max_tokens_held) {
  return RootSplitter(whole, costs, max_tokens_per_pass, max_tokens_held).run();
}

}  // namespace bough
