#include "train/sparse_policy_trainer.h"

#include <ATen/ATen.h>

#include <utility>

#include "base/error.h"
#include "models/checkpoint.h"
#include "models/tensor_parallel.h"

namespace bough {

namespace {

// Synchronous runs: the policy that samples a batch is the one that trains on it, so nothing is corrected.
// Page selection and rounding make its log-probabilities differ a little from generation's. A correction
// would only add noise.
void leave_out_corrections(LossSettings& loss) {
  loss.use_decoupled_loss = false;
  loss.recompute_logprob = true;
  loss.correction = "auto";
  loss.correction_level = "token";
  loss.correction_lower = loss.correction_upper = {};
  loss.rejection_sampling = {};
  loss.behave_imp_weight_cap = {};
  loss.off_policy_mask_threshold = loss.m2_threshold = {};
}

// The settings of the sparse policy's optimizer step, from the run's settings. There is one update per batch,
// so pi_old costs nothing.
ActorSettings sparse_policy_settings(bool is_adapter, const SparsePolicyOptions& options) {
  const SparseTrainingSettings& settings = options.settings;
  ActorSettings actor = options.actor;
  LossSettings& loss = actor.loss;
  loss.loss = "ppo";
  loss.prox_logp_method = "recompute";
  if (!options.has_stale_samples) leave_out_corrections(loss);
  loss.teacher = {};
  loss.entropy_coef = 0;
  loss.target_entropy = {};
  loss.kl_ctl = 0;
  loss.ref_model_sync_steps = 0;
  loss.kl_loss_coef = settings.kl_loss_coef;
  if (settings.kl_loss_coef != 0.0) loss.kl_loss_type = settings.kl_loss_type;
  actor.lora = is_adapter ? settings.lora : LoraSettings();
  actor.optimizer.lr *= settings.lr_ratio.value_or(is_adapter ? 5 : 1);
  actor.ppo_n_minibatches = actor.ppo_epochs = 1;
  return actor;
}

// Metrics of the plan execution that a step reports, and their names in the step's metrics.
constexpr std::pair<const char*, const char*> kReported[] = {
    {"sparse/replayed", "sparse/replayed"},
    {"sparse/choices_differ", "sparse/choices_differ"},
    {"loss/kl", "sparse/kl_loss"},
    {"mismatch/factor_mean", "sparse/factor_mean"},
    {"mismatch/masked_fraction", "sparse/masked_fraction"}};

const char* folder_of(bool is_adapter) {
  return is_adapter ? "sparse_adapter" : "weak";
}

std::unique_ptr<Model> adapted(const Model& trained_model, const LoraSettings& lora, uint64_t seed) {
  auto model = trained_model.share();
  freeze_adapter(*model);
  add_adapter(*model, lora, seed);
  model->set_batch_invariant(trained_model.batch_invariant());
  return model;
}

}  // namespace

SparsePolicyTrainer::SparsePolicyTrainer(bool is_adapter, std::unique_ptr<Model> model,
                                         const SparsePolicyOptions& options)
    : actor_(sparse_policy_settings(is_adapter, options)), is_adapter_(is_adapter), model_(std::move(model)) {
  const TrainingRanks* ranks = options.ranks;
  BOUGH_CHECK(!ranks || ranks->sizes().all() == ranks->sizes().data,
              "the sparse policy supports data parallelism only");
  model_->allocate_gradients();
  // GradientStep requires a reference model for the KL term. The caller passes the reference
  // log-probabilities, so the model in FrozenModels is never executed.
  gradient_ = std::make_unique<GradientStep>(*model_, FrozenModels(model_.get()), actor_, nullptr, ranks,
                                             options.policy);
  gradient_->leave_sums_over_ranks();
  optimizer_ =
      std::make_unique<Optimizer>(*model_, actor_.optimizer, options.total_steps,
                                  ranks ? ranks->data_parallel_group() : nullptr, actor_.deterministic);
}

SparsePolicyTrainer::SparsePolicyTrainer(Model& trained_model, uint64_t seed,
                                         const SparsePolicyOptions& options)
    : SparsePolicyTrainer(true, adapted(trained_model, options.settings.lora, seed), options) {}

SparsePolicyTrainer::SparsePolicyTrainer(std::unique_ptr<Model> draft, const SparsePolicyOptions& options)
    : SparsePolicyTrainer(false, std::move(draft), options) {}

MetricValues SparsePolicyTrainer::update_weights(const std::vector<const Trajectory*>& rows,
                                                 const RowValues& dense, const std::string& strategy) {
  const TrainBatch batch = gradient_->prepare_batch(rows, /*is_one_update=*/true, strategy, dense);
  BOUGH_CHECK(dense.log_probs_R.numel() == batch.num_rows(), "got dense log-probabilities of ",
              dense.log_probs_R.numel(), " tokens for a batch of ", batch.num_rows());
  MetricValues metrics;
  const ExecutionResult result = gradient_->add_gradient(gradient_->plan(batch, strategy), batch);
  const Optimizer::Report report = optimizer_->step();
  metrics["sparse/loss"] = result.loss;
  metrics["sparse/grad_norm"] = report.grad_norm;
  metrics["sparse/lr"] = report.lr;
  for (const auto& [from, name] : kReported)
    if (const auto found = result.metrics.find(from); found != result.metrics.end())
      metrics[name] = found->second.value();
  // The KL on the sampled tokens: the current sparse policy (`model_`) against the dense policy before the
  // dense policy's update.
  if (batch.num_rows() > 0)
    metrics["sparse/kl"] =
        result.values.log_probs_R.sub(dense.log_probs_R).square().mul(0.5).mean().item<double>();
  return metrics;
}

SparsePolicySnapshot SparsePolicyTrainer::snapshot(bool copies) const {
  return {snapshot_of(*model_, copies), is_adapter_, optimizer_->snapshot(copies)};
}

void SparsePolicySnapshot::save(const std::filesystem::path& checkpoint, const std::string& base) const {
  const std::filesystem::path directory = checkpoint / folder_of(is_adapter);
  if (is_adapter) save_adapter(directory, *model, base);
  else save_model(directory / "model", *model, {.copy_from = base});
  optimizer.save(directory);
}

void SparsePolicyTrainer::load(const std::filesystem::path& checkpoint) {
  const std::filesystem::path directory = checkpoint / folder_of(is_adapter_);
  if (is_adapter_) load_adapter(directory, *model_);
  else load_weights(directory / "model", *model_);
  optimizer_->load(directory);
}

}  // namespace bough
