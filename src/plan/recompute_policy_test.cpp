// Recompute policies within a memory budget: the plan fits, and layers are recomputed only if every plan
// without recomputed layers is slower or does not fit.
#include "plan/recompute_policy.h"

#include <gtest/gtest.h>

#include <array>
#include <random>

#include "base/error.h"
#include "plan/test_costs.h"
#include "tree/random_tree.h"

namespace bough {
namespace {

int64_t least_memory(const std::string& strategy, PlanRequest request) {
  request.memory_bytes = 1;
  try {
    make_plan(strategy, request);
  } catch (const UserError& error) {
    const std::string text = error.what(), before = "the smallest budget that fits is ";
    return std::stoll(text.substr(text.find(before) + before.size()));
  }
  return 0;
}

int64_t num_of(const Plan& plan, RecomputePolicy keep) {
  int64_t count = 0;
  for (const auto& planned : plan.trees)
    for (const auto& block : planned.blocks) count += block.keep == keep;
  return count;
}

int64_t num_by_layer(const Plan& plan) {
  int64_t count = 0;
  for (const auto& planned : plan.trees)
    for (const auto& block : planned.blocks) count += recomputes_layers(block.keep);
  return count;
}

std::vector<std::vector<int32_t>> group(int32_t num_samples, int32_t prompt, int32_t length) {
  std::vector<std::vector<int32_t>> sequences;
  for (int32_t s = 0; s < num_samples; ++s) {
    auto& sequence = sequences.emplace_back();
    for (int32_t i = 0; i < prompt; ++i) sequence.push_back(i);
    for (int32_t i = 0; i < length; ++i) sequence.push_back(1000 + 1000 * s + i);
  }
  return sequences;
}

// A device whose passes cost so much that a few large passes with recomputed layers beat many small ones.
TEST(RecomputePolicies, LargePassesThatRecomputeLayersBeatManySmallOnes) {
  const TestCosts costs(/*overhead=*/3000);
  const auto sequences = group(64, 200, 100);
  for (const char* strategy : {"dense", "packed", "blocks", "auto"}) {
    SCOPED_TRACE(strategy);
    PlanRequest request{.sequences = as_spans(sequences),
                        .max_tokens_per_pass = 4096,
                        .memory_bytes = 4'600'000,
                        .costs = &costs};
    const Plan pays = make_plan(strategy, request);
    request.layers = LayerRecompute::kNever;
    const Plan never = make_plan(strategy, request);
    EXPECT_GT(num_by_layer(pays), 0);
    EXPECT_EQ(num_by_layer(never), 0);
    EXPECT_GT(pays.max_tokens_per_pass, never.max_tokens_per_pass);
    EXPECT_LT(simulate(pays, &costs).seconds, 0.9 * simulate(never, &costs).seconds);
    EXPECT_LE(simulate(pays, &costs).peak_bytes, *request.memory_bytes);
  }
}

TEST(RecomputePolicies, NothingIsRecomputedWithoutABudgetOrWithEnoughMemory) {
  const TestCosts costs(400);
  const auto sequences = group(16, 200, 100);
  for (const std::string strategy : {"dense", "packed", "path", "blocks", "auto"})
    for (const auto memory : {std::optional<int64_t>(), std::optional<int64_t>(1 << 30)}) {
      PlanRequest request{.sequences = as_spans(sequences),
                          .max_tokens_per_pass = 700,
                          .memory_bytes = memory,
                          .costs = &costs};
      const Plan pays = make_plan(strategy, request);
      request.layers = LayerRecompute::kNever;
      const Plan never = make_plan(strategy, request);
      EXPECT_EQ(num_by_layer(pays), 0) << strategy;
      EXPECT_EQ(pays.max_tokens_per_pass, never.max_tokens_per_pass) << strategy;
      EXPECT_EQ(simulate(pays, &costs).seconds, simulate(never, &costs).seconds) << strategy;
    }
}

TEST(RecomputePolicies, AlwaysRecomputesEveryBlockWithAndWithoutCosts) {
  const TestCosts costs;
  const auto sequences = group(16, 200, 100);
  for (const std::string strategy : {"dense", "packed", "path", "blocks", "auto"})
    for (const PassCosts* of_plan :
         {static_cast<const PassCosts*>(nullptr), static_cast<const PassCosts*>(&costs)}) {
      const Plan plan = make_plan(strategy, {.sequences = as_spans(sequences),
                                             .max_tokens_per_pass = 320,
                                             .costs = of_plan,
                                             .layers = LayerRecompute::kAlways});
      int64_t count = 0;
      for (const auto& planned : plan.trees) count += std::ssize(planned.blocks);
      EXPECT_EQ(num_by_layer(plan), count) << strategy;
    }
}

// Random trees and budgets. A plan never exceeds the budget and is never slower than the plan with
// LayerRecompute::kNever. Some budgets are feasible only if layers may be recomputed.
TEST(RecomputePolicies, PlansStayWithinTheBudgetAndAreNoSlowerThanWithoutRecompute) {
  int64_t num_faster = 0, num_only = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto sequences = random_sequences(seed, 400);
    std::mt19937_64 random(seed);
    const TestCosts costs(static_cast<double>(random() % 200));
    const std::string strategy = std::array{"dense", "path", "blocks", "auto"}[random() % 4];
    PlanRequest request{.sequences = as_spans(sequences), .max_tokens_per_pass = 512, .costs = &costs};
    SCOPED_TRACE(str(strategy, " seed ", seed));
    const int64_t least = least_memory(strategy, request);
    PlanRequest whole = request;
    whole.layers = LayerRecompute::kNever;
    const int64_t least_whole = least_memory(strategy, whole);
    EXPECT_LE(least, least_whole);
    request.memory_bytes = least - 1;
    EXPECT_THROW(make_plan(strategy, request), UserError);
    for (const int64_t memory : {least, (least + least_whole) / 2, least_whole + 1, 2 * least_whole}) {
      request.memory_bytes = whole.memory_bytes = memory;
      const Plan plan = make_plan(strategy, request);
      validate(plan, request.sequences);
      const Simulation priced = simulate(plan, &costs);
      EXPECT_LE(priced.peak_bytes, memory);
      if (memory < least_whole) {
        num_only += num_by_layer(plan) > 0;
        continue;
      }
      const double seconds = simulate(make_plan(strategy, whole), &costs).seconds;
      EXPECT_LE(priced.seconds, kAsFast * seconds);
      num_faster += priced.seconds < 0.95 * seconds;
    }
  }
  EXPECT_GT(num_faster, 20);
  EXPECT_GT(num_only, 100);
}

// A device with separate host memory. With offloading, smaller budgets are feasible. Plans that fit without
// host memory do not use it. The bytes on the device stay within the budget.
TEST(RecomputePolicies, LayerInputsAreOnTheHostIfNothingElseFits) {
  int64_t num_only = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto sequences = random_sequences(seed, 400);
    std::mt19937_64 random(seed);
    const TestCosts costs(static_cast<double>(random() % 200), /*has_host=*/true);
    const std::string strategy = std::array{"dense", "path", "packed", "blocks", "auto"}[random() % 5];
    PlanRequest request{.sequences = as_spans(sequences), .max_tokens_per_pass = 512, .costs = &costs};
    request.layers = random() % 3 == 0 ? LayerRecompute::kAlways : LayerRecompute::kWherePays;
    SCOPED_TRACE(str(strategy, " seed ", seed));
    PlanRequest here = request;
    here.offload = ActivationOffload::kNever;
    const int64_t least = least_memory(strategy, request), least_here = least_memory(strategy, here);
    EXPECT_LE(least, least_here);
    for (const int64_t memory : {least, (least + least_here) / 2, least_here, 4 * least_here}) {
      request.memory_bytes = here.memory_bytes = memory;
      const Plan plan = make_plan(strategy, request);
      validate(plan, request.sequences);
      const Simulation priced = simulate(plan, &costs);
      EXPECT_LE(priced.peak_bytes, memory);
      EXPECT_EQ(priced.num_on_host, num_of(plan, RecomputePolicy::kLayerInputsOnHost));
      if (memory < least_here) {
        EXPECT_GT(priced.num_on_host, 0);
        ++num_only;
      } else {
        EXPECT_LE(priced.seconds, kAsFast * simulate(make_plan(strategy, here), &costs).seconds);
        EXPECT_EQ(num_of(make_plan(strategy, here), RecomputePolicy::kLayerInputsOnHost), 0);
      }
    }
    request.memory_bytes = 1 << 30;
    EXPECT_EQ(num_of(make_plan(strategy, request), RecomputePolicy::kLayerInputsOnHost), 0);
    request.offload = ActivationOffload::kAlways;
    const Plan all = make_plan(strategy, request);
    EXPECT_EQ(num_of(all, RecomputePolicy::kLayerInputsOnHost), num_by_layer(all));
    EXPECT_EQ(num_by_layer(all) > 0, request.layers == LayerRecompute::kAlways);
  }
  EXPECT_GT(num_only, 50);
}

}  // namespace
}  // namespace bough
