#include "train/gradient_step.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "base/error.h"
#include "base/median.h"
#include "kernels/common/cpu_allocator.h"

namespace bough {

GradientStep::GradientStep(Model& model, Model* reference, const ActorSettings& settings,
                           const PassCosts* costs)
    : model_(model),
      reference_(reference),
      settings_(settings),
      costs_(costs),
      loss_(make_loss(settings.loss)),
      executor_(model) {
  BOUGH_CHECK(!loss_->needs_reference() || reference_, "the loss needs a reference model");
}

TrainBatch GradientStep::prepare(const std::vector<const Trajectory*>& trajectories, bool is_one_update,
                                 const std::string& strategy) {
  AggregationSettings aggregation = settings_.aggregation;
  if (aggregation.loss_aggregation == "auto") aggregation.loss_aggregation = loss_->aggregation();
  TrainBatch batch = make_batch(trajectories, aggregation, accumulator_type(model_.dtype()));
  LossRows& fields = batch.fields;
  if (!is_one_update && settings_.loss.prox_logp_method == "reuse_train_logp" && loss_->needs_proximal())
    throw UserError(
        "setting prox_logp_method: reuse_train_logp needs ppo_n_minibatches 1: after the first "
        "update the training pass is no longer of the policy of the start; expected recompute or "
        "loglinear");
  if (loss_->needs_versions()) {
    if (!fields.versions_R.defined() && batch.num_rows() > 0)
      throw UserError(
          str("setting prox_logp_method: ", settings_.loss.prox_logp_method,
              " needs the version that drew each token, and some trained token has none (`versions` "
              "of a rollout file); expected recompute"));
    if (!fields.versions_R.defined()) fields.versions_R = at::zeros({0}, at::kInt);
  }
  if (fields.versions_R.defined() && batch.num_rows() > 0)
    fields.version = fields.versions_R.max().item<int64_t>();
  if (version_) fields.version = *version_;
  const bool old_is_behaviour = loss_->needs_behaviour() && !loss_->needs_proximal();
  fields.proximal_is_current = is_one_update && !old_is_behaviour;
  if (!fields.proximal_is_current && loss_->needs_proximal())
    fields.proximal_log_probs_R = executor_.forward(plan(batch, strategy), batch).log_probs_R;
  if (loss_->needs_reference())
    fields.reference_log_probs_R = Executor(*reference_).forward(plan(batch, strategy), batch).log_probs_R;
  return batch;
}

Plan GradientStep::plan(const TrainBatch& batch, const std::string& strategy) const {
  return make_plan(strategy, plan_request(batch, settings_.mb_spec, settings_.tree.packer, costs_));
}

WalkResult GradientStep::accumulate(const Plan& plan, const TrainBatch& batch) {
  return executor_.forward_backward(plan, batch, *loss_);
}

StepTimer::StepTimer(Model& model, Model* reference, const ActorSettings& settings, const PassCosts* costs,
                     const std::vector<Trajectory>& batch, const std::string& strategy)
    : model_(model), step_(model, reference, settings, costs), asked_strategy_(strategy) {
  for (const Trajectory& trajectory : batch) batch_.push_back(&trajectory);
  model_.allocate_gradients();
}

void StepTimer::run(bool counted) {
  const int64_t before = cpu_allocated_bytes();
  reset_cpu_peak_bytes();
  const auto start = std::chrono::steady_clock::now();
  model_.zero_gradients();
  const TrainBatch batch = step_.prepare(batch_, /*is_one_update=*/true, asked_strategy_);
  const Plan plan = step_.plan(batch, asked_strategy_);
  const WalkResult result = step_.accumulate(plan, batch);
  if (counted) seconds_.push_back(seconds_since(start));
  peak_bytes_ = std::max(peak_bytes_, cpu_peak_bytes() - before);
  loss_ = result.loss;
  num_trained_ = batch.num_rows();
  strategy_ = plan.strategy;
  max_tokens_per_pass_ = plan.max_tokens_per_pass;
  simulation_ = simulate(plan, step_.costs());
}

double StepTimer::median_seconds() const {
  BOUGH_CHECK(!seconds_.empty(), "no run was counted");
  return median(seconds_);
}

}  // namespace bough
