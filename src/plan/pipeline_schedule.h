// The pipeline schedule: the order in which a pipeline stage (models/pipeline_stage.h) runs the passes of a
// plan. All stages execute the same plan. A pass's forward goes from the first stage to the last, and its
// backward from the last to the first. These are pure functions of the plan. The executor follows this order,
// and predictions use it.
//
// The order is "one forward, one backward" (Narayanan et al. 2019, "PipeDream"; 2021, Megatron-LM, section
// 2.2), applied to trees. On every stage, forwards are in plan order, and backwards are in plan order. So
// messages between two stages arrive in the expected order. A stage runs the next forward if it may, else the
// next backward. It may run a forward if both conditions hold:
//   - Few leaf blocks are in flight on the stage (forward done, backward not): fewer than the stages
//     from this one to the last, both included. So the last stage runs each leaf's backward right after its
//     forward.
//   - The block has its place on a stack. An interior block waits until no other block lies above its
//     parent's tokens on the stack. A leaf block waits for this too if the stage has only one stack (as the
//     last stage has), or with leaves_on_stack. So the last stage follows the plan's order.
// A stage has several prefix KV stacks (passes_under_way()). Root blocks (blocks without a block above) take
// turns on the stacks, each with all its descendants. So the passes of the next prompt start without waiting.
// Forwards of an earlier stage never lag behind those of a later stage, so there is no deadlock. With one
// stage, the order is the plan's order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.h"

namespace bough {

// A step of the plan execution.
struct ExecutionStep {
  Step::Kind kind;
  int32_t tree = 0, block = 0;
  int64_t chain = 0;  // number of the root block that is this block or an ancestor of it
};
std::vector<ExecutionStep> execution_steps(const Plan& plan);

// Returns the most leaf blocks that may be in flight on the stage (0: the first stage). The stage has as many
// prefix KV stacks.
int64_t passes_under_way(const Pipeline& pipeline, int64_t stage);

struct ScheduleSlot {
  bool backward = false;
  int64_t step = 0;  // index in execution_steps(); a leaf block's step occurs twice: forward and backward
};
// The order of the stage.
std::vector<ScheduleSlot> schedule_slots(std::span<const ExecutionStep> steps, const Pipeline& pipeline,
                                         int64_t stage);

// Seconds until the last stage has finished. forward_seconds, backward_seconds: time of each step on one
// stage. Messages take no time. Throws InternalError on a deadlock.
double pipeline_seconds(std::span<const ExecutionStep> steps, std::span<const double> forward_seconds,
                        std::span<const double> backward_seconds, const Pipeline& pipeline);
// The same for a plan. Each stage is assumed to take an equal part of the time of each pass.
double pipeline_seconds(const Plan& plan, const PassCosts& costs, const Pipeline& pipeline);
// Like simulate() of plan.h, but `seconds` is the time of the pipeline schedule. All other fields are those
// of a run without pipeline stages.
Simulation simulate(const Plan& plan, const PassCosts* costs, const Pipeline& pipeline);

}  // namespace bough
