// Adversarial batches. They would reveal recursion as deep as a sequence is long, and time or memory that
// grows with the number of pairs of sequences.
//
// The tests count blocks, steps, ranges and passes, and bound the counts by the size of the tree. They do not
// assert times. At these sizes, any quadratic algorithm takes minutes, while the whole file takes seconds.
// Sequences are spans of one array.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>

#include "base/error.h"
#include "plan/dta_schedule.h"
#include "plan/load_balance.h"
#include "plan/packing.h"
#include "plan/plan.h"
#include "plan/test_costs.h"
#include "tree/branch_tree.h"
#include "tree/prefix_tree.h"

namespace bough {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(NDEBUG)
constexpr int64_t kShrink = 10;  // slow builds: sizes are divided by 10
constexpr bool kMeasureMemory = false;
#else
constexpr int64_t kShrink = 1;
constexpr bool kMeasureMemory = true;
#endif

struct Adversarial {
  std::string name;
  std::vector<int32_t> tokens;
  std::vector<TokenSpan> sequences;
  int64_t expected_tree_tokens = 0;

  int64_t num_flat_tokens() const {
    int64_t sum = 0;
    for (const auto& s : sequences) sum += static_cast<int64_t>(s.size());
    return sum;
  }
  int64_t longest() const {
    size_t most = 1;
    for (const auto& s : sequences) most = std::max(most, s.size());
    return static_cast<int64_t>(most);
  }
};
using Batch = std::unique_ptr<Adversarial>;

std::vector<int32_t> counting(int64_t count) {
  std::vector<int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

// All prefixes of one sequence.
Batch nested(int64_t count) {
  auto batch = std::make_unique<Adversarial>(Adversarial{"nested", counting(count), {}, count});
  for (int64_t n = 1; n <= count; ++n) batch->sequences.emplace_back(batch->tokens.data(), n);
  return batch;
}

Batch one_long(int64_t length) {
  auto batch = std::make_unique<Adversarial>(Adversarial{"one long", counting(length), {}, length});
  batch->sequences.emplace_back(batch->tokens);
  return batch;
}

Batch equal(int64_t count, int64_t length) {
  auto batch = std::make_unique<Adversarial>(Adversarial{"equal", counting(length), {}, length});
  batch->sequences.assign(count, TokenSpan(batch->tokens));
  return batch;
}

// `count` sequences. All begin with the same token. Their other `length` - 1 tokens differ.
Batch distinct(int64_t count, int64_t length) {
  const int64_t common = length > 1 ? 1 : 0;
  auto batch = std::make_unique<Adversarial>(
      Adversarial{"distinct", std::vector<int32_t>(count * length), {}, common + count * (length - common)});
  for (int64_t i = 0; i < count * length; ++i)
    batch->tokens[i] = i % length < common ? 0 : static_cast<int32_t>(1 + i / length);
  for (int64_t s = 0; s < count; ++s)
    batch->sequences.emplace_back(batch->tokens.data() + s * length, length);
  return batch;
}

// All suffixes of 0 … 0 1: a path of zeros with a leaf below each of its tokens.
Batch comb(int64_t depth) {
  auto batch =
      std::make_unique<Adversarial>(Adversarial{"comb", std::vector<int32_t>(depth + 1, 0), {}, 2 * depth});
  batch->tokens.back() = 1;
  for (int64_t i = 0; i < depth; ++i) batch->sequences.push_back(TokenSpan(batch->tokens).subspan(i));
  return batch;
}

// The peak memory of the process while `work` runs, minus its memory before, in bytes. nullopt if the system
// does not report memory.
std::optional<int64_t> peak_growth(const std::function<void()>& work) {
  const auto read = [](const std::string& key) -> int64_t {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;)
      if (int64_t kib = 0; word == key && status >> kib) return kib * 1024;
    return -1;
  };
  malloc_trim(0);
  const bool is_reset = static_cast<bool>(std::ofstream("/proc/self/clear_refs") << "5" << std::flush);
  const int64_t before = read("VmRSS:");
  work();
  const int64_t peak = read("VmHWM:");
  if (!kMeasureMemory || !is_reset || before < 0 || peak < 0) return std::nullopt;
  return peak - before;
}

struct Size {
  int64_t blocks = 0, steps = 0, ranges = 0, tokens = 0;
};
Size size_of(const Plan& plan) {
  Size size;
  for (const auto& planned : plan.trees) {
    size.blocks += std::ssize(planned.blocks);
    size.steps += std::ssize(planned.steps);
    size.tokens += planned.tree->num_tokens();
    for (const auto& block : planned.blocks) size.ranges += std::ssize(block.ranges);
  }
  return size;
}

// Makes a plan of the batch. Checks that its number of blocks is bounded by the tree's size and the pass
// size, and its memory by the size of its trees.
void expect_plan(const char* strategy, const Adversarial& batch, int64_t bound, bool is_validated,
                 const std::vector<uint8_t>& trained = {}) {
  SCOPED_TRACE(str(batch.name, ", ", strategy, ", passes of ", bound));
  PlanRequest request;
  request.sequences = batch.sequences;
  request.max_tokens_per_pass = bound;
  request.trained = trained;
  Plan plan;
  const auto grown = peak_growth([&] { plan = make_plan(strategy, request); });

  const auto tree = build_prefix_tree(batch.sequences);
  const int64_t num_nodes = BranchTree(tree).size();
  const Size size = size_of(plan);
  EXPECT_LE(size.steps, 2 * size.blocks);
  const std::string name = strategy;
  if (name == "dense") {
    EXPECT_EQ(size.tokens, batch.num_flat_tokens());
    EXPECT_LE(size.blocks, 3 * size.tokens / bound + 2);
    EXPECT_EQ(size.ranges, size.blocks);
  } else if (name == "packed") {
    EXPECT_LE(size.blocks, 2 * size.tokens / bound + 1);
  } else {
    EXPECT_EQ(size.tokens, batch.expected_tree_tokens);
    EXPECT_LE(size.blocks, name == "path" ? size.tokens / bound + num_nodes : 3 * size.tokens / bound + 2);
    EXPECT_LE(size.ranges, size.blocks + num_nodes);
  }
  if (grown) {
    const int64_t num_sequences = std::ssize(batch.sequences);
    EXPECT_LE(*grown, 64 * size.tokens + 1024 * num_sequences + (32 << 20))
        << size.tokens << " tokens in trees, " << num_sequences << " sequences, " << size.blocks << " blocks";
  }
  const auto simulation = simulate(plan);
  EXPECT_LE(simulation.num_passes, size.steps);
  EXPECT_LE(simulation.peak_pass_tokens, bound);
  EXPECT_LE(simulation.peak_stack_tokens, batch.longest());
  if (is_validated) validate(plan, batch.sequences);
}

struct Priced {
  bool is_validated = true;
  bool has_budgets = true;
  std::vector<uint8_t> trained = {};
};

// Lets `blocks` and `auto` choose the pass size, and prices `dense` and `packed`. Checks that memory stays
// within a few times the size of the tree and of the sequence indices. The flat batch of nested prefixes or
// of a comb has thousands of times the tree's tokens.
void expect_priced(const Adversarial& batch, int64_t bound, const Priced& options = {}) {
  SCOPED_TRACE(str(batch.name, ", passes of up to ", bound));
  const TestCosts costs(7000);  // like a GPU, on which a pass costs as much as thousands of tokens
  PlanRequest request;
  request.sequences = batch.sequences;
  request.trained = options.trained;
  request.max_tokens_per_pass = bound;
  request.costs = &costs;
  const int64_t num_tokens = std::min(batch.num_flat_tokens(), 4 * batch.expected_tree_tokens);
  const auto simulated = [&](const char* strategy) {
    SCOPED_TRACE(strategy);
    std::optional<Plan> plan;
    std::optional<UserError> refused;
    const auto grown = peak_growth([&] {
      try {
        plan = make_plan(strategy, request);
      } catch (const UserError& error) {
        refused = error;
      }
    });
    if (grown) {
      EXPECT_LE(*grown, 192 * num_tokens + 1536 * std::ssize(batch.sequences) + (32 << 20));
    }
    if (refused) throw *refused;
    const Size size = size_of(*plan);
    const auto simulation = simulate(*plan, &costs);
    EXPECT_LE(plan->max_tokens_per_pass, bound);
    EXPECT_LE(simulation.peak_pass_tokens, plan->max_tokens_per_pass);
    EXPECT_LE(simulation.peak_stack_tokens, batch.longest());
    EXPECT_LE(simulation.num_passes, size.steps);
    EXPECT_LE(size.steps, 2 * size.blocks);
    EXPECT_TRUE(std::isfinite(simulation.seconds));
    if (options.is_validated) validate(*plan, batch.sequences);
    return simulation;
  };
  const auto blocks = simulated("blocks"), best = simulated("auto");
  EXPECT_LE(best.seconds, kAsFast * blocks.seconds);
  if (best.num_passes == 0 || !options.has_budgets) return;

  // A plan is made or refused. With the memory that the refusal names, a plan is made.
  for (const int64_t budget : {best.peak_bytes, best.peak_bytes / 2, int64_t{1}}) {
    SCOPED_TRACE(str("budget ", budget));
    request.memory_bytes = budget;
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        EXPECT_LE(simulated("auto").peak_bytes, *request.memory_bytes);
        break;
      } catch (const UserError& error) {
        EXPECT_LT(budget, best.peak_bytes);
        EXPECT_EQ(attempt, 0) << error.what();
        const std::string text = error.what(), before = "the smallest budget that fits is ";
        const size_t at = text.find(before);
        ASSERT_NE(at, std::string::npos) << text;
        request.memory_bytes = std::stoll(text.substr(at + before.size()));
        EXPECT_GT(*request.memory_bytes, budget);
      }
    }
  }
}

void expect_packings(const Adversarial& batch, const PrefixTree& tree, int64_t capacity) {
  const std::pair<const char*, Packing (*)(const PrefixTree&, int64_t)> packers[] = {
      {"pack", pack},
      {"depth first", pack_depth_first},
      {"first fit", pack_first_fit_decreasing},
      {"single path", pack_single_path}};
  std::vector<std::pair<std::string, Packing>> packings;
  for (const auto& [name, packer] : packers) packings.emplace_back(name, packer(tree, capacity));
  // The exact packer gives up after a bounded number of steps. It must not crash before that.
  if (auto exact = pack_exact(tree, capacity, 20)) packings.emplace_back("exact", std::move(*exact));
  for (const auto& [name, packing] : packings) {
    SCOPED_TRACE(str(batch.name, ", ", name, ", capacity ", capacity));
    std::vector<uint8_t> seen(batch.sequences.size(), 0);
    int64_t num_tokens = 0;
    for (const auto& bin : packing.bins) {
      EXPECT_LE(bin.num_tokens, capacity);
      num_tokens += bin.num_tokens;
      for (const int64_t s : bin.sequences) ++seen[s];
    }
    EXPECT_EQ(num_tokens, packing.num_tokens);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), std::ssize(seen));
    EXPECT_GE(num_tokens, tree.num_tokens());
    EXPECT_LE(num_tokens, batch.num_flat_tokens());
    if (name == "exact") {
      EXPECT_LE(num_tokens, packings[0].second.num_tokens);
    }
  }
}

void expect_balance(const Adversarial& batch, const PrefixTree& tree, int64_t num_ranks) {
  using Balance = std::vector<RankShare> (*)(const PrefixTree&, int64_t, const BalanceWeights&);
  const std::pair<const char*, Balance> ways[] = {{"Algorithm 4", balance_load},
                                                  {"by tree cost", balance_by_tree_cost},
                                                  {"by length", balance_by_length}};
  for (const auto& [name, way] : ways) {
    SCOPED_TRACE(str(batch.name, ", ", name, ", ", num_ranks, " ranks"));
    const auto shares = way(tree, num_ranks, {1, 1e-4});
    ASSERT_EQ(std::ssize(shares), num_ranks);
    std::vector<uint8_t> seen(batch.sequences.size(), 0);
    int64_t num_tokens = 0;
    for (const auto& share : shares) {
      num_tokens += share.num_tokens;
      EXPECT_TRUE(std::isfinite(share.cost));
      for (const int64_t s : share.sequences) ++seen[s];
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), std::ssize(seen));
    EXPECT_GE(num_tokens, tree.num_tokens());
    if (way == balance_load) {
      EXPECT_LE(num_tokens, tree.num_tokens() + (num_ranks - 1) * batch.longest());
    }
  }
}

struct Options {
  std::vector<int64_t> bounds = {16, 1024};
  bool dense = true;
  bool is_validated = true;
};

void expect_all(const Adversarial& batch, const Options& options = {}) {
  const auto tree = build_prefix_tree(batch.sequences);
  ASSERT_EQ(tree.num_tokens(), batch.expected_tree_tokens) << batch.name;
  ASSERT_EQ(tree.num_sequences_total(), std::ssize(batch.sequences));
  const auto statistics = compute_statistics(tree);
  for (const double ratio : {statistics.compression, statistics.attention_compression,
                             statistics.potential_overlap_ratio, statistics.mean_depth})
    EXPECT_TRUE(std::isfinite(ratio)) << batch.name;
  const int64_t longest = batch.longest();
  for (const int64_t bound : options.bounds) {
    for (const char* strategy : {"path", "blocks"}) expect_plan(strategy, batch, bound, options.is_validated);
    if (options.dense) expect_plan("dense", batch, bound, options.is_validated);
    const auto dta = simulate_dta(tree, {.block_size = bound});
    EXPECT_EQ(dta.num_leaves, BranchTree(tree).visit().size());
    EXPECT_LE(std::ssize(dta.passes), 3 * dta.num_leaves + tree.num_tokens() / bound);
    if (longest > bound) {
      PlanRequest request;
      request.sequences = batch.sequences;
      request.max_tokens_per_pass = bound;
      EXPECT_THROW(make_plan("packed", request), UserError);
    }
  }
  for (const int64_t capacity : {std::max<int64_t>(16, longest), 2 * longest + 1000}) {
    expect_plan("packed", batch, capacity, options.is_validated);
    expect_packings(batch, tree, capacity);
  }
  for (const int64_t num_ranks : {1, 8, 1000}) expect_balance(batch, tree, num_ranks);
}

TEST(Adversarial, TenThousandNestedPrefixesOfFiftyMillionTokens) {
  const auto batch = nested(10'000 / kShrink);
  expect_all(*batch, {.bounds = {1024}});
  expect_plan("blocks", *batch, 16, false);
  expect_plan("path", *batch, 16, false);
}

TEST(Adversarial, OneSequenceOfAMillionTokens) {
  expect_all(*one_long(1'000'000 / kShrink));
}

TEST(Adversarial, AHundredThousandEqualSequences) {
  expect_all(*equal(100'000 / kShrink, 20));
}

TEST(Adversarial, AllEmpty) {
  const auto batch = equal(100'000 / kShrink, 0);
  expect_all(*batch);
  PlanRequest request;
  request.sequences = batch->sequences;
  for (const char* strategy : {"dense", "packed", "path", "blocks", "auto"}) {
    const auto plan = make_plan(strategy, request);
    EXPECT_EQ(size_of(plan).blocks, 0) << strategy;
    EXPECT_EQ(simulate(plan).num_passes, 0) << strategy;
  }
}

TEST(Adversarial, NoSequences) {
  for (const char* strategy : {"dense", "packed", "path", "blocks", "auto"}) {
    const auto plan = make_plan(strategy, {});
    validate(plan, {});
    EXPECT_EQ(size_of(plan).blocks, 0) << strategy;
  }
}

TEST(Adversarial, OneTokenEach) {
  expect_all(*distinct(100'000 / kShrink, 1));
  expect_all(*equal(100'000 / kShrink, 1));
}

// A branch point with 100,000 children; two of them fit into a packed tree of 16 tokens.
TEST(Adversarial, AHundredThousandChildren) {
  expect_all(*distinct(100'000 / kShrink, 8));
}

TEST(Adversarial, ACombOfFiftyThousandTeeth) {
  // The flat batch has 1.25 G tokens. `dense` would hold them all and `validate` would compare each, so both
  // are skipped.
  expect_all(*comb(50'000 / kShrink), {.dense = false, .is_validated = false});
  expect_all(*comb(2'000 / kShrink));
}

// The training flags, one per flat token, are read once per batch, not once per tree of the plan.
TEST(Adversarial, FlagsOverManyTrees) {
  const auto batch = distinct(20'000 / kShrink, 8);
  const std::vector<uint8_t> trained(batch->num_flat_tokens(), 1);
  for (const char* strategy : {"dense", "packed", "path", "blocks"})
    expect_plan(strategy, *batch, 16, true, trained);
}

// The plans of the tests below are made with a cost model.

TEST(Adversarial, PricedNestedPrefixes) {
  const auto batch = nested(10'000 / kShrink);
  for (const int64_t bound : {16, 1024}) expect_priced(*batch, bound, {.is_validated = false});
  const auto few = nested(1'000 / kShrink);
  expect_priced(*few, 64, {.trained = std::vector<uint8_t>(few->num_flat_tokens(), 1)});
}

TEST(Adversarial, PricedSequenceOfAMillionTokens) {
  const auto batch = one_long(1'000'000 / kShrink);
  for (const int64_t bound : {16, 1024}) expect_priced(*batch, bound);
}

TEST(Adversarial, PricedEqualSequences) {
  const auto batch = equal(100'000 / kShrink, 20);
  for (const int64_t bound : {16, 1024}) expect_priced(*batch, bound);
}

TEST(Adversarial, PricedDistinctSequences) {
  const auto batch = distinct(100'000 / kShrink, 8);
  for (const int64_t bound : {16, 1024}) expect_priced(*batch, bound, {.has_budgets = false});
}

TEST(Adversarial, PricedDistinctSequencesWithFlagsAndBudgets) {
  const auto batch = distinct(20'000 / kShrink, 8);
  std::vector<uint8_t> trained(batch->num_flat_tokens());
  for (size_t i = 0; i < trained.size(); ++i) trained[i] = i % 3 == 0;
  for (const int64_t bound : {16, 1024}) expect_priced(*batch, bound, {.trained = trained});
}

TEST(Adversarial, PricedEmptyAndOneTokenSequences) {
  for (const int64_t bound : {16, 1024}) {
    expect_priced(*equal(100'000 / kShrink, 0), bound);
    expect_priced(*equal(100'000 / kShrink, 1), bound);
    expect_priced(*distinct(100'000 / kShrink, 1), bound);
  }
}

TEST(Adversarial, PricedComb) {
  expect_priced(*comb(50'000 / kShrink), 1024, {.is_validated = false, .has_budgets = false});
  expect_priced(*comb(10'000 / kShrink), 1024, {.is_validated = false});
  expect_priced(*comb(2'000 / kShrink), 16);
}

}  // namespace
}  // namespace bough
