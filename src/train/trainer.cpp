#include "train/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "algo/minibatches.h"
#include "base/error.h"
#include "models/checkpoint.h"
#include "models/tensor_parallel.h"
#include "train/context_parallel.h"
#include "train/parallel_groups.h"
#include "train/sequence_steps.h"
#include "train/step_metrics.h"

namespace bough {

namespace {

// Joins matrices [rows, K] of different K. Missing columns become -infinity, as for a token of probability 0.
at::Tensor padded_and_joined(std::vector<at::Tensor> matrices) {
  int64_t width = 0;
  for (const at::Tensor& matrix : matrices) width = std::max(width, matrix.size(1));
  for (at::Tensor& matrix : matrices)
    matrix =
        at::constant_pad_nd(matrix, {0, width - matrix.size(1)}, -std::numeric_limits<double>::infinity());
  return at::cat(matrices);
}

std::vector<const Trajectory*> pointers_to(const std::vector<Trajectory>& rows) {
  std::vector<const Trajectory*> pointers;
  for (const Trajectory& row : rows) pointers.push_back(&row);
  return pointers;
}

}  // namespace

Trainer::Trainer(Model& model, FrozenModels frozen, const ActorSettings& settings, int64_t total_steps,
                 const Clock& clock, const TrainerOptions& options)
    : settings_(beside_critic(settings, options.critic)),
      critic_(options.critic),
      sparse_trainer_(options.sparse_trainer),
      reference_(frozen.reference),
      model_(model),
      ranks_(options.ranks && options.ranks->all() ? options.ranks : nullptr),
      gradient_(model, frozen, settings_, nullptr, ranks_, options.sparse),
      optimizer_(model, settings.optimizer,
                 std::max<int64_t>(0, total_steps - (critic_ ? critic_->settings().warmup_steps : 0)) *
                     settings.updates_per_batch(),
                 ranks_ ? ranks_->data_parallel_group() : nullptr, settings.deterministic),
      clock_(clock) {
  gradient_.leave_sums_over_ranks();
}

void Trainer::follow(const std::function<void(int32_t version)>& publish) {
  BOUGH_CHECK(ranks_ && !is_rank_zero(), "follow() is for all ranks but rank 0");
  while (true) {
    const RankOrder order = receive_order(*ranks_->all());
    switch (order.kind) {
      case RankOrder::Kind::kTrain:
        set_version(order.version);
        train_step_on_rank(order.batch);
        break;
      case RankOrder::Kind::kPublish:
        if (publish) publish(static_cast<int32_t>(order.version));
        break;
      case RankOrder::Kind::kValues: critic_->values(gradient_.rows_of(pointers_to(order.batch))); break;
      case RankOrder::Kind::kLogProbs:
        gradient_.values(gradient_.rows_of(pointers_to(order.batch)), settings_.tree.strategy());
        break;
      case RankOrder::Kind::kKlRewards:
        gradient_.kl_rewards(gradient_.rows_of(pointers_to(order.batch)), settings_.tree.strategy());
        break;
      case RankOrder::Kind::kSnapshot: snapshot_on_rank(/*copies=*/false); break;
      case RankOrder::Kind::kWeights: gather_unsharded(); break;
      case RankOrder::Kind::kEnd: return;
    }
  }
}

void Trainer::publish_ranks(int32_t version) {
  if (is_rank_zero())
    send_order({.kind = RankOrder::Kind::kPublish, .version = version, .batch = {}}, *ranks_->all());
}

void Trainer::end_ranks() {
  if (is_rank_zero()) send_order({}, *ranks_->all());
}

TrainingSnapshot Trainer::snapshot(bool copies) {
  if (is_rank_zero()) send_order({.kind = RankOrder::Kind::kSnapshot, .batch = {}}, *ranks_->all());
  return snapshot_on_rank(copies);
}

TrainingSnapshot Trainer::snapshot_on_rank(bool copies) {
  const Model* whole = gather_unsharded();
  TrainingSnapshot snapshot{.model = whole ? snapshot_of(*whole, copies) : nullptr,
                            .optimizer = optimizer_.snapshot(copies),
                            .critic = {},
                            .sparse_trainer = {},
                            .reference = nullptr,
                            .coefficients = gradient_.state()};
  if (critic_) snapshot.critic = critic_->snapshot(copies);
  if (sparse_trainer_) snapshot.sparse_trainer = sparse_trainer_->snapshot(copies);
  if (const Model* reference = renewed_reference(); reference && (!ranks_ || ranks_->shares_with_leader()))
    snapshot.reference = snapshot_of(*reference, copies);
  return snapshot;
}

void TrainingSnapshot::save_more(const std::filesystem::path& directory, const std::string& base) const {
  if (critic) critic->save(directory / "critic");
  if (sparse_trainer) sparse_trainer->save(directory, base);
  if (reference) save_model(directory / "reference", *reference);
}

Json Trainer::load(const RunCheckpoint& checkpoint) {
  Json saved = load_run_checkpoint(checkpoint, model_, optimizer_, [&](const auto& directory) {
    if (critic_) critic_->load(directory / "critic");
    if (sparse_trainer_) sparse_trainer_->load(directory);
    if (Model* reference = renewed_reference()) load_weights(directory / "reference", *reference);
  });
  gradient_.restore(saved.value("coefficients", Json()));
  complete_step_ = checkpoint.step;
  return saved;
}

std::string Trainer::why_not_at(int64_t step) const {
  if (ranks_) return "the state is spread over ranks that no longer compute together";
  if (!complete_step_) return str("the weights had begun to change in step ", step + 1);
  if (*complete_step_ != step) return str("the weights are already those of step ", *complete_step_);
  return "";
}

Model& Trainer::unsharded_model() {
  if (model_.is_unsharded()) return model_;
  BOUGH_CHECK(whole_ && is_rank_zero(), "only rank 0 can gather the unsharded model");
  send_order({.kind = RankOrder::Kind::kWeights, .batch = {}}, *ranks_->all());
  return *gather_unsharded();
}

// Returns the unsharded model. On ranks other than 0 returns nullptr if ranks shard the model.
Model* Trainer::gather_unsharded() {
  if (model_.is_unsharded()) return &model_;
  if (ranks_->shares_with_leader()) gather_weights(model_, whole_);
  return whole_;
}

void Trainer::use_costs(StepCosts costs, StepCosts critic) {
  whole_passes_ = costs.passes;
  costs_ = std::move(costs);
  critic_costs_ = std::move(critic);
  for (StepCosts* own : {&costs_, &critic_costs_})
    own->passes = context_costs(own->passes, ranks_ ? ranks_->sizes().context : 1);
  gradient_.use_costs(costs_.passes.get());
  if (sparse_trainer_) sparse_trainer_->use_costs(costs_.passes.get());
  if (critic_) critic_->use_costs((critic_->shares_backbone() ? costs_ : critic_costs_).passes.get());
}

void Trainer::order_execution(RankOrder::Kind kind, const std::vector<Trajectory*>& rows) {
  if (!is_rank_zero()) return;
  RankOrder order{.kind = kind, .version = 0, .batch = {}};
  for (const Trajectory* row : rows) order.batch.push_back(*row);
  send_order(order, *ranks_->all());
}

void Trainer::set_values(std::vector<Trajectory>& batch) {
  if (!critic_ && !settings_.has_kl_rewards()) return;
  std::vector<Trajectory*> kept;
  for (Trajectory& trajectory : batch)
    if (trajectory.in_loss() && trajectory.trains_a_token()) kept.push_back(&trajectory);
  if (kept.empty()) return;
  if (settings_.has_kl_rewards()) set_kl_rewards(kept);
  if (!critic_) return;
  const Clock::Time started = clock_.now();
  order_execution(RankOrder::Kind::kValues, kept);
  const TrainBatch rows = gradient_.rows_of({kept.begin(), kept.end()});
  const at::Tensor values_R = critic_->values(rows).to(at::kDouble).contiguous();
  for (size_t s = 0; s < kept.size(); ++s)
    set_trained_column(*kept[s], kValuesColumn, values_R.const_data_ptr<double>() + rows.row_offset[s]);
  values_seconds_ += seconds_between(started, clock_.now());
}

void Trainer::set_kl_rewards(const std::vector<Trajectory*>& rows) {
  const Clock::Time start = clock_.now();
  order_execution(RankOrder::Kind::kKlRewards, rows);
  const TrainBatch batch = gradient_.rows_of({rows.begin(), rows.end()});
  const at::Tensor rewards_R =
      gradient_.kl_rewards(batch, settings_.tree.strategy()).to(at::kDouble).contiguous();
  for (size_t s = 0; s < rows.size(); ++s)
    set_trained_column(*rows[s], kKlRewardsColumn, rewards_R.const_data_ptr<double>() + batch.row_offset[s]);
  scoring_seconds_ += seconds_between(start, clock_.now());
}

void Trainer::set_acceptance(std::vector<Trajectory>& batch) {
  const Clock::Time start = clock_.now();
  std::vector<Trajectory*> kept;
  for (Trajectory& trajectory : batch)
    if (trajectory.in_loss() && trajectory.trains_a_token()) kept.push_back(&trajectory);
  if (kept.empty()) return;
  order_execution(RankOrder::Kind::kLogProbs, kept);
  const TrainBatch rows = gradient_.rows_of({kept.begin(), kept.end()});
  const at::Tensor accepted_R =
      sampled_acceptance(rows.fields.behaviour_log_probs_R,
                         gradient_.values(rows, settings_.tree.strategy()).log_probs_R)
          .contiguous();
  for (size_t s = 0; s < kept.size(); ++s)
    set_trained_column(*kept[s], kAcceptanceColumn, accepted_R.const_data_ptr<double>() + rows.row_offset[s]);
  scoring_seconds_ += seconds_between(start, clock_.now());
}

void Trainer::add_critic_gradient(MiniBatch& mini, Updates& updates) {
  const Clock::Time start = clock_.now();
  if (!mini.critic_plan) mini.critic_plan = critic_->plan(mini.batch);
  merge(updates.sums, critic_->add_gradient(*mini.critic_plan, mini.batch).metrics);
  updates.critic_seconds += seconds_between(start, clock_.now());
}

void Trainer::update_weights(StepState& step, MiniBatch& mini) {
  Updates& updates = step.updates;
  ++updates.count;
  const bool in_policy_execution = critic_ && critic_->shares_backbone() && step.trains_actor;
  if (critic_ && !in_policy_execution) add_critic_gradient(mini, updates);
  if (step.trains_actor) {
    if (!mini.plan) mini.plan = gradient_.plan(mini.batch, settings_.tree.strategy());
    const Clock::Time planned = clock_.now();
    std::optional<ValueBlockHead> values;
    if (in_policy_execution) values.emplace(critic_->beside_policy(mini.batch));
    const ExecutionResult result =
        gradient_.add_gradient(*mini.plan, mini.batch, values ? &*values : nullptr);
    updates.gradient_seconds += seconds_between(planned, clock_.now());
    merge(updates.sums, result.metrics);
    if (keeps_log_probs() && !mini.before.log_probs_R.defined()) mini.before = result.values;
    if (keeps_token_values_ && !std::exchange(mini.has_stored_values, true))
      store_token_values(step, mini, result.values);
    if (values) merge(updates.sums, critic_->result_of(*values).metrics);
    complete_step_.reset();
    updates.last = optimizer_.step();
    updates.grad_norm += updates.last.grad_norm;
  }
  if (!critic_) return;
  complete_step_.reset();
  updates.last_of_critic = critic_->optimizer().step();
  updates.critic_grad_norm += updates.last_of_critic.grad_norm;
}

// The log-probabilities are pi_old if it was computed. Otherwise they are those of the first pass over the
// mini-batch, after the updates of earlier mini-batches.
void Trainer::store_token_values(const StepState& step, const MiniBatch& mini, const RowValues& values) {
  const at::Tensor& proximal_R = mini.batch.fields.proximal_log_probs_R;
  const auto on_cpu = [](const at::Tensor& x) { return x.detach().to(at::kCPU, at::kFloat); };
  const at::Tensor log_probs_R = on_cpu(proximal_R.defined() ? proximal_R : values.log_probs_R);
  const at::Tensor entropies_R = on_cpu(values.entropies_R);
  const std::vector<int64_t>& offset = mini.batch.row_offset;
  for (size_t i = 0; i < mini.members.size(); ++i) {
    const int64_t begin = offset[i], count = offset[i + 1] - begin;
    token_values_.push_back({step.kept[static_cast<size_t>(mini.members[i])],
                             log_probs_R.narrow(0, begin, count).contiguous(),
                             entropies_R.narrow(0, begin, count).contiguous()});
  }
}

void Trainer::set_token_values(std::vector<Trajectory>& batch) {
  const auto rounded = [](double value) { return std::round(value * 1e3) / 1e3; };
  for (const TokenValues& values : std::exchange(token_values_, {})) {
    Trajectory& row = batch[static_cast<size_t>(values.row - batch.data())];
    const float* log_probs = values.log_probs.const_data_ptr<float>();
    const float* entropies = values.entropies.const_data_ptr<float>();
    std::vector<double> entropy, mismatch;
    for (size_t i = 0; i < row.loss_mask.size(); ++i) {
      if (row.loss_mask[i] == 0) continue;
      const bool has_value = row.trains(i);  // not the first token
      entropy.push_back(has_value ? rounded(double{*entropies++}) : 0);
      const double log_prob = has_value ? double{*log_probs++} : 0;
      if (!row.logprobs.empty()) mismatch.push_back(has_value ? rounded(log_prob - row.logprobs[i]) : 0);
    }
    row.columns[kEntropyColumn] = std::move(entropy);
    if (!mismatch.empty()) row.columns[kMismatchColumn] = std::move(mismatch);
  }
}

MetricValues Trainer::train_step(const std::vector<Trajectory>& batch) {
  if (!ranks_) return train_step_on_rank(batch);
  const double sent = ranks_->bytes_sent();
  BOUGH_CHECK(is_rank_zero(), "train_step() was called on rank ", ranks_->all()->rank(), ", expected rank 0");
  RankOrder order{.kind = RankOrder::Kind::kTrain, .version = num_batches_, .batch = {}};
  for (const Trajectory& trajectory : batch)
    if (trajectory.in_loss() && trajectory.trains_a_token()) order.batch.push_back(trajectory);
  send_order(order, *ranks_->all());
  set_version(num_batches_);
  MetricValues values = train_step_on_rank(batch);
  values["ranks/bytes_sent"] = ranks_->bytes_sent() - sent;
  return values;
}

MetricValues Trainer::train_step_on_rank(const std::vector<Trajectory>& batch) {
  MetricValues values = update_on(batch);
  complete_step_ = num_batches_;
  return values;
}

MetricValues Trainer::update_on(const std::vector<Trajectory>& batch) {
  const Clock::Time start = clock_.now();
  token_values_.clear();
  StepState step{.trains_actor = !critic_ || num_batches_ >= critic_->settings().warmup_steps};
  ++num_batches_;
  for (const Trajectory& trajectory : batch)
    if (trajectory.in_loss() && trajectory.trains_a_token()) step.kept.push_back(&trajectory);
  MetricValues values;
  values["optim/skipped_steps"] = static_cast<double>(optimizer_.num_skipped());
  if (step.kept.empty()) {
    values.merge(gradient_.finish({}));
    return values;
  }

  prepare_mini_batches(step);
  const Clock::Time recomputed = clock_.now();
  for (int64_t epoch = 0; epoch < settings_.ppo_epochs; ++epoch)
    for (MiniBatch& mini : step.minis) update_weights(step, mini);
  values["time/recompute"] = seconds_between(start, recomputed) + std::exchange(scoring_seconds_, 0.0);
  values["time/update"] = seconds_between(recomputed, clock_.now());
  values.merge(combine(step.updates.sums, step.updates.count));
  if (keeps_log_probs() && step.trains_actor) values.merge(follow_up(step));
  values.merge(gradient_.finish(step.updates.sums));
  add_update_metrics(step, values);

  std::vector<TokenSpan> sequences;
  for (const Trajectory* trajectory : step.kept) sequences.emplace_back(trajectory->input_ids);
  const PrefixTree tree = build_prefix_tree(sequences);
  add_plan_metrics(step, tree, values);
  add_speed_metrics(step, tree, std::max(1e-9, seconds_between(start, clock_.now())), values);
  return values;
}

// Prepares all mini-batches before the first update, because pi_old is the policy before that update.
void Trainer::prepare_mini_batches(StepState& step) {
  const std::string strategy = settings_.tree.strategy();
  std::vector<int64_t> tokens;
  for (const Trajectory* trajectory : step.kept) tokens.push_back(std::ssize(trajectory->input_ids));
  const auto members = split_minibatches(group_numbers(step.kept), tokens, settings_.ppo_n_minibatches);
  const bool is_one_update = members.size() == 1 && settings_.ppo_epochs == 1;
  for (const std::vector<int64_t>& indices : members) {
    std::vector<const Trajectory*> rows;
    for (const int64_t index : indices) rows.push_back(step.kept[static_cast<size_t>(index)]);
    step.minis.push_back({.members = indices,
                          .batch = step.trains_actor ? gradient_.prepare_batch(rows, is_one_update, strategy)
                                                     : gradient_.rows_of(rows)});
  }

  // If there is one update, its gradient pass gives the log-probabilities of the policy before the update. If
  // there are several, a forward pass is needed unless one was already made for pi_old.
  if (!keeps_log_probs() || !step.trains_actor || is_one_update) return;
  for (MiniBatch& mini : step.minis) {
    const LossRows& fields = mini.batch.fields;
    if (!fields.proximal_log_probs_R.defined()) mini.before = gradient_.values(mini.batch, strategy);
    else {
      mini.before.log_probs_R = fields.proximal_log_probs_R;
      mini.before.top_k_log_probs_RK = fields.proximal_top_k_RK;
    }
  }
}

// Gradient norms, learning rates and skipped steps of the optimizers, and the critic's values.
void Trainer::add_update_metrics(const StepState& step, MetricValues& values) {
  const Updates& updates = step.updates;
  const auto count = static_cast<double>(updates.count);
  if (step.trains_actor) {
    values["optim/grad_norm"] = updates.grad_norm / count;
    values["optim/lr"] = updates.last.lr;
  }
  values["optim/skipped_steps"] = static_cast<double>(optimizer_.num_skipped());
  if (!critic_) return;
  values["critic/grad_norm"] = updates.critic_grad_norm / count;
  values["critic/lr"] = updates.last_of_critic.lr;
  values["critic/skipped_steps"] = static_cast<double>(critic_->optimizer().num_skipped());
  values["time/critic"] = std::exchange(values_seconds_, 0.0) + updates.critic_seconds;
  values.merge(value_metrics(step.kept));
}

// The batch's tree, the plans of the mini-batches, and their predicted memory.
void Trainer::add_plan_metrics(const StepState& step, const PrefixTree& tree, MetricValues& values) {
  std::vector<const Plan*> plans, critic_plans;
  for (const MiniBatch& mini : step.minis) {
    if (mini.plan) plans.push_back(&*mini.plan);
    if (mini.critic_plan) critic_plans.push_back(&*mini.critic_plan);
  }
  const PassCosts* critic_passes =
      (critic_ && !critic_->shares_backbone() ? critic_costs_ : costs_).passes.get();
  if (step.trains_actor)
    values.merge(tree_metrics(tree, plans, costs_.passes.get(),
                              step.updates.gradient_seconds / static_cast<double>(settings_.ppo_epochs),
                              ranks_));
  else values.merge(tree_metrics(tree, critic_plans, critic_passes, 0, ranks_));
  if ((ranks_ || settings_.deterministic) && step.trains_actor) {
    const int64_t shares = settings_.deterministic ? kFixedShares : ranks_->num_replicas();
    double twice = 0;
    for (const MiniBatch& mini : step.minis)
      twice += static_cast<double>(
          tokens_twice(mini.batch.sequences, shares, balance_weights(costs_.passes.get())));
    values["ranks/tokens_twice"] = twice;
  }
  if (critic_ && costs_.passes) {
    double& peak = values["memory/predicted"];
    for (const Plan* plan : critic_plans)
      peak = std::max(peak, static_cast<double>(simulate(*plan, critic_passes).peak_bytes));
    peak += static_cast<double>(critic_->resident_bytes());
  }
}

// seconds: the time of the whole training step.
void Trainer::add_speed_metrics(const StepState& step, const PrefixTree& tree, double seconds,
                                MetricValues& values) {
  values["time/train"] = seconds;
  values["perf/train_tokens_per_s"] = static_cast<double>(tree.num_flat_tokens()) / seconds;
  values["perf/unique_tokens_per_s"] = static_cast<double>(tree.num_tokens()) / seconds;
  if (costs_.matrix_product_rate <= 0) return;
  std::vector<uint8_t> trained;
  for (const Trajectory* trajectory : step.kept)
    trained.insert(trained.end(), trajectory->loss_mask.begin(), trajectory->loss_mask.end());
  double work = step.trains_actor ? count_work(tree, trained, costs_.work).tree : 0;
  if (critic_ && !critic_->shares_backbone()) work += count_work(tree, trained, critic_costs_.work).tree;
  values["perf/mfu"] = kStepOverForward * work * static_cast<double>(settings_.ppo_epochs) /
                       (costs_.matrix_product_rate * seconds);
}

// Call after the last optimizer step of a batch. Computes acceptance_metrics() and, if there is a sparse
// policy, takes its optimizer step. Both cover the whole batch: outputs of the mini-batches are first put in
// the batch's order.
MetricValues Trainer::follow_up(const StepState& step) {
  const Clock::Time start = clock_.now();
  const std::vector<const Trajectory*>& rows = step.kept;
  std::vector<at::Tensor> by_row(rows.size()), top_k_by_row(rows.size()), overlap_by_row(rows.size());
  for (const MiniBatch& mini : step.minis) {
    const RowValues& before = mini.before;
    at::Tensor overlap_R;
    if (before.top_k_log_probs_RK.defined() && mini.batch.fields.behaviour_top_k_RK.defined())
      overlap_R = overlap_of(mini.batch.fields.behaviour_top_k_RK, before.top_k_log_probs_RK);
    const std::vector<int64_t>& offset = mini.batch.row_offset;
    for (size_t i = 0; i < mini.members.size(); ++i) {
      const auto row = static_cast<size_t>(mini.members[i]);
      const int64_t count = offset[i + 1] - offset[i];
      by_row[row] = before.log_probs_R.narrow(0, offset[i], count);
      if (before.top_k_log_probs_RK.defined())
        top_k_by_row[row] = before.top_k_log_probs_RK.narrow(0, offset[i], count);
      if (overlap_R.defined()) overlap_by_row[row] = overlap_R.narrow(0, offset[i], count);
    }
  }
  const auto all_defined = [](const std::vector<at::Tensor>& of_rows) {
    return std::ranges::all_of(of_rows, [](const at::Tensor& x) { return x.defined(); });
  };
  const bool has_overlap = all_defined(overlap_by_row);
  const at::Tensor log_probs_R = at::cat(by_row);
  MetricValues values = acceptance_metrics(
      rows, gradient_.rows_of(rows),
      {log_probs_R, has_overlap ? at::cat(overlap_by_row) : at::Tensor(), num_batches_ - 1});
  if (!sparse_trainer_) return values;
  RowValues dense{.log_probs_R = log_probs_R};
  if (all_defined(top_k_by_row)) dense.top_k_log_probs_RK = padded_and_joined(top_k_by_row);
  values.merge(sparse_trainer_->update_weights(rows, dense, settings_.tree.strategy()));
  values["time/sparse_train"] = seconds_between(start, clock_.now());
  return values;
}

}  // namespace bough
