// Cost of planning: counts that are equal on every machine, and CPU time with a margin of a factor of ten.
#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <random>

#include "base/error.h"
#include "cost/cost_model.h"
#include "plan/plan_strategies.h"
#include "plan/simulator.h"
#include "tree/random_tree.h"

namespace bough {
namespace {

CostModel h100_costs() {
  return CostModel(built_in_profile("h100", "bf16"), named_model_shape("small", "bf16"));
}

// All sequences begin with the same `common` tokens. Each group of `samples` sequences has half of the
// remaining `length` - `common` tokens in common.
std::vector<std::vector<int32_t>> groups(int64_t num_tokens, int64_t common, int64_t samples,
                                         int64_t length) {
  std::mt19937_64 random(1);
  std::vector<std::vector<int32_t>> batch;
  std::vector<int32_t> first(common, 7);
  const auto append = [&](std::vector<int32_t>& to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to.push_back(static_cast<int32_t>(100 + random() % 30000));
  };
  for (int64_t tokens = 0; tokens < num_tokens; tokens += samples * length) {
    auto head = first;
    if (samples > 1) append(head, (length - common) / 2);
    for (int64_t i = 0; i < samples; ++i) {
      batch.push_back(head);
      append(batch.back(), length - std::ssize(head));
    }
  }
  std::shuffle(batch.begin(), batch.end(), random);
  return batch;
}

size_t num_blocks(const Plan& plan) {
  size_t count = 0;
  for (const auto& planned : plan.trees) count += planned.blocks.size();
  return count;
}

struct Case {
  const char* name;
  int64_t common, samples, length;
};
constexpr Case kCases[] = {{"flat", 0, 1, 244},
                           {"groups of 16", 0, 16, 64},
                           {"a template of 4 tokens", 4, 1, 244},
                           {"a template and groups", 4, 16, 40},
                           {"short", 0, 1, 8}};

// A draft, a plan that the planner is still comparing, has no trees. Only the chosen plan gets them.
TEST(PlanSpeed, DraftsHaveNoTrees) {
  const auto costs = h100_costs();
  size_t most_parts = 0;
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    const auto sequences = groups(50'000, c.common, c.samples, c.length);
    const PlanRequest request{.sequences = as_spans(sequences), .max_tokens_per_pass = 1024, .costs = &costs};
    IndexedTree whole(request);
    for (const int64_t size : {16, 64, 256, 1024}) {
      auto draft = draft_blocks(whole, size);
      for (const auto& planned : draft.plan.trees) EXPECT_EQ(planned.tree, nullptr);
      most_parts = std::max(most_parts, draft.parts.size());
      const auto priced = simulate(draft.plan, &costs);
      const auto plan = finish_blocks(std::move(draft), whole);
      EXPECT_EQ(simulate(plan, &costs).seconds, priced.seconds);
      validate(plan, request.sequences);
    }
  }
  EXPECT_GT(most_parts, 200);  // otherwise the test shows nothing
}

// If the budget suffices only for passes of 16 tokens, drafts with larger ones are given up after a few
// blocks.
TEST(PlanSpeed, DraftsOverTheirMemoryAreGivenUpEarly) {
  const auto costs = h100_costs();
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    const auto sequences = groups(50'000, c.common, c.samples, c.length);
    const PlanRequest request{.sequences = as_spans(sequences), .max_tokens_per_pass = 1024, .costs = &costs};
    IndexedTree whole(request);
    const auto smallest = draft_blocks(whole, 16);
    const int64_t budget = simulate(smallest.plan, &costs).peak_bytes;
    EXPECT_TRUE(draft_blocks(whole, 16, budget).fits);
    for (const int64_t size : {128, 256, 512, 1024}) {
      const auto draft = draft_blocks(whole, size, budget);
      EXPECT_FALSE(draft.fits) << size;
      EXPECT_LE(num_blocks(draft.plan), 64) << size;
    }
    EXPECT_GT(num_blocks(smallest.plan), 1000);
  }
}

// A draft is given up only if the peak memory of its complete plan exceeds the limit.
TEST(PlanSpeed, GivesUpOnlyDraftsThatDoNotFit) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(str("seed ", seed));
    const auto sequences = random_sequences(seed, seed % 5 == 0 ? 2000 : 200);
    const auto costs = h100_costs();
    PlanRequest request{.sequences = as_spans(sequences), .max_tokens_per_pass = 1024, .costs = &costs};
    std::mt19937_64 random(seed);
    if (seed % 2 == 0)
      for (const auto& sequence : sequences)
        for (size_t i = 0; i < sequence.size(); ++i) request.trained.push_back(random() % 3 == 0);
    IndexedTree whole(request);
    for (const int64_t size : {1, 16, 100}) {
      const int64_t peak = simulate(draft_blocks(whole, size).plan, &costs).peak_bytes;
      EXPECT_TRUE(draft_blocks(whole, size, peak).fits) << size;
    }
  }
}

// The planner stops adding up a draft's seconds when the draft can no longer be the fastest.
TEST(PlanSpeed, SlowerOnesAreNotTimedToTheEnd) {
  const auto costs = h100_costs();
  const auto sequences = groups(50'000, 0, 1, 244);
  const PlanRequest request{.sequences = as_spans(sequences), .costs = &costs};
  const auto whole = simulate_dense(request, 16);
  const auto cut = simulate_dense(request, 16, {}, whole.seconds / 100);
  EXPECT_GT(cut.seconds, whole.seconds / 100);
  EXPECT_LT(cut.seconds, whole.seconds / 50);
  EXPECT_EQ(cut.peak_bytes, whole.peak_bytes);
  EXPECT_EQ(simulate_dense(request, 16, {}, whole.seconds).seconds, whole.seconds);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(NDEBUG)
constexpr bool kMeasuresTime = false;
#else
constexpr bool kMeasuresTime = true;
#endif

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// On an idle machine, 1 M tokens in 4,096 sequences take under 0.1 s (bench/tree_build.cpp), also with the
// smallest memory budget that suffices. An algorithm that reads all sequences for each sequence would take
// minutes.
TEST(PlanSpeed, AMillionTokensInFourThousandSequences) {
  if (!kMeasuresTime) GTEST_SKIP() << "only in release builds";
  const auto costs = h100_costs();
  for (const Case& c : {kCases[0], kCases[2], Case{"groups", 0, 16, 244}}) {
    SCOPED_TRACE(c.name);
    const auto sequences = groups(1'000'000, c.common, c.samples, c.length);
    PlanRequest request{.sequences = as_spans(sequences), .max_tokens_per_pass = 1024, .costs = &costs};
    for (const bool is_tight : {false, true}) {
      if (is_tight) {
        request.memory_bytes = 1;
        try {
          make_plan("auto", request);
        } catch (const UserError& error) {
          const std::string text = error.what(), before = "the smallest budget that fits is ";
          request.memory_bytes = std::stoll(text.substr(text.find(before) + before.size()));
        }
      }
      double best = INFINITY;
      for (int attempt = 0; attempt < 3; ++attempt) {
        const double start = cpu_seconds();
        make_plan("auto", request);
        best = std::min(best, cpu_seconds() - start);
      }
      EXPECT_LT(best, 1) << "CPU seconds" << (is_tight ? " in the smallest memory" : "");
    }
  }
}

}  // namespace
}  // namespace bough
