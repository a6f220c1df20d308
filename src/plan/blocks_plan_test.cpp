#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>

#include "base/error.h"
#include "plan/plan_strategies.h"
#include "plan/test_costs.h"
#include "tree/random_tree.h"

namespace bough {
namespace {

// A tree of at most `max_nodes` runs of 1 to `longest` tokens, with one sequence per leaf.
std::vector<std::vector<int32_t>> random_small_tree(uint64_t seed, int max_nodes, int longest) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<int32_t>> paths;
  std::vector<bool> is_leaf;
  const int num_nodes = 2 + static_cast<int>(random() % (max_nodes - 1));
  for (int i = 0; i < num_nodes; ++i) {
    std::vector<int32_t> path;
    if (i > 0 && random() % 8 != 0) {
      const size_t parent = random() % paths.size();
      path = paths[parent];
      is_leaf[parent] = false;
    }
    const auto length = 1 + random() % longest;
    for (size_t t = 0; t < length; ++t) path.push_back(1000 * i + static_cast<int32_t>(t));
    paths.push_back(path);
    is_leaf.push_back(true);
  }
  std::vector<std::vector<int32_t>> sequences;
  for (size_t i = 0; i < paths.size(); ++i)
    if (is_leaf[i]) sequences.push_back(paths[i]);
  return sequences;
}

// Finds the cheapest plan with passes of at most `limit` tokens in which interior blocks are whole runs
// between branch points. Tries every partition of the sequences into trees, every choice of interior runs,
// and every way to combine pieces to leaf blocks.
class BruteForce {
 public:
  BruteForce(const PlanRequest& request, const PassCosts& costs, int64_t limit)
      : request_(request), costs_(costs), limit_(limit) {}

  double run() {
    const auto all = (1u << request_.sequences.size()) - 1;
    std::vector<double> one(all + 1, INFINITY), best(all + 1, INFINITY);
    for (unsigned set = 1; set <= all; ++set) one[set] = one_tree(set);
    best[0] = 0;
    for (unsigned set = 1; set <= all; ++set)
      for (unsigned part = set; part > 0; part = (part - 1) & set)
        best[set] = std::min(best[set], one[part] + best[set ^ part]);
    return best[all];
  }

 private:
  double leaf_seconds(const PassShape& shape) const {
    return costs_.forward_seconds(shape) + costs_.backward_seconds(shape) + head_seconds(shape);
  }
  double head_seconds(const PassShape& shape) const {
    return shape.head_rows == 0 ? 0
                                : costs_.head_forward_seconds(shape) + costs_.head_backward_seconds(shape);
  }

  // Adds a piece, or a run of an interior block.
  static void add_range(const TreeView& indexed, TokenRange range, PassShape& shape) {
    shape.tokens += range.size();
    shape.pairs += indexed.num_pairs(range);
    shape.stack_pairs += int64_t{range.size()} * indexed.depth(range.begin);
    shape.pieces += indexed.num_pieces(range);
    shape.head_rows += indexed.num_trained(range);
    shape.loss_rows += indexed.num_rows(range);
  }

  double one_tree(unsigned set) const {
    std::vector<TokenSpan> spans;
    for (size_t s = 0; s < request_.sequences.size(); ++s)
      if (set >> s & 1) spans.push_back(request_.sequences[s]);
    const PlanRequest own{.sequences = spans};  // all of its tokens train
    const IndexedTree indexed(own);
    const auto& branches = indexed.branches();
    const auto count = static_cast<unsigned>(branches.nodes.size());
    double best = INFINITY;
    for (unsigned interior = 0; interior < 1u << count; ++interior) {
      bool valid = true;
      for (unsigned i = 0; i < count && valid; ++i) {
        const auto& stretch = branches.nodes[i];
        if (!(interior >> i & 1)) continue;
        valid = !stretch.is_leaf() && stretch.end - stretch.begin <= limit_ &&
                (stretch.parent < 0 || (interior >> stretch.parent & 1));
      }
      if (valid) best = std::min(best, with_interior(indexed, interior));
    }
    return best;
  }

  double with_interior(const IndexedTree& indexed, unsigned interior) const {
    const auto& list = indexed.branches().nodes;
    double seconds = 0;
    // Joins interior runs: an interior run continues with its first child if that child is its only interior
    // child.
    std::vector<int64_t> run_tokens(list.size(), 0);
    std::vector<bool> merged(list.size(), false);
    struct Piece {
      TokenRange range;
      int32_t above;
    };
    std::vector<Piece> pieces;
    for (size_t i = 0; i < list.size(); ++i) {
      const auto& stretch = list[i];
      const TokenRange subtree{stretch.begin, indexed.tree().subtree_end[stretch.begin]};
      if (!(interior >> i & 1)) {
        if (stretch.parent < 0 || (interior >> stretch.parent & 1)) {
          if (subtree.size() > limit_) return INFINITY;
          pieces.push_back({subtree, stretch.parent});
        }
        continue;
      }
      if (merged[i]) continue;
      TokenRange run{stretch.begin, stretch.end};
      for (size_t last = i;;) {
        int num_interior = 0;
        const auto children = indexed.branches().children(static_cast<int32_t>(last));
        for (const int32_t child : children) num_interior += interior >> child & 1;
        const int32_t next = children.front();
        if (num_interior != 1 || !(interior >> next & 1) || list[next].end - run.begin > limit_) break;
        merged[next] = true;
        run.end = list[next].end;
        last = next;
      }
      PassShape shape{
          .stack_rows = indexed.tree().depth[run.begin], .stack_pairs = 0, .pieces = 0, .loss_rows = 0};
      add_range(indexed, run, shape);
      seconds += 2 * costs_.forward_seconds(shape) + costs_.backward_seconds(shape) + head_seconds(shape);
    }
    const auto is_above = [&](int32_t high, int32_t low) {
      for (; low >= 0; low = list[low].parent)
        if (low == high) return true;
      return high < 0;
    };
    const unsigned all = (1u << pieces.size()) - 1;
    std::vector<double> best(all + 1, INFINITY);
    best[0] = 0;
    for (unsigned set = 1; set <= all; ++set)
      for (unsigned part = set; part > 0; part = (part - 1) & set) {
        if (std::isinf(best[set ^ part]) || !(part & set & -set))
          continue;  // only parts that contain the first piece of the set
        PassShape shape{.stack_pairs = 0, .pieces = 0, .loss_rows = 0};
        int32_t deepest = -1;
        bool valid = true;
        for (size_t p = 0; p < pieces.size(); ++p) {
          if (!(part >> p & 1)) continue;
          add_range(indexed, pieces[p].range, shape);
          if (is_above(deepest, pieces[p].above)) deepest = pieces[p].above;
          else valid = valid && is_above(pieces[p].above, deepest);
        }
        if (!valid || shape.tokens > limit_) continue;
        if (deepest >= 0) shape.stack_rows = indexed.tree().depth[list[deepest].end - 1] + 1;
        best[set] = std::min(best[set], best[set ^ part] + leaf_seconds(shape));
      }
    return seconds + best[all];
  }

  const PlanRequest& request_;
  const PassCosts& costs_;
  int64_t limit_;
};

TEST(BlocksPlan, IsNearTheOptimumByBruteForce) {
  double sum = 0, worst = 0;
  int count = 0;
  for (uint64_t seed = 0; count < 1000; ++seed) {
    std::mt19937_64 random(seed + 77);
    const auto sequences = random_small_tree(seed, 8, 100);
    const auto spans = as_spans(sequences);
    const int64_t limit = 100 + static_cast<int64_t>(random() % 300);
    const TestCosts costs(static_cast<double>(random() % 100));
    const PlanRequest request{.sequences = spans, .max_tokens_per_pass = limit, .costs = &costs};
    IndexedTree whole(request);
    double ours = INFINITY;
    for (const int64_t size : {limit, limit / 2, limit / 4}) {
      const auto plan = finish_blocks(draft_blocks(whole, size), whole);
      validate(plan, spans);
      ours = std::min(ours, simulate(plan, &costs).seconds);
    }
    const double optimum = BruteForce(request, costs, limit).run();
    if (std::isinf(optimum)) continue;  // a run is longer than a pass; the brute force does not cut runs
    const double ratio = ours / optimum;
    sum += ratio;
    worst = std::max(worst, ratio);
    ++count;
  }
  RecordProperty("mean_ratio", str(sum / count));
  RecordProperty("worst_ratio", str(worst));
  std::cout << "blocks over the optimum: mean " << sum / count << ", worst " << worst << "\n";
  EXPECT_LE(sum / count, 1.05);
}

// A long path with short side branches. Executing one path at a time would leave a device underused.
TEST(BlocksPlan, FillsItsPassesFromAllAlongTheStack) {
  std::vector<std::vector<int32_t>> sequences;
  std::vector<int32_t> trunk;
  for (int32_t turn = 0; turn < 20; ++turn) {
    for (int32_t i = 0; i < 50; ++i) trunk.push_back(turn);
    auto branch = trunk;
    for (int32_t i = 0; i < 30; ++i) branch.push_back(100 + turn);
    sequences.push_back(branch);
  }
  const auto spans = as_spans(sequences);
  const auto simulation = simulate(make_plan("blocks", {.sequences = spans, .max_tokens_per_pass = 256}));
  const auto path = simulate(make_plan("path", {.sequences = spans, .max_tokens_per_pass = 256}));
  EXPECT_LE(simulation.num_passes, 12);  // 1,600 tokens; the first 1,350 tokens of the long path run twice
  EXPECT_GE(path.num_passes, 40);
}

}  // namespace
}  // namespace bough
