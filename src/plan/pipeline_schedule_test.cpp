// Schedules of pipeline stages on random plans: each executes its plan, each stage receives messages in the
// order in which its neighbor sends them, and idle time is bounded.
#include "plan/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <numeric>
#include <random>
#include <string>

#include "plan/test_costs.h"
#include "tree/random_tree.h"

namespace bough {
namespace {

constexpr int32_t kTokens = 50;

Plan random_plan(uint64_t seed) {
  static std::vector<std::vector<int32_t>> sequences;
  sequences = random_sequences(seed, 200, kTokens);
  const char* const strategies[] = {"blocks", "path", "dense", "blocks"};
  PlanRequest request{.sequences = {sequences.begin(), sequences.end()},
                      .max_tokens_per_pass = 4 + static_cast<int64_t>(seed % 20)};
  return make_plan(strategies[seed % 4], request);
}

std::vector<Pipeline> pipelines() {
  std::vector<Pipeline> all;
  for (const int64_t num_stages : {1, 2, 3, 4, 7})
    for (const bool backward : {true, false})
      for (const bool leaves_on_stack : {false, true}) all.push_back({num_stages, backward, leaves_on_stack});
  return all;
}

// The steps whose results a stage sends to a neighbor, in order: backwards if `backward`, else forwards.
std::vector<int64_t> messages(const std::vector<ScheduleSlot>& order, bool backward) {
  std::vector<int64_t> steps;
  for (const ScheduleSlot& step : order)
    if (step.backward == backward) steps.push_back(step.step);
  return steps;
}

TEST(PipelineOrder, OneStageFollowsThePlan) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const Plan plan = random_plan(seed);
    const std::vector<ExecutionStep> steps = execution_steps(plan);
    std::vector<ScheduleSlot> expected;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].kind != Step::Kind::kBackward) expected.push_back({false, static_cast<int64_t>(i)});
      if (steps[i].kind != Step::Kind::kForward) expected.push_back({true, static_cast<int64_t>(i)});
    }
    const std::vector<ScheduleSlot> order = schedule_slots(steps, {}, 0);
    ASSERT_EQ(order.size(), expected.size());
    for (size_t i = 0; i < order.size(); ++i) {
      ASSERT_EQ(order[i].step, expected[i].step) << seed;
      ASSERT_EQ(order[i].backward, expected[i].backward) << seed;
    }
  }
}

// A block's forward runs when its ancestors lie on the stack. Its backward comes after its forward and after
// the backwards of all descendants. Stages send in the order in which their neighbors receive, so there is no
// deadlock.
TEST(PipelineOrder, EveryStageExecutesThePlanWithoutDeadlock) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const Plan plan = random_plan(seed);
    const std::vector<ExecutionStep> steps = execution_steps(plan);
    for (const Pipeline& pipeline : pipelines()) {
      std::vector<int64_t> sent, sent_back;
      for (int64_t s = 0; s < pipeline.num_stages; ++s) {
        const std::vector<ScheduleSlot> order = schedule_slots(steps, pipeline, s);
        const int64_t most = passes_under_way(pipeline, s);
        ASSERT_EQ(most, pipeline.backward ? pipeline.num_stages - s : 1);
        if (s > 0) {
          ASSERT_EQ(messages(order, false), sent) << seed;
          ASSERT_EQ(messages(order, true), sent_back) << seed;
        }
        sent = messages(order, false);
        sent_back = messages(order, true);
        std::map<std::pair<int32_t, int32_t>, int> state;  // 1: forwarded, 2: done
        std::map<int64_t, std::vector<int32_t>> stacks;    // by chain % most: interior blocks, bottom to top
        std::map<int64_t, std::vector<int32_t>> leaves;    // by chain % most: leaf blocks in flight
        int64_t under_way = 0, largest = 0;
        for (const ScheduleSlot& next : order) {
          const ExecutionStep& step = steps[static_cast<size_t>(next.step)];
          const PlannedTree& tree = plan.trees[static_cast<size_t>(step.tree)];
          const Block& block = tree.blocks[static_cast<size_t>(step.block)];
          auto& stack = stacks[step.chain % most];
          auto& on_stack = leaves[step.chain % most];
          int& own = state[{step.tree, step.block}];
          if (!next.backward) {
            ASSERT_EQ(own, 0);
            own = 1;
            for (int32_t above = block.above; above >= 0;
                 above = tree.blocks[static_cast<size_t>(above)].above) {
              ASSERT_EQ((state[{step.tree, above}]), 1);
              ASSERT_NE(std::ranges::find(stack, above), stack.end()) << seed;
            }
            const bool is_on_top = block.above < 0 ? stack.empty() : stack.back() == block.above;
            if (block.interior) {
              ASSERT_TRUE(is_on_top) << seed << ", stage " << s;
              if (pipeline.leaves_on_stack && pipeline.backward) {
                ASSERT_TRUE(on_stack.empty()) << seed;
              }
              stack.push_back(step.block);
            } else if (pipeline.leaves_on_stack) {
              ASSERT_TRUE(is_on_top) << seed;
              if (pipeline.backward) on_stack.push_back(step.block);
            }
            if (!block.interior && pipeline.backward) largest = std::max(largest, ++under_way);
            continue;
          }
          ASSERT_EQ(own, 1);
          own = 2;
          for (size_t b = 0; b < tree.blocks.size(); ++b)
            if (tree.blocks[b].above == step.block && (pipeline.backward || tree.blocks[b].interior)) {
              ASSERT_EQ((state[{step.tree, static_cast<int32_t>(b)}]), 2) << seed;
            }
          if (block.interior) {
            ASSERT_EQ(stack.back(), step.block);
            stack.pop_back();
          } else {
            --under_way;
            std::erase(on_stack, step.block);
          }
        }
        ASSERT_LE(largest, most);
        for (const PlannedTree& tree : plan.trees)
          for (const Step& step : tree.steps) {
            const int done = state[{static_cast<int32_t>(&tree - plan.trees.data()), step.block}];
            ASSERT_EQ(done, pipeline.backward || step.kind != Step::Kind::kForwardBackward ? 2 : 1);
          }
      }
      const std::vector<double> ones(steps.size(), 1.0);
      ASSERT_GE(pipeline_seconds(steps, ones, ones, pipeline), 0) << seed;
    }
  }
}

// If as many passes are in flight as allowed, stages idle only at the start and the end of a plan. The passes
// of one prompt follow those of the previous prompt without a gap.
TEST(PipelineOrder, KeepsStagesBusy) {
  constexpr int kPrompts = 6, kSamples = 8;
  std::mt19937_64 random(1);
  std::vector<std::vector<int32_t>> sequences;
  const auto draw = [&](int count) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 1000);
    return tokens;
  };
  for (int prompt = 0; prompt < kPrompts; ++prompt) {
    const std::vector<int32_t> shared = draw(64);
    for (int sample = 0; sample < kSamples; ++sample) {
      sequences.push_back(shared);
      const std::vector<int32_t> own = draw(64);
      sequences.back().insert(sequences.back().end(), own.begin(), own.end());
    }
  }
  for (const std::string strategy : {"dense", "blocks"}) {
    // Passes of this size hold whole sequences (dense), or a sample's tokens without the prompt (blocks).
    const int64_t most = strategy == "dense" ? 128 : 64;
    const Plan plan =
        make_plan(strategy, {.sequences = {sequences.begin(), sequences.end()}, .max_tokens_per_pass = most});
    const std::vector<ExecutionStep> steps = execution_steps(plan);
    // A leaf block runs forward and backward. An interior block runs forward once more before its backward.
    std::vector<double> forward(steps.size()), backward(steps.size());
    double all = 0;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].kind != Step::Kind::kBackward) all += forward[i] = 1;
      if (steps[i].kind != Step::Kind::kForward)
        all += backward[i] = steps[i].kind == Step::Kind::kBackward ? 3 : 2;
    }
    for (const int64_t num_stages : {2, 4}) {
      const double seconds = pipeline_seconds(steps, forward, backward, {.num_stages = num_stages});
      std::cout << strategy << " on " << num_stages << " stages: " << 100 * (1 - all / seconds)
                << "% of the time in bubbles" << std::endl;
      if (strategy == "dense") {
        EXPECT_EQ(seconds, all + 3.0 * static_cast<double>(num_stages - 1));  // only start and end are idle
      }
      EXPECT_LT(seconds, 1.2 * all) << strategy << " on " << num_stages;
      // Without overlap of passes, the time would be `num_stages` * `all`.
      EXPECT_LT(seconds, 0.6 * static_cast<double>(num_stages) * all);
    }
  }
}

// With passes as large as for one process, there would be few passes. Stages would wait long for the first
// pass to arrive and for the last one to finish. Plans for several stages therefore have smaller passes.
TEST(PipelineOrder, PlansForStagesHavePassesThatFillThem) {
  std::vector<std::vector<int32_t>> sequences;
  std::mt19937_64 random(3);
  for (int sample = 0; sample < 32; ++sample) {
    std::vector<int32_t>& tokens = sequences.emplace_back(64);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 1000);
  }
  const TestCosts costs;
  PlanRequest request{.sequences = {sequences.begin(), sequences.end()}, .max_tokens_per_pass = 1024};
  request.costs = &costs;
  for (const std::string strategy : {"dense", "blocks", "auto"}) {
    request.pipeline.num_stages = 1;
    const Plan whole = make_plan(strategy, request);
    request.pipeline.num_stages = 4;
    const Plan staged = make_plan(strategy, request);
    EXPECT_LT(staged.max_tokens_per_pass, whole.max_tokens_per_pass) << strategy;
    const auto seconds = [&](const Plan& plan) { return pipeline_seconds(plan, costs, {.num_stages = 4}); };
    EXPECT_LT(seconds(staged), 0.9 * seconds(whole)) << strategy;
    EXPECT_GT(seconds(staged), simulate(whole, &costs).seconds / 4) << strategy;
  }
}

}  // namespace
}  // namespace bough
