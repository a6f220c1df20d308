#include "plan/load_balance.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "tree/branch_tree.h"

namespace bough {

namespace {

// Cost of the tokens of one path from depth `from` to depth `to`.
double path_cost(const BalanceWeights& weights, int64_t from, int64_t to) {
  const auto pairs = [](int64_t depth) {
    return static_cast<double>(depth) * (static_cast<double>(depth) + 1) / 2;
  };
  return weights.per_token * static_cast<double>(to - from) + weights.per_pair * (pairs(to) - pairs(from));
}

// The leaves in lexicographic order with their costs.
class Leaves {
 public:
  Leaves(const PrefixTree& tree, const BalanceWeights& weights) : weights_(weights), branches_(tree) {
    branches_.sort_lexicographically();
    visits_ = branches_.visit();
    position_.resize(branches_.nodes.size(), -1);
    for (int32_t i = 0; i < size(); ++i) position_[visits_[i].node] = i;
  }

  int32_t size() const { return static_cast<int32_t>(visits_.size()); }
  const LeafVisit& operator[](int32_t i) const { return visits_[i]; }

  // Cost of leaf i's whole path, and of the tokens that it does not share with the previous leaf.
  double whole_cost(int32_t i) const { return path_cost(weights_, 0, visits_[i].length); }
  double added_cost(int32_t i) const { return path_cost(weights_, visits_[i].lcp, visits_[i].length); }

  // Assigns each sequence to the rank of its leaf, and empty sequences, which have no leaf, to rank 0.
  std::vector<RankShare> with_sequences(std::vector<RankShare> shares,
                                        const std::vector<int32_t>& rank_of) const {
    for (size_t s = 0; s < branches_.sequence_leaf.size(); ++s) {
      const int32_t leaf = branches_.sequence_leaf[s];
      shares[leaf < 0 ? 0 : rank_of[position_[leaf]]].sequences.push_back(static_cast<int64_t>(s));
    }
    return shares;
  }

 private:
  BalanceWeights weights_;
  BranchTree branches_;
  std::vector<LeafVisit> visits_;
  std::vector<int32_t> position_;  // index in visits_ of each leaf node
};

struct Interval {
  int32_t begin, end;
  double cost;
};

// Leaves given by their costs alone. Has the functions of Leaves that search() calls.
struct LeafCosts {
  std::span<const double> whole, added;

  int32_t size() const { return static_cast<int32_t>(whole.size()); }
  double whole_cost(int32_t i) const { return whole[static_cast<size_t>(i)]; }
  double added_cost(int32_t i) const { return added[static_cast<size_t>(i)]; }
};

// Puts leaves into an interval until its cost would exceed `limit`, then starts the next interval. `limit`
// must be at least the largest whole_cost() of a leaf.
template <class LeafList>
std::vector<Interval> fill_greedily(const LeafList& leaves, double limit) {
  std::vector<Interval> intervals;
  for (int32_t i = 0; i < leaves.size(); ++i) {
    const double added = leaves.added_cost(i);
    if (intervals.empty() || intervals.back().cost + added > limit) {
      intervals.push_back({i, i + 1, leaves.whole_cost(i)});
    } else {
      intervals.back().end = i + 1;
      intervals.back().cost += added;
    }
  }
  return intervals;
}

double largest(const std::vector<Interval>& intervals) {
  return std::ranges::max_element(intervals, {}, &Interval::cost)->cost;
}

// Finds at most `num_ranks` intervals with the least largest cost.
template <class LeafList>
std::vector<Interval> search(const LeafList& leaves, int64_t num_ranks) {
  if (leaves.size() == 0) return {};
  double low = 0;  // lower bound: no smaller limit is feasible
  for (int32_t i = 0; i < leaves.size(); ++i) low = std::max(low, leaves.whole_cost(i));
  auto best = fill_greedily(leaves, low);
  if (std::ssize(best) <= num_ranks) return best;
  best = fill_greedily(leaves, std::numeric_limits<double>::infinity());
  // If the intervals at the tried limit are few enough, the upper bound becomes their largest cost. Otherwise
  // the limit becomes the lower bound. Costs are real numbers, so the search stops when only rounding
  // remains.
  double high = largest(best);
  while (high - low > 1e-12 * high) {
    const double middle = low + (high - low) / 2;
    auto intervals = fill_greedily(leaves, middle);
    if (std::ssize(intervals) <= num_ranks) {
      best = std::move(intervals);
      high = largest(best);
    } else {
      low = middle;
    }
  }
  return best;
}

// Splits an interval in two such that the larger of the two costs is as small as possible.
std::pair<Interval, Interval> split(const Leaves& leaves, const Interval& interval) {
  double left = leaves.whole_cost(interval.begin),
         behind = interval.cost - left;  // cost added by the leaves after the cut
  std::pair<Interval, Interval> best;
  double least = std::numeric_limits<double>::infinity();
  for (int32_t cut = interval.begin + 1; cut < interval.end; ++cut) {
    const double added = leaves.added_cost(cut), right = behind - added + leaves.whole_cost(cut);
    if (std::max(left, right) < least) {
      least = std::max(left, right);
      best = {{interval.begin, cut, left}, {cut, interval.end, right}};
    }
    left += added;
    behind -= added;
  }
  return best;
}

std::vector<Interval> split_until(const Leaves& leaves, std::vector<Interval> intervals, int64_t count) {
  while (std::ssize(intervals) < count) {
    const auto splittable_cost = [](const Interval& i) { return i.end - i.begin > 1 ? i.cost : -1; };
    const auto costliest = std::ranges::max_element(intervals, {}, splittable_cost);
    if (costliest == intervals.end() || splittable_cost(*costliest) < 0) break;
    const auto [left, right] = split(leaves, *costliest);
    *costliest = left;
    intervals.insert(costliest + 1, right);
  }
  return intervals;
}

void check_ranks(int64_t num_ranks) {
  if (num_ranks < 1) throw UserError(str("ranks: got ", num_ranks, ", expected at least 1"));
}

// Ranks that receive one leaf after another, in lexicographic order.
class GreedyRanks {
 public:
  GreedyRanks(const Leaves& leaves, int64_t num_ranks, const BalanceWeights& weights)
      : leaves_(leaves), weights_(weights), shares_(num_ranks), common_(num_ranks, 0) {}

  const std::vector<RankShare>& shares() const { return shares_; }

  // Call before each leaf: updates, per rank, how many tokens its last leaf has in common with `leaf`.
  void approach(int32_t leaf) {
    for (auto& common : common_) common = std::min(common, leaves_[leaf].lcp);
  }
  void give(int32_t leaf, int64_t rank) {
    const auto& visit = leaves_[leaf];
    shares_[rank].num_tokens += visit.length - common_[rank];
    shares_[rank].cost += path_cost(weights_, common_[rank], visit.length);
    common_[rank] = visit.length;
  }

 private:
  const Leaves& leaves_;
  BalanceWeights weights_;
  std::vector<RankShare> shares_;
  std::vector<int32_t> common_;
};

}  // namespace

std::vector<RankShare> balance_load(const PrefixTree& tree, int64_t num_ranks,
                                    const BalanceWeights& weights) {
  check_ranks(num_ranks);
  const Leaves leaves(tree, weights);
  const auto intervals = split_until(leaves, search(leaves, num_ranks), num_ranks);
  std::vector<RankShare> shares(num_ranks);
  std::vector<int32_t> rank_of(leaves.size());
  for (size_t rank = 0; rank < intervals.size(); ++rank) {
    const auto& interval = intervals[rank];
    shares[rank].cost = interval.cost;
    for (int32_t i = interval.begin; i < interval.end; ++i) {
      rank_of[i] = static_cast<int32_t>(rank);
      shares[rank].num_tokens += leaves[i].length - (i == interval.begin ? 0 : leaves[i].lcp);
    }
  }
  return leaves.with_sequences(std::move(shares), rank_of);
}

std::vector<RankShare> balance_by_tree_cost(const PrefixTree& tree, int64_t num_ranks,
                                            const BalanceWeights& weights) {
  check_ranks(num_ranks);
  const Leaves leaves(tree, weights);
  GreedyRanks ranks(leaves, num_ranks, weights);
  std::vector<int32_t> rank_of(leaves.size());
  for (int32_t i = 0; i < leaves.size(); ++i) {
    ranks.approach(i);
    const auto least = std::ranges::min_element(ranks.shares(), {}, &RankShare::cost);
    rank_of[i] = static_cast<int32_t>(least - ranks.shares().begin());
    ranks.give(i, rank_of[i]);
  }
  return leaves.with_sequences(ranks.shares(), rank_of);
}

std::vector<RankShare> balance_by_length(const PrefixTree& tree, int64_t num_ranks,
                                         const BalanceWeights& weights) {
  check_ranks(num_ranks);
  const int64_t count = tree.num_sequences_total();
  const auto length = [&](int64_t s) { return tree.sequence_offset[s + 1] - tree.sequence_offset[s]; };
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), length);
  std::vector<RankShare> shares(num_ranks);
  std::vector<int64_t> flat_tokens(num_ranks, 0);
  for (const int64_t s : order) {
    const auto rank = std::ranges::min_element(flat_tokens) - flat_tokens.begin();
    flat_tokens[rank] += length(s);
    shares[rank].sequences.push_back(s);
  }
  std::vector<int64_t> computed_by(tree.num_tokens(), -1);  // the last rank that computes the token
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    auto& share = shares[rank];
    std::ranges::sort(share.sequences);
    for (const int64_t s : share.sequences) {
      int32_t token = tree.sequence_end[s];
      while (token >= 0 && computed_by[token] != rank) {
        computed_by[token] = rank;
        token = tree.parent[token];
      }
      const int64_t begin = token < 0 ? 0 : tree.depth[token] + 1;
      share.num_tokens += length(s) - begin;
      share.cost += path_cost(weights, begin, length(s));
    }
  }
  return shares;
}

double largest_balanced_cost(std::span<const double> whole, std::span<const double> added,
                             int64_t num_ranks) {
  check_ranks(num_ranks);
  BOUGH_CHECK(whole.size() == added.size(), "got ", whole.size(), " costs of whole paths and ", added.size(),
              " added costs; expected one of each for every leaf");
  return whole.empty() ? 0 : largest(search(LeafCosts{whole, added}, num_ranks));
}

double largest_cost(const std::vector<RankShare>& shares) {
  double result = 0;
  for (const auto& share : shares) result = std::max(result, share.cost);
  return result;
}

}  // namespace bough
