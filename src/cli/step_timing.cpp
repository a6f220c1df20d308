#include "cli/step_timing.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "base/error.h"
#include "kernels/common/cpu_allocator.h"

namespace bough {

void check_mode(const std::string& option, const std::string& mode) {
  for (const char* known : {"auto", "dense", "packed", "path", "blocks"})
    if (mode == known) return;
  throw UserError(str(option, ": got ", quoted(mode), ", expected auto, dense, packed, path or blocks"));
}

std::unique_ptr<Loss> make_step_loss(const std::string& name) {
  if (name != "pg" && name != "grpo")
    throw UserError(str("--loss: got ", quoted(name), ", expected pg or grpo"));
  LossSettings settings;
  settings.loss = name == "pg" ? "pg" : "ppo";
  // The clip is against the policy that sampled the tokens: a single step has no other.
  settings.use_decoupled_loss = false;
  settings.recompute_logprob = false;
  return make_loss(settings);
}

StepTimer::StepTimer(Model& model, const RolloutBatch& rollouts, const Loss& loss, const CostModel& costs,
                     StepPlan plan)
    : model_(model),
      rollouts_(rollouts),
      loss_(loss),
      costs_(costs),
      plan_(std::move(plan)),
      executor_(model) {
  model_.allocate_gradients();
}

void StepTimer::run(bool counted) {
  const int64_t before = cpu_allocated_bytes();
  reset_cpu_peak_bytes();
  const auto start = std::chrono::steady_clock::now();
  model_.zero_gradients();
  const TrainBatch batch = make_train_batch(rollouts_, accumulator_type(model_.dtype()));
  PlanRequest request = plan_request(batch, plan_.max_tokens_per_pass);
  request.costs = &costs_;
  request.memory_bytes = plan_.memory_bytes;
  const Plan plan = make_plan(plan_.mode, request);
  const WalkResult result = executor_.forward_backward(plan, batch, loss_);
  if (counted) seconds_.push_back(seconds_since(start));
  peak_bytes_ = std::max(peak_bytes_, cpu_peak_bytes() - before);
  loss_value_ = result.loss;
  num_trained_ = batch.num_rows();
  strategy_ = plan.strategy;
  max_tokens_per_pass_ = plan.max_tokens_per_pass;
  simulation_ = simulate(plan, &costs_);
}

double StepTimer::median_seconds() const {
  auto sorted = seconds_;
  BOUGH_CHECK(!sorted.empty(), "no run was counted");
  std::sort(sorted.begin(), sorted.end());
  const size_t middle = sorted.size() / 2;
  return sorted.size() % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

}  // namespace bough
