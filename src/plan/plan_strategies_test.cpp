#include "plan/plan_strategies.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "plan/simulator.h"
#include "plan/test_costs.h"
#include "tree/random_tree.h"

namespace bough {
namespace {

void expect_same(const Simulation& ours, const Simulation& plans) {
  EXPECT_EQ(ours.num_passes, plans.num_passes);
  EXPECT_EQ(ours.tokens_forwarded, plans.tokens_forwarded);
  EXPECT_EQ(ours.tokens_recomputed, plans.tokens_recomputed);
  EXPECT_EQ(ours.peak_stack_tokens, plans.peak_stack_tokens);
  EXPECT_EQ(ours.peak_pass_tokens, plans.peak_pass_tokens);
  EXPECT_EQ(ours.peak_kept_tokens, plans.peak_kept_tokens);
  EXPECT_EQ(ours.seconds, plans.seconds);  // equal bits: the same terms in the same order
  EXPECT_EQ(ours.peak_bytes, plans.peak_bytes);
}

// Random training flags: all tokens train, a third of them, or a third of the tokens in about half of the
// sequences.
std::vector<uint8_t> random_flags(uint64_t seed, const std::vector<TokenSpan>& sequences) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> flags;
  if (seed % 3 == 0) return flags;
  for (const auto& sequence : sequences) {
    const bool idle = seed % 3 == 1 && random() % 2 == 0;
    for (size_t i = 0; i < sequence.size(); ++i) flags.push_back(!idle && random() % 3 == 0);
  }
  return flags;
}

// Recounts a block's statistics token by token.
void expect_counted(const Plan& plan, const PlanRequest& request) {
  std::vector<int64_t> offsets = {0};
  for (const auto& sequence : request.sequences) offsets.push_back(offsets.back() + std::ssize(sequence));
  for (const auto& planned : plan.trees) {
    const auto& tree = *planned.tree;
    std::vector<int64_t> rows(tree.num_tokens(), 0);  // number of sequences that train the token
    for (size_t i = 0; i < planned.sequences.size(); ++i) {
      const auto path = tree.path(static_cast<int64_t>(i));
      for (size_t t = 1; t < path.size(); ++t)
        rows[path[t]] += request.trained.empty() || request.trained[offsets[planned.sequences[i]] + t] != 0;
    }
    for (const auto& block : planned.blocks) {
      std::vector<uint8_t> inside(tree.num_tokens(), 0);
      for (const auto& range : block.ranges)
        std::fill(inside.begin() + range.begin, inside.begin() + range.end, 1);
      Block counted;
      std::vector<uint8_t> has_boundary(tree.num_tokens(), 0);
      // keys outside the block that the token attends to
      std::vector<int32_t> keys_outside(tree.num_tokens(), 0);
      bool below = false;
      for (int32_t t = 0; t < tree.num_tokens(); ++t) {
        const int32_t parent = tree.parent[t];
        if (!inside[t]) {
          if (parent >= 0 && inside[parent] && rows[t] > 0) has_boundary[parent] = 1;
          below |= block.interior && rows[t] > 0 && t >= block.ranges.front().begin &&
                   t < tree.subtree_end[block.ranges.front().begin];
          continue;
        }
        ++counted.num_tokens;
        counted.num_pairs += tree.depth[t] + 1;
        keys_outside[t] = parent >= 0 && inside[parent] ? keys_outside[parent] : tree.depth[t];
        counted.num_stack_pairs += keys_outside[t];
        counted.num_pieces += t == 0 || !inside[t - 1] || parent != t - 1;
        counted.num_head_rows += rows[t] > 0;
        counted.num_loss_rows += rows[t];
      }
      for (const uint8_t exit : has_boundary) counted.num_boundary_tokens += exit;
      EXPECT_EQ(block.num_tokens, counted.num_tokens);
      EXPECT_EQ(block.num_pairs, counted.num_pairs);
      EXPECT_EQ(block.num_stack_pairs, counted.num_stack_pairs);
      EXPECT_EQ(block.num_pieces, counted.num_pieces);
      EXPECT_EQ(block.num_head_rows, counted.num_head_rows);
      EXPECT_EQ(block.num_loss_rows, counted.num_loss_rows);
      EXPECT_EQ(block.num_boundary_tokens, block.interior ? counted.num_boundary_tokens : 0);
      EXPECT_EQ(block.needed, counted.num_head_rows > 0 || below);
    }
  }
}

// Algorithm 1 of papers/areal-async.zh.txt as printed: lists of lengths, with linear search.
std::vector<std::vector<int64_t>> allocated_as_printed(std::vector<int64_t> lengths, int64_t capacity,
                                                       size_t least) {
  std::ranges::sort(lengths, std::greater{});
  std::vector<std::vector<int64_t>> micro_batches;
  const auto total = [](const std::vector<int64_t>& list) {
    return std::accumulate(list.begin(), list.end(), int64_t{0});
  };
  for (const int64_t length : lengths) {
    std::vector<int64_t>* chosen = nullptr;
    for (auto& list : micro_batches)
      if (total(list) + length <= capacity &&
          (!chosen || std::pair(list.size(), total(list)) < std::pair(chosen->size(), total(*chosen))))
        chosen = &list;
    if (micro_batches.size() < least || !chosen) micro_batches.push_back({length});
    else chosen->push_back(length);
  }
  return micro_batches;
}

TEST(DenseLayout, IsTheDynamicAllocationOfThePaper) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto sequences = random_sequences(seed, seed % 5 == 0 ? 2000 : 200);
    PlanRequest request{.sequences = as_spans(sequences)};
    std::vector<int64_t> lengths;
    for (const auto& sequence : sequences)
      if (!sequence.empty()) lengths.push_back(std::ssize(sequence));
    for (const int64_t limit : {1, 16, 100, 3000})
      for (const int64_t least : {1, 3, 1000}) {
        request.num_micro_batches = least;
        std::vector<std::vector<int64_t>> got;
        for (const auto& micro_batch : lay_out_dense(request, limit).micro_batches) {
          got.emplace_back();
          for (const int64_t s : micro_batch) got.back().push_back(std::ssize(sequences[s]));
        }
        ASSERT_EQ(got, allocated_as_printed(lengths, limit, static_cast<size_t>(least)))
            << "seed " << seed << " limit " << limit << " least " << least;
        validate(make_plan("dense", request), request.sequences);
      }
  }
}

TEST(DenseLayout, AFixedNumberOfMicroBatchesIsExact) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto sequences = random_sequences(seed, 300);
    const int64_t count = std::ranges::count_if(sequences, [](const auto& s) { return !s.empty(); });
    for (const int64_t wanted : {1, 2, 7, 1000}) {
      const PlanRequest request{.sequences = as_spans(sequences),
                                .max_tokens_per_pass = 4,
                                .num_micro_batches = wanted,
                                .fixed_micro_batches = true};
      const Plan plan = make_plan("dense", request);
      validate(plan, request.sequences);
      ASSERT_EQ(std::ssize(plan.trees[0].blocks), std::min(wanted, count));
      std::vector<int64_t> pieces, order = plan.trees[0].sequences;
      for (const Block& block : plan.trees[0].blocks) pieces.push_back(block.num_pieces);
      if (!pieces.empty()) {
        const auto [low, high] = std::ranges::minmax(pieces);
        EXPECT_LE(high - low, 1);
      }
      order.resize(static_cast<size_t>(count));
      EXPECT_TRUE(std::ranges::is_sorted(order));
    }
  }
}

TEST(Strategies, PriceDenseAndPackedAsTheirPlansWhoseBlocksAreCounted) {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE(str("seed ", seed));
    const auto sequences = random_sequences(seed, seed % 5 == 0 ? 2000 : 200);
    const TestCosts costs(static_cast<double>(seed % 2 == 0 ? seed % 100 : 7000));
    PlanRequest request{.sequences = as_spans(sequences), .costs = &costs};
    request.trained = random_flags(seed, request.sequences);
    const IndexedTree whole(request);
    for (const int64_t limit : {1, 3, 16, 100, 3000}) {
      SCOPED_TRACE(str("limit ", limit));
      request.max_tokens_per_pass = limit;
      const auto dense = plan_dense(request, limit);
      validate(dense, request.sequences);
      if (seed < 60 && limit > 1) expect_counted(dense, request);
      expect_same(simulate_dense(request, limit), simulate(dense, &costs));
      for (const auto packer : packer_names()) {
        // The exact packer is slow on large trees. For the other packers 100 seeds are enough to get bins
        // that differ from those of `auto`.
        if (packer != "auto" && (seed >= 100 || (packer == "exact" && sequences.size() > 10))) continue;
        SCOPED_TRACE(packer);
        request.packer = packer;
        std::optional<Plan> packed;
        try {
          packed = plan_packed(whole, limit);
        } catch (const UserError&) {  // a path is longer than a pass, or the batch is too large for `exact`
          continue;
        }
        validate(*packed, request.sequences);
        if (seed < 60) expect_counted(*packed, request);
        expect_same(simulate_packed(whole, limit), simulate(*packed, &costs));
      }
    }
    if (testing::Test::HasFailure()) break;
  }
}

TEST(Strategies, BlocksOfPathAndBlocksAreCounted) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(str("seed ", seed));
    const auto sequences = random_sequences(seed, 300);
    const TestCosts costs(static_cast<double>(seed % 2 == 0 ? seed % 100 : 0));
    PlanRequest request{.sequences = as_spans(sequences), .costs = &costs};
    request.trained = random_flags(seed, request.sequences);
    IndexedTree whole(request);
    for (const int64_t limit : {3, 16, 100}) {
      SCOPED_TRACE(str("limit ", limit));
      request.max_tokens_per_pass = limit;
      expect_counted(plan_path(whole, limit), request);
      expect_counted(finish_blocks(draft_blocks(whole, limit), whole), request);
    }
    if (testing::Test::HasFailure()) break;
  }
}

TEST(Strategies, EveryNameIsAcceptedAndUnknownOnesAreRefused) {
  for (const auto name : strategy_names()) {
    EXPECT_NO_THROW(check_strategy("--mode", name));
    EXPECT_NO_THROW(make_plan(name, {}));
  }
  try {
    make_plan("paths", {});
    FAIL();
  } catch (const UserError& error) {
    EXPECT_EQ(std::string(error.what()),
              "tree_training_mode: got 'paths', expected auto, dense, packed, path or blocks");
  }
}

}  // namespace
}  // namespace bough
