// When a stage of a pipeline of layers (models/pipeline.h) makes which pass of a walk. All stages walk the
// same plan: a pass goes forward through the stages one after the other, and its backward comes back through
// them. Pure functions of the plan; the executor does what stands here, and predictions count it.
//
// The order is "one forward, one backward" (Narayanan et al. 2019, "PipeDream"; 2021, Megatron-LM, section
// 2.2) on trees. Forwards are in the walk's order on every stage, and so are backwards, so that messages
// between two stages arrive in the order in which they are expected. In between, a stage makes the next
// forward wherever it may, else the next backward. It may
//   - while fewer leaf blocks are under way on it (forwarded, not yet backpropagated) than there are stages
//     from it to the last: that one makes each leaf's backward right after its forward;
//   - where the block finds its place on a stack: an interior block waits until no other block lies above
//     its parent's rows, and so does a leaf block on the last stage, whose order is the plan's own. Blocks at
//     the bottom, each with all that runs on top of it, take turns on as many stacks as leaf blocks may be
//     under way, so that the next prompt's passes follow the last one's at once.
// An earlier stage's forwards are never behind a later one's, whatever backwards are done, so that none waits
// for ever. With one stage this is the plan's own order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.h"

namespace bough {

// A step of a plan's walk.
struct WalkStep {
  Step::Kind kind;
  int32_t tree = 0, block = 0;
  int64_t chain = 0;  // numbers the blocks at the bottom; what runs on top of one has its number
};
std::vector<WalkStep> walk_steps(const Plan& plan);

// Leaf blocks that may be under way on a stage, and stacks that it has.
int64_t passes_under_way(const Pipeline& pipeline, int64_t stage);

struct StageStep {
  bool backward = false;
  int64_t step = 0;  // of the walk; a leaf block's has a forward and a backward
};
// What the stage does, in its order.
std::vector<StageStep> stage_steps(std::span<const WalkStep> steps, const Pipeline& pipeline, int64_t stage);

// When all stages are done, where a step's forward and backward take each stage so many seconds, messages
// take none, and each waits for what it needs. InternalError where they wait for each other for ever.
double pipeline_seconds(std::span<const WalkStep> steps, std::span<const double> forward_seconds,
                        std::span<const double> backward_seconds, const Pipeline& pipeline);
// Of a plan on stages that have equal parts of every pass.
double pipeline_seconds(const Plan& plan, const PassCosts& costs, const Pipeline& pipeline);
// simulate(), but with the seconds of the pipeline's schedule. The rest is as of one process.
Simulation simulate(const Plan& plan, const PassCosts* costs, const Pipeline& pipeline);

}  // namespace bough
