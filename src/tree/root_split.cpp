#include "tree/root_split.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace bough {

namespace {

class RootSplitter {
 public:
  RootSplitter(const IndexedTree& whole, const CostModel& costs, int64_t limit, int64_t held)
      : tree_(*whole.tree), costs_(costs), limit_(limit), held_(held), branches_(whole.branches) {}

  std::vector<std::vector<int64_t>> run() {
    std::vector<int32_t> kept;  // roots that are not repeated
    for (const int32_t root : branches_.children(-1)) {
      const auto& node = branches_.nodes[root];
      if (is_big(node, 0) && is_worth_repeating(node, 0)) open_.push_back({root, 0});
      else kept.push_back(root);
    }
    if (open_.empty()) return {};
    by_end_.resize(tree_.sequence_end.size());
    std::iota(by_end_.begin(), by_end_.end(), 0);
    std::stable_sort(by_end_.begin(), by_end_.end(),
                     [&](int64_t a, int64_t b) { return tree_.sequence_end[a] < tree_.sequence_end[b]; });
    std::vector<int64_t> rest = ending_in({-1, 0});  // empty sequences
    for (const int32_t root : kept) append(rest, ending_in(subtree(branches_.nodes[root])));
    while (!open_.empty()) {
      const auto [index, above] = open_.back();
      open_.pop_back();
      split(branches_.nodes[index], above);
    }
    if (!rest.empty() || groups_.empty()) groups_.insert(groups_.begin(), std::move(rest));
    return std::move(groups_);
  }

 private:
  struct Root {
    int32_t node;
    int64_t above;  // tokens of the path that the tree repeats
  };

  TokenRange subtree(const BranchNode& node) const { return {node.begin, tree_.subtree_end[node.begin]}; }
  std::span<const int32_t> children_of(const BranchNode& node) const {
    return branches_.children(static_cast<int32_t>(&node - branches_.nodes.data()));
  }
  bool is_big(const BranchNode& node, int64_t above) const { return above + subtree(node).size() > limit_; }

  // Sequences that end at tokens of the range.
  std::vector<int64_t> ending_in(TokenRange range) const {
    const auto below = [&](int64_t s, int32_t token) { return tree_.sequence_end[s] < token; };
    return {std::lower_bound(by_end_.begin(), by_end_.end(), range.begin, below),
            std::lower_bound(by_end_.begin(), by_end_.end(), range.end, below)};
  }

  static void append(std::vector<int64_t>& to, const std::vector<int64_t>& from) {
    to.insert(to.end(), from.begin(), from.end());
  }

  // What hangs off the node in as few groups as fit a pass together with the path; a big child is a group.
  std::vector<std::vector<int32_t>> groups_of(const BranchNode& node, int64_t path) const {
    std::vector<std::vector<int32_t>> groups;
    std::multimap<int64_t, size_t> by_room;          // groups of small children; best fit
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

  // Whether the path down to the node's end costs less in every group below it than in a pass of its own.
  bool is_worth_repeating(const BranchNode& node, int64_t above) const {
    const int64_t path = above + node.end - node.begin;
    // The most that repeating can save is two passes' fixed costs: a long path is not looked at more closely.
    if (node.num_children < 2 || path * 4 > limit_) return false;
    const auto shape = [&](int64_t tokens) { return PassShape{tokens, 0, tokens * (tokens + 1) / 2, 0}; };
    const double again = path + limit_ <= held_ ? 0 : costs_.forward_seconds(shape(path));
    const double own_pass =
        costs_.forward_seconds(shape(path)) + costs_.backward_seconds(shape(path)) + again;
    const auto both = [&](int64_t tokens) {
      return costs_.forward_seconds(shape(tokens)) + costs_.backward_seconds(shape(tokens));
    };
    const double in_a_group = both(limit_) - both(limit_ - path);  // beside what is in the pass anyway
    if (in_a_group * 2 >= own_pass) return false;
    return in_a_group * static_cast<double>(groups_of(node, path).size()) < own_pass;
  }

  void split(const BranchNode& node, int64_t above) {
    const int64_t path = above + node.end - node.begin;
    auto own = ending_in({node.begin, node.end});
    for (const auto& group : groups_of(node, path)) {
      const auto& first = branches_.nodes[group.front()];
      if (is_big(first, path) && is_worth_repeating(first, path)) {
        open_.push_back({group.front(), path});
        continue;
      }
      std::vector<int64_t> sequences = std::move(own);
      own.clear();
      for (const int32_t child : group) append(sequences, ending_in(subtree(branches_.nodes[child])));
      groups_.push_back(std::move(sequences));
    }
    if (own.empty()) return;
    if (groups_.empty()) groups_.emplace_back();
    append(groups_.back(), own);
  }

  const PrefixTree& tree_;
  const CostModel& costs_;
  int64_t limit_;
  int64_t held_;
  const BranchTree& branches_;
  std::vector<int64_t> by_end_;  // sequences by the token they end at
  std::vector<Root> open_;
  std::vector<std::vector<int64_t>> groups_;
};

}  // namespace

std::vector<std::vector<int64_t>> split_short_roots(const IndexedTree& whole, const CostModel& costs,
                                                    int64_t max_tokens_per_pass, int64_t max_tokens_held) {
  return RootSplitter(whole, costs, max_tokens_per_pass, max_tokens_held).run();
}

}  // namespace bough
