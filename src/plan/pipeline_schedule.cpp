#include "plan/pipeline_schedule.h"

#include <algorithm>

#include "base/error.h"
#include "plan/recompute_policy.h"

namespace bough {

std::vector<ExecutionStep> execution_steps(const Plan& plan) {
  std::vector<ExecutionStep> steps;
  int64_t num_chains = 0;
  for (size_t t = 0; t < plan.trees.size(); ++t) {
    const PlannedTree& planned = plan.trees[t];
    std::vector<int64_t> chain(planned.blocks.size());
    for (const Step& step : planned.steps) {
      const auto block = static_cast<size_t>(step.block);
      const int32_t above = planned.blocks[block].above;
      if (step.kind != Step::Kind::kBackward)
        chain[block] = above < 0 ? num_chains++ : chain[static_cast<size_t>(above)];
      steps.push_back({step.kind, static_cast<int32_t>(t), step.block, chain[block]});
    }
  }
  return steps;
}

int64_t passes_under_way(const Pipeline& pipeline, int64_t stage) {
  return pipeline.backward ? pipeline.num_stages - stage : 1;
}

std::vector<ScheduleSlot> schedule_slots(std::span<const ExecutionStep> steps, const Pipeline& pipeline,
                                         int64_t stage) {
  const int64_t most = passes_under_way(pipeline, stage);
  // In plan order: the forwards, each with the number of backwards that must be done before it (`needs`).
  struct Forward {
    int64_t step, needs;
    bool leaf;
  };
  std::vector<Forward> forwards;
  std::vector<int64_t> backwards;
  // One element per stack. interior_done: the number of backwards, in plan order, up to and with that of the
  // last interior block seen so far on the stack. leaf_done: the same for the last leaf block.
  std::vector<int64_t> interior_done(static_cast<size_t>(most)), leaf_done(static_cast<size_t>(most));
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto step = static_cast<int64_t>(i);
    const auto stack = static_cast<size_t>(steps[i].chain % most);
    const bool leaf = steps[i].kind == Step::Kind::kForwardBackward;
    if (steps[i].kind != Step::Kind::kBackward) {
      int64_t needs = leaf && !pipeline.leaves_on_stack && most > 1 ? 0 : interior_done[stack];
      if (!leaf && pipeline.leaves_on_stack) needs = std::max(needs, leaf_done[stack]);
      forwards.push_back({step, needs, leaf});
    }
    if (steps[i].kind == Step::Kind::kForward) continue;
    backwards.push_back(step);
    (leaf ? leaf_done : interior_done)[stack] = std::ssize(backwards);
  }
  std::vector<ScheduleSlot> order;
  size_t next = 0, under_way = 0;
  for (int64_t done = 0; done < std::ssize(backwards) || next < forwards.size();) {
    if (next < forwards.size() && static_cast<int64_t>(under_way) < most && forwards[next].needs <= done) {
      const Forward& forward = forwards[next++];
      order.push_back({.backward = false, .step = forward.step});
      under_way += forward.leaf;
      continue;
    }
    const int64_t step = backwards[static_cast<size_t>(done++)];
    const bool leaf = steps[static_cast<size_t>(step)].kind == Step::Kind::kForwardBackward;
    under_way -= leaf;
    if (pipeline.backward || !leaf) order.push_back({.backward = true, .step = step});
  }
  return order;
}

double pipeline_seconds(std::span<const ExecutionStep> steps, std::span<const double> forward_seconds,
                        std::span<const double> backward_seconds, const Pipeline& pipeline) {
  const auto num_stages = static_cast<size_t>(pipeline.num_stages);
  struct StageState {
    std::vector<ScheduleSlot> order;
    size_t next = 0;
    double seconds = 0;
    std::vector<double> forward_done, backward_done;  // by step; negative: not yet
  };
  std::vector<StageState> stages(num_stages);
  for (size_t s = 0; s < num_stages; ++s) {
    stages[s].order = schedule_slots(steps, pipeline, static_cast<int64_t>(s));
    stages[s].forward_done.assign(steps.size(), -1);
    stages[s].backward_done.assign(steps.size(), -1);
  }
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (size_t s = 0; s < num_stages; ++s) {
      StageState& stage = stages[s];
      for (; stage.next < stage.order.size(); ++stage.next) {
        const ScheduleSlot& step = stage.order[stage.next];
        const auto i = static_cast<size_t>(step.step);
        double from = 0;
        if (!step.backward && s > 0) from = stages[s - 1].forward_done[i];
        if (step.backward && pipeline.backward && s + 1 < num_stages) from = stages[s + 1].backward_done[i];
        if (from < 0) break;
        stage.seconds =
            std::max(stage.seconds, from) + (step.backward ? backward_seconds : forward_seconds)[i];
        (step.backward ? stage.backward_done : stage.forward_done)[i] = stage.seconds;
        goes_on = true;
      }
    }
  }
  double seconds = 0;
  for (const StageState& stage : stages) {
    BOUGH_CHECK(stage.next == stage.order.size(), "deadlock: the pipeline stages wait for each other");
    seconds = std::max(seconds, stage.seconds);
  }
  return seconds;
}

double pipeline_seconds(const Plan& plan, const PassCosts& costs, const Pipeline& pipeline) {
  const std::vector<ExecutionStep> steps = execution_steps(plan);
  std::vector<double> forward(steps.size()), backward(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto& blocks = plan.trees[static_cast<size_t>(steps[i].tree)].blocks;
    const Block& block = blocks[static_cast<size_t>(steps[i].block)];
    if (!block.needed) continue;
    const auto stages = static_cast<double>(pipeline.num_stages);
    if (steps[i].kind != Step::Kind::kBackward) forward[i] = costs.forward_seconds(block.shape()) / stages;
    if (steps[i].kind != Step::Kind::kForward) backward[i] = backward_seconds(costs, block) / stages;
  }
  return pipeline_seconds(steps, forward, backward, pipeline);
}

Simulation simulate(const Plan& plan, const PassCosts* costs, const Pipeline& pipeline) {
  Simulation simulation = simulate(plan, costs);
  if (costs && pipeline.num_stages > 1) simulation.seconds = pipeline_seconds(plan, *costs, pipeline);
  return simulation;
}

}  // namespace bough
