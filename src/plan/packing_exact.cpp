// The dynamic programs of Tree Training: section 2.2.1 (one shared path per bin) and section 2.2.2 (exact).
#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "plan/packing.h"

namespace bough {

namespace {

using internal::LeafBin;

// State of a node if the sequences of a bin share one path. It has the number of the node's leaves, the sum
// of their lengths, and DP(u), the largest number of tokens saved if bins share the path to this node or to
// nodes below it.
struct SinglePath {
  int64_t num_leaves = 0;
  int64_t sum_lengths = 0;
  int64_t saved = 0;
  bool shared_here = false;
};

std::vector<SinglePath> solve_single_path(const BranchTree& branches, int64_t capacity) {
  std::vector<SinglePath> states(branches.nodes.size());
  for (int32_t n = branches.size() - 1; n >= 0; --n) {
    const auto& node = branches.nodes[n];
    auto& state = states[n];
    if (node.is_leaf()) {
      state = {1, node.depth, 0, true};
    } else {
      // Feasible if L(u) + R(u) <= C (the capacity). R(u) is the sum of the leaves' tokens below u. On a tie,
      // sharing the path to this node wins against its descendants, which gives fewer bins.
      const int64_t saved = (state.num_leaves - 1) * node.depth;
      state.shared_here = state.sum_lengths - saved <= capacity && saved >= state.saved;
      if (state.shared_here) state.saved = saved;
    }
    if (node.parent < 0) continue;
    auto& above = states[node.parent];
    above.num_leaves += state.num_leaves;
    above.sum_lengths += state.sum_lengths;
    above.saved += state.saved;
  }
  return states;
}

// The bins below a node by falling size, with their leaves. Sizes include the path from the root, so their
// sum is the number of computed tokens if no bins are joined above the node. A join at a node u above saves
// L(u) tokens, whatever the bins hold.
struct State {
  std::vector<LeafBin> bins;

  void sort() {
    std::ranges::sort(bins, std::greater(), [](const LeafBin& bin) { return bin.num_tokens; });
  }
  int64_t num_tokens() const {
    int64_t sum = 0;
    for (const auto& bin : bins) sum += bin.num_tokens;
    return sum;
  }
  // True if every packing that contains `other` stays feasible, with no more tokens, if this state replaces
  // `other`.
  bool dominates(const State& other) const {
    if (bins.size() > other.bins.size()) return false;
    for (size_t i = 0; i < bins.size(); ++i)
      if (bins[i].num_tokens > other.bins[i].num_tokens) return false;
    return true;
  }
};

// Adds a state unless another state dominates it, and removes the states that it dominates.
void insert_undominated(std::vector<State>& states, State state) {
  state.sort();
  for (const auto& other : states)
    if (other.dominates(state)) return;
  std::erase_if(states, [&](const State& other) { return state.dominates(other); });
  states.push_back(std::move(state));
}

class ExactProgram {
 public:
  ExactProgram(const BranchTree& branches, int64_t capacity, int64_t max_states)
      : branches_(branches), capacity_(capacity), max_states_(max_states), states_(branches.nodes.size()) {}

  // Returns the bins of fewest total tokens; nullopt if a node needs too many states or steps.
  std::optional<std::vector<LeafBin>> run() {
    for (int32_t n = branches_.size() - 1; n >= 0; --n) {
      const auto& node = branches_.nodes[n];
      if (node.is_leaf()) states_[n].push_back({{LeafBin{{n}, node.depth}}});
      else if (!join_children(n)) return std::nullopt;
    }
    return join_roots();
  }

 private:
  // The program may make kWorkPerState * max_states_ bin comparisons in total. Every tree met in practice
  // that stays within max_states_ stays within this limit. For other trees, the limit bounds the time and the
  // recursion depth of join_all(), because building a state of k bins costs k² / 2 comparisons.
  static constexpr int64_t kWorkPerState = 200'000;

  bool join_children(int32_t n) {
    auto& states = states_[n];
    states = {State{}};
    shared_ = branches_.nodes[n].depth;
    for (const int32_t child : branches_.children(n)) {
      results_.clear();
      for (const auto& left : states)
        for (const auto& right : states_[child]) {
          joined_ = left;
          taken_.assign(left.bins.size(), false);
          if (!join_all(left, right, 0)) return false;
        }
      states = std::move(results_);
      states_[child].clear();
    }
    return true;
  }

  // Tries all ways to join bins of `left` with bins of `right` from index `next` on. Each bin is joined with
  // at most one bin of the other side. Two bins of one side are not joined here: joining them at a lower node
  // saves more. Undominated states go to results_.
  bool join_all(const State& left, const State& right, size_t next) {
    if (next == right.bins.size()) {
      work_ += std::ssize(joined_.bins) * (1 + std::ssize(results_));
      insert_undominated(results_, joined_);
      return std::ssize(results_) <= max_states_ && work_ <= kWorkPerState * max_states_;
    }
    const auto& bin = right.bins[next];
    joined_.bins.push_back(bin);
    if (!join_all(left, right, next + 1)) return false;
    joined_.bins.pop_back();
    for (size_t i = 0; i < left.bins.size(); ++i) {
      if (taken_[i] || left.bins[i].num_tokens + bin.num_tokens - shared_ > capacity_) continue;
      taken_[i] = true;
      joined_.bins[i].num_tokens += bin.num_tokens - shared_;
      joined_.bins[i].leaves.insert(joined_.bins[i].leaves.end(), bin.leaves.begin(), bin.leaves.end());
      if (!join_all(left, right, next + 1)) return false;
      joined_.bins[i] = left.bins[i];
      taken_[i] = false;
    }
    return true;
  }

  // Two roots have no common tokens, so each child of the virtual root takes its state of fewest tokens.
  // Joining their bins would save bins, not tokens.
  std::vector<LeafBin> join_roots() {
    State all;
    for (const int32_t child : branches_.children(-1)) {
      auto& best = *std::ranges::min_element(states_[child], {}, [](const State& state) {
        return std::pair(state.num_tokens(), state.bins.size());
      });
      all.bins.insert(all.bins.end(), best.bins.begin(), best.bins.end());
    }
    all.sort();
    std::vector<LeafBin> bins;
    std::multimap<int64_t, size_t> by_room;  // best fit
    for (auto& bin : all.bins) {
      size_t target = bins.size();
      if (const auto found = by_room.lower_bound(bin.num_tokens); found != by_room.end()) {
        target = found->second;
        by_room.erase(found);
        bins[target].num_tokens += bin.num_tokens;
        bins[target].leaves.insert(bins[target].leaves.end(), bin.leaves.begin(), bin.leaves.end());
      } else {
        bins.push_back(std::move(bin));
      }
      by_room.insert({capacity_ - bins[target].num_tokens, target});
    }
    return bins;
  }

  const BranchTree& branches_;
  int64_t capacity_, max_states_;
  std::vector<std::vector<State>> states_;  // by node
  int64_t shared_ = 0;                      // L(u) of the node whose children are being joined
  int64_t work_ = 0;
  std::vector<State> results_;
  State joined_;
  std::vector<bool> taken_;  // the bins of `left` that are already joined with one of `right`
};

}  // namespace

Packing pack_single_path(const PrefixTree& tree, int64_t capacity) {
  internal::check_capacity(tree, capacity);
  const BranchTree branches(tree);
  const auto states = solve_single_path(branches, capacity);
  // per node: the highest node at or above it that has shared_here
  std::vector<int32_t> owner(branches.nodes.size());
  std::map<int32_t, LeafBin> bins;
  for (int32_t n = 0; n < branches.size(); ++n) {
    const auto& node = branches.nodes[n];
    owner[n] =
        node.parent >= 0 && owner[node.parent] >= 0 ? owner[node.parent] : (states[n].shared_here ? n : -1);
    if (node.is_leaf()) bins[owner[n]].leaves.push_back(n);
  }
  std::vector<LeafBin> result;
  for (auto& [node, bin] : bins) {
    const auto& state = states[node];
    bin.num_tokens = state.sum_lengths - (state.num_leaves - 1) * branches.nodes[node].depth;
    result.push_back(std::move(bin));
  }
  return internal::to_packing(branches, std::move(result), capacity);
}

std::optional<Packing> pack_exact(const PrefixTree& tree, int64_t capacity, int64_t max_states) {
  internal::check_capacity(tree, capacity);
  const BranchTree branches(tree);
  auto bins = ExactProgram(branches, capacity, max_states).run();
  if (!bins) return std::nullopt;
  return internal::to_packing(branches, std::move(*bins), capacity);
}

}  // namespace bough
