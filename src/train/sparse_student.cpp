#include "train/sparse_student.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"
#include "base/log.h"

namespace bough {

namespace {

// What phi's step takes over from the run, and what it does not: there is one update, whose ratio is 1.
ActorSettings student_settings(const SparseTrainingSettings& settings, ActorSettings actor) {
  LossSettings& loss = actor.loss;
  loss.loss = "ppo";
  loss.use_decoupled_loss = false;
  loss.recompute_logprob = true;
  loss.prox_logp_method = "recompute";
  loss.correction = "auto";
  loss.correction_lower = loss.correction_upper = {};
  loss.rejection_sampling = {};
  loss.behave_imp_weight_cap = {};
  loss.off_policy_mask_threshold = loss.m2_threshold = {};
  loss.teacher = {};
  loss.entropy_coef = 0;
  loss.target_entropy = {};
  loss.kl_ctl = 0;
  loss.ref_model_sync_steps = 0;
  loss.kl_loss_coef = settings.kl_loss_coef;
  loss.kl_loss_type = settings.kl_loss_type;
  actor.lora = settings.lora;
  actor.optimizer.lr *= settings.lr_ratio;
  actor.ppo_n_minibatches = actor.ppo_epochs = 1;
  return actor;
}

std::unique_ptr<Model> adapted(const Model& theta, const LoraSettings& lora, uint64_t seed) {
  auto model = theta.share();
  add_adapter(*model, lora, seed);
  model->set_batch_invariant(theta.batch_invariant());
  model->allocate_gradients();
  return model;
}

}  // namespace

SparseStudent::SparseStudent(Model& theta, const SparseTrainingSettings& settings, const ActorSettings& actor,
                             const SparsePolicy& policy, int64_t total_steps, uint64_t seed)
    : actor_(student_settings(settings, actor)), model_(adapted(theta, settings.lora, seed)) {
  // The KL's values are handed in: no model is walked for them.
  gradient_ = std::make_unique<GradientStep>(*model_, FrozenModels(model_.get()), actor_, nullptr,
                                             /*ranks=*/nullptr, policy);
  optimizer_ = std::make_unique<Optimizer>(*model_, actor_.optimizer, total_steps);
}

MetricValues SparseStudent::train(const std::vector<const Trajectory*>& rows,
                                  const at::Tensor& dense_log_probs_R, const std::string& strategy) {
  TrainBatch batch = gradient_->rows_of(rows);
  BOUGH_CHECK(dense_log_probs_R.numel() == batch.num_rows(), "dense values of ", dense_log_probs_R.numel(),
              " tokens, a batch of ", batch.num_rows());
  MetricValues metrics;
  batch.fields.proximal_is_current = true;
  batch.fields.reference_log_probs_R = dense_log_probs_R;
  const WalkResult result = gradient_->accumulate(gradient_->plan(batch, strategy), batch);
  const Optimizer::Report report = optimizer_->step();
  metrics["sparse/loss"] = result.loss;
  metrics["sparse/grad_norm"] = report.grad_norm;
  metrics["sparse/lr"] = report.lr;
  for (const char* name : {"sparse/replayed", "sparse/choices_differ"})
    if (const auto found = result.metrics.find(name); found != result.metrics.end())
      metrics[name] = found->second.value();
  // Of the sampled tokens, under phi and theta as they are now against theta before its step.
  if (batch.num_rows() > 0)
    metrics["sparse/kl"] =
        result.values.log_probs_R.sub(dense_log_probs_R).square().mul(0.5).mean().item<double>();
  return metrics;
}

SparseStudentSnapshot SparseStudent::snapshot(bool copies) const {
  SparseStudentSnapshot snapshot{model_->share(), optimizer_->snapshot(copies)};
  if (copies)
    for (Parameter* parameter : snapshot.model->trained_parameters())
      parameter->value = parameter->value.clone();
  return snapshot;
}

void SparseStudentSnapshot::save(const std::filesystem::path& directory, const std::string& base) const {
  save_adapter(directory, *model, base);
  optimizer.save(directory);
}

void SparseStudent::load(const std::filesystem::path& directory) {
  load_adapter(directory, *model_);
  optimizer_->load(directory);
}

MetricValues acceptance_metrics(const std::vector<const Trajectory*>& rows, const TrainBatch& batch,
                                const at::Tensor& dense_log_probs_R) {
  constexpr std::array<int64_t, 3> kEnds = {256, 1024, 4096};
  constexpr std::array<const char*, 4> kNames = {"to_255", "to_1023", "to_4095", "beyond"};
  const at::Tensor ratio_R = dense_log_probs_R.to(at::kDouble)
                                 .sub(batch.fields.behaviour_log_probs_R.to(at::kDouble))
                                 .clamp_max(0)
                                 .exp()
                                 .contiguous();
  const double* const accepted = ratio_R.const_data_ptr<double>();
  std::array<double, 4> sums = {}, counts = {};
  std::vector<double> by_row;
  size_t sequence = 0;
  for (const Trajectory* row : rows) {
    if (!row->in_loss()) continue;
    const std::vector<int32_t>& positions = batch.trained_positions[sequence];
    const int64_t begin = batch.row_offset[sequence++];
    if (positions.empty()) continue;
    double sum = 0;
    for (size_t i = 0; i < positions.size(); ++i) {
      const double value = accepted[begin + static_cast<int64_t>(i)];
      const auto place = static_cast<size_t>(
          std::upper_bound(kEnds.begin(), kEnds.end(), positions[i] - positions[0]) - kEnds.begin());
      sums[place] += value;
      counts[place] += 1;
      sum += value;
    }
    by_row.push_back(sum / static_cast<double>(positions.size()));
  }
  MetricValues metrics;
  if (by_row.empty()) return metrics;
  double total = 0, count = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    total += sums[i];
    count += counts[i];
    if (counts[i] > 0) metrics[std::string("sparse/acceptance_") + kNames[i]] = sums[i] / counts[i];
  }
  metrics["sparse/acceptance"] = total / count;
  const auto fifth = by_row.begin() + static_cast<int64_t>(by_row.size() / 20);
  std::nth_element(by_row.begin(), fifth, by_row.end());
  metrics["sparse/acceptance_p5"] = *fifth;
  if (total / count < kLeastAcceptance)
    log_warning(
        str("sparse/acceptance is ", total / count, ", below ", kLeastAcceptance,
            ": the samples are those of another policy than the one that is trained; expected a larger "
            "rollout.sparse.budget, or sparse_training.arm: distill with a larger kl_loss_coef"));
  return metrics;
}

}  // namespace bough
