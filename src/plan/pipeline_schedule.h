// The pipeline schedule: the order in which a pipeline stage (models/pipeline_stage.h) runs the passes of a
// plan. All stages execute the same plan. A pass's forward goes from the first stage to the last, and its
// backward from the last to the first. These are pure functions of the plan. The executor follows this order,
// and predictions use it.
//
// The order is "one forward, one backward" (Narayanan et al. 2019, "PipeDream"; 2021, Megatron-LM, section
// 2.2) on trees. On every stage, forwards are in plan order, and so are backwards. So messages between two
// stages arrive in the expected order. A stage runs the next forward if it may, else the next backward. It
// may run a forward if both conditions hold:
//   - Few leaf blocks are in flight on it (forward done, backward not): fewer than the stages from it to the
//     last, both included. So the last stage runs each leaf's backward right after its forward.
//   - The block has its place on a stack. An interior block waits until no other block lies above its
//     parent's rows. Leaf blocks wait too if the stage has only one stack (the last stage has), or with
//     leaves_on_stack. So the last stage follows the plan's order.
// A stage has several stacks (passes_under_way()). Root blocks (blocks without a block above), each with all
// its descendants, take turns on the stacks. So the next prompt's passes start without waiting.
// Forwards of an earlier stage never lag behind those of a later stage, so there is no deadlock. With one
// stage this is the plan's order.
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
  int64_t chain = 0;  // number of the root block that the block is, or descends from
};
std::vector<ExecutionStep> execution_steps(const Plan& plan);

// The most leaf blocks that may be in flight on a stage. Also the number of its stacks.
int64_t passes_under_way(const Pipeline& pipeline, int64_t stage);

struct ScheduleSlot {
  bool backward = false;
  int64_t step = 0;  // index in execution_steps(); a leaf block's step occurs twice: forward and backward
};
// The order of the stage.
std::vector<ScheduleSlot> schedule_slots(std::span<const ExecutionStep> steps, const Pipeline& pipeline,
                                         int64_t stage);

// Seconds until the last stage finishes. forward_seconds, backward_seconds: time of each step on each stage.
// Messages take no time. Throws InternalError on a deadlock.
double pipeline_seconds(std::span<const ExecutionStep> steps, std::span<const double> forward_seconds,
                        std::span<const double> backward_seconds, const Pipeline& pipeline);
// The same for a plan, if every stage takes an equal part of each pass.
double pipeline_seconds(const Plan& plan, const PassCosts& costs, const Pipeline& pipeline);
// simulate() of plan.h, with `seconds` of the pipeline schedule. All other fields are those of one process.
Simulation simulate(const Plan& plan, const PassCosts* costs, const Pipeline& pipeline);

}  // namespace bough
