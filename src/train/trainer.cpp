#include "train/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "algo/minibatches.h"
#include "base/error.h"
#include "models/checkpoint.h"
#include "models/tensor_parallel.h"
#include "train/context_parallel.h"
#include "train/parallel_groups.h"
#include "train/sequence_steps.h"

namespace bough {

namespace {

// Computes the training step's metrics from those of all optimizer steps. A metric that is a sum (losses) is
// divided by their number, `num_mini_batches`.
MetricValues combine(const WeightedSums& sums, size_t num_mini_batches) {
  MetricValues values;
  for (const auto& [name, metric] : sums) {
    values[name] = metric.kind == WeightedSum::Kind::sum
                       ? metric.value() / static_cast<double>(num_mini_batches)
                       : metric.value();
  }
  // Effective sample size of factors or weights: mean^2 / mean of squares. It is a fraction of the tokens:
  // this many tokens with equal weights would give the same variance.
  for (const auto& [name, metric] : sums) {
    constexpr std::string_view kSquare = "_square_mean";
    if (!name.ends_with(kSquare)) continue;
    const double mean = values.at(name.substr(0, name.size() - kSquare.size()) + "_mean");
    const double square = values.extract(name).mapped();
    values[name.substr(0, name.find('/')) + "/effective_sample_size"] = square > 0 ? mean * mean / square : 0;
  }
  return values;
}

// The number of repeated token computations: a token that several ranks compute counts once less than the
// number of these ranks.
int64_t tokens_twice(const std::vector<TokenSpan>& sequences, int64_t num_ranks,
                     const BalanceWeights& weights) {
  const PrefixTree tree = build_prefix_tree(sequences);
  int64_t tokens = -tree.num_tokens();
  for (const RankShare& share : balance_load(tree, num_ranks, weights)) tokens += share.num_tokens;
  return tokens;
}

// Metrics of the critic's values, as computed when the batch was scored, against the returns.
MetricValues value_metrics(const std::vector<const Trajectory*>& batch) {
  std::vector<double> values, returns;
  for (const Trajectory* row : batch) {
    const std::vector<double> own = trained_column(*row, kValuesColumn);
    const std::vector<double> later = trained_column(*row, kReturnsColumn);
    values.insert(values.end(), own.begin(), own.end());
    returns.insert(returns.end(), later.begin(), later.end());
  }
  const auto values_R = at::tensor(values, at::kDouble), returns_R = at::tensor(returns, at::kDouble);
  return {{"critic/value_mean", values_R.mean().item<double>()},
          {"critic/return_mean", returns_R.mean().item<double>()},
          {"critic/explained_variance", explained_variance(values_R, returns_R)}};
}

std::vector<const Trajectory*> pointers_to(const std::vector<Trajectory>& rows) {
  std::vector<const Trajectory*> pointers;
  for (const Trajectory& row : rows) pointers.push_back(&row);
  return pointers;
}

}  // namespace

Trainer::Trainer(Model& model, FrozenModels frozen, const ActorSettings& settings, int64_t total_steps,
                 const Clock& clock, Critic* critic, const SparsePolicy& sparse,
                 SparsePolicyTrainer* sparse_trainer, const TrainingRanks* ranks)
    : settings_(beside_critic(settings, critic)),
      critic_(critic),
      sparse_trainer_(sparse_trainer),
      reference_(frozen.reference),
      model_(model),
      ranks_(ranks && ranks->all() ? ranks : nullptr),
      gradient_(model, frozen, settings_, nullptr, ranks_, sparse),
      optimizer_(model, settings.optimizer,
                 std::max<int64_t>(0, total_steps - (critic ? critic->settings().warmup_steps : 0)) *
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
        train_together(order.batch);
        break;
      case RankOrder::Kind::kPublish:
        if (publish) publish(static_cast<int32_t>(order.version));
        break;
      case RankOrder::Kind::kValues: critic_->values(gradient_.rows_of(pointers_to(order.batch))); break;
      case RankOrder::Kind::kLogProbs:
        gradient_.values(gradient_.rows_of(pointers_to(order.batch)), settings_.tree.strategy());
        break;
      case RankOrder::Kind::kSnapshot: snapshot_together(/*copies=*/false); break;
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
  return snapshot_together(copies);
}

TrainingSnapshot Trainer::snapshot_together(bool copies) {
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
  return saved;
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
  if (!critic_) return;
  const Clock::Time start = clock_.now();
  std::vector<Trajectory*> kept;
  for (Trajectory& trajectory : batch)
    if (trajectory.in_loss() && trajectory.trains_a_token()) kept.push_back(&trajectory);
  if (kept.empty()) return;
  order_execution(RankOrder::Kind::kValues, kept);
  const TrainBatch rows = gradient_.rows_of({kept.begin(), kept.end()});
  const at::Tensor values_R = critic_->values(rows).to(at::kDouble).contiguous();
  for (size_t s = 0; s < kept.size(); ++s)
    set_trained_column(*kept[s], kValuesColumn, values_R.const_data_ptr<double>() + rows.row_offset[s]);
  values_seconds_ += seconds_between(start, clock_.now());
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
  acceptance_seconds_ += seconds_between(start, clock_.now());
}

void Trainer::update_critic(MiniBatch& mini, Updates& updates) {
  const Clock::Time start = clock_.now();
  if (!mini.critic_plan) mini.critic_plan = critic_->plan(mini.batch);
  merge(updates.sums, critic_->accumulate(*mini.critic_plan, mini.batch).metrics);
  updates.critic_seconds += seconds_between(start, clock_.now());
}

void Trainer::update(MiniBatch& mini, bool trains_actor, Updates& updates) {
  ++updates.count;
  const bool in_policy_execution = critic_ && critic_->shares_backbone() && trains_actor;
  if (critic_ && !in_policy_execution) update_critic(mini, updates);
  if (trains_actor) {
    if (!mini.plan) mini.plan = gradient_.plan(mini.batch, settings_.tree.strategy());
    const Clock::Time planned = clock_.now();
    std::optional<ValueBlockHead> values;
    if (in_policy_execution) values.emplace(critic_->beside_policy(mini.batch));
    const ExecutionResult result = gradient_.accumulate(*mini.plan, mini.batch, values ? &*values : nullptr);
    updates.gradient_seconds += seconds_between(planned, clock_.now());
    merge(updates.sums, result.metrics);
    if (keeps_log_probs() && !mini.before.log_probs_R.defined()) mini.before = result.values;
    if (values) merge(updates.sums, critic_->result_of(*values).metrics);
    updates.last = optimizer_.step();
    updates.grad_norm += updates.last.grad_norm;
  }
  if (!critic_) return;
  updates.last_of_critic = critic_->optimizer().step();
  updates.critic_grad_norm += updates.last_of_critic.grad_norm;
}

MetricValues Trainer::train(const std::vector<Trajectory>& batch) {
  if (!ranks_) return train_together(batch);
  const double sent = ranks_->bytes_sent();
  BOUGH_CHECK(is_rank_zero(), "train() was called on rank ", ranks_->all()->rank(), ", expected rank 0");
  RankOrder order{.kind = RankOrder::Kind::kTrain, .version = num_batches_, .batch = {}};
  for (const Trajectory& trajectory : batch)
    if (trajectory.in_loss() && trajectory.trains_a_token()) order.batch.push_back(trajectory);
  send_order(order, *ranks_->all());
  set_version(num_batches_);
  MetricValues values = train_together(batch);
  values["ranks/bytes_sent"] = ranks_->bytes_sent() - sent;
  return values;
}

MetricValues Trainer::train_together(const std::vector<Trajectory>& batch) {
  const Clock::Time start = clock_.now();
  const bool trains_actor = !critic_ || num_batches_ >= critic_->settings().warmup_steps;
  ++num_batches_;
  std::vector<const Trajectory*> kept;
  std::vector<int64_t> tokens;
  for (const Trajectory& trajectory : batch) {
    if (!trajectory.in_loss() || !trajectory.trains_a_token()) continue;
    kept.push_back(&trajectory);
    tokens.push_back(static_cast<int64_t>(trajectory.input_ids.size()));
  }
  MetricValues values;
  values["optim/skipped_steps"] = static_cast<double>(optimizer_.num_skipped());
  if (kept.empty()) {
    values.merge(gradient_.finish({}));
    return values;
  }

  // All mini-batches are prepared before the first update, because pi_old is the policy before that update.
  const std::string strategy = settings_.tree.strategy();
  const auto members = split_minibatches(group_numbers(kept), tokens, settings_.ppo_n_minibatches);
  const bool is_one_update = members.size() == 1 && settings_.ppo_epochs == 1;
  std::vector<MiniBatch> minis;
  for (const std::vector<int64_t>& indices : members) {
    std::vector<const Trajectory*> mini;
    for (const int64_t index : indices) mini.push_back(kept[static_cast<size_t>(index)]);
    minis.push_back(
        {trains_actor ? gradient_.prepare(mini, is_one_update, strategy) : gradient_.rows_of(mini), {}, {}});
  }

  // If there is one update, its gradient pass gives the log-probabilities of the policy before the update. If
  // there are several, a forward pass is needed unless one was already made for pi_old.
  if (keeps_log_probs() && trains_actor && !is_one_update)
    for (MiniBatch& mini : minis) {
      const LossRows& fields = mini.batch.fields;
      if (!fields.proximal_log_probs_R.defined()) mini.before = gradient_.values(mini.batch, strategy);
      else {
        mini.before.log_probs_R = fields.proximal_log_probs_R;
        mini.before.top_k_log_probs_RK = fields.proximal_top_k_RK;
      }
    }

  const Clock::Time recomputed = clock_.now();
  Updates updates;
  for (int64_t epoch = 0; epoch < settings_.ppo_epochs; ++epoch)
    for (MiniBatch& mini : minis) update(mini, trains_actor, updates);
  values["time/recompute"] = seconds_between(start, recomputed) + std::exchange(acceptance_seconds_, 0.0);
  values["time/update"] = seconds_between(recomputed, clock_.now());
  values.merge(combine(updates.sums, static_cast<size_t>(updates.count)));
  if (keeps_log_probs() && trains_actor) values.merge(follow_up(kept, members, minis));
  values.merge(gradient_.finish(updates.sums));
  const auto count = static_cast<double>(updates.count);
  if (trains_actor) {
    values["optim/grad_norm"] = updates.grad_norm / count;
    values["optim/lr"] = updates.last.lr;
  }
  values["optim/skipped_steps"] = static_cast<double>(optimizer_.num_skipped());
  if (critic_) {
    values["critic/grad_norm"] = updates.critic_grad_norm / count;
    values["critic/lr"] = updates.last_of_critic.lr;
    values["critic/skipped_steps"] = static_cast<double>(critic_->optimizer().num_skipped());
    values["time/critic"] = std::exchange(values_seconds_, 0.0) + updates.critic_seconds;
    values.merge(value_metrics(kept));
  }

  std::vector<TokenSpan> sequences;
  for (const Trajectory* trajectory : kept) sequences.emplace_back(trajectory->input_ids);
  const PrefixTree tree = build_prefix_tree(sequences);
  std::vector<const Plan*> plans, critic_plans;
  for (const MiniBatch& mini : minis) {
    if (mini.plan) plans.push_back(&*mini.plan);
    if (mini.critic_plan) critic_plans.push_back(&*mini.critic_plan);
  }
  const PassCosts* critic_passes =
      (critic_ && !critic_->shares_backbone() ? critic_costs_ : costs_).passes.get();
  if (trains_actor)
    values.merge(tree_metrics(tree, plans, costs_.passes.get(),
                              updates.gradient_seconds / static_cast<double>(settings_.ppo_epochs), ranks_));
  else values.merge(tree_metrics(tree, critic_plans, critic_passes, 0, ranks_));
  if ((ranks_ || settings_.deterministic) && trains_actor) {
    const int64_t shares = settings_.deterministic ? kFixedShares : ranks_->num_replicas();
    double twice = 0;
    for (const MiniBatch& mini : minis)
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
  const double seconds = std::max(1e-9, seconds_between(start, clock_.now()));
  values["time/train"] = seconds;
  values["perf/train_tokens_per_s"] = static_cast<double>(tree.num_flat_tokens()) / seconds;
  values["perf/unique_tokens_per_s"] = static_cast<double>(tree.num_tokens()) / seconds;
  if (costs_.matrix_product_rate > 0) {
    std::vector<uint8_t> trained;
    for (const Trajectory* trajectory : kept)
      trained.insert(trained.end(), trajectory->loss_mask.begin(), trajectory->loss_mask.end());
    double work = trains_actor ? count_work(tree, trained, costs_.work).tree : 0;
    if (critic_ && !critic_->shares_backbone()) work += count_work(tree, trained, critic_costs_.work).tree;
    values["perf/mfu"] = kStepOverForward * work * static_cast<double>(settings_.ppo_epochs) /
                         (costs_.matrix_product_rate * seconds);
  }
  return values;
}

// Call after the last optimizer step of a batch. Computes acceptance_metrics() and, if there is a sparse
// policy, takes its optimizer step. Both cover the whole batch: outputs of the mini-batches are first put in
// the batch's order.
MetricValues Trainer::follow_up(const std::vector<const Trajectory*>& rows,
                                const std::vector<std::vector<int64_t>>& members,
                                const std::vector<MiniBatch>& minis) {
  const Clock::Time start = clock_.now();
  std::vector<at::Tensor> by_row(rows.size()), overlap_by_row(rows.size());
  for (size_t m = 0; m < minis.size(); ++m) {
    const RowValues& before = minis[m].before;
    at::Tensor overlap_R;
    if (before.top_k_log_probs_RK.defined() && minis[m].batch.fields.behaviour_top_k_RK.defined())
      overlap_R = overlap_of(minis[m].batch.fields.behaviour_top_k_RK, before.top_k_log_probs_RK);
    const std::vector<int64_t>& offset = minis[m].batch.row_offset;
    for (size_t i = 0; i < members[m].size(); ++i) {
      const auto row = static_cast<size_t>(members[m][i]);
      const int64_t count = offset[i + 1] - offset[i];
      by_row[row] = before.log_probs_R.narrow(0, offset[i], count);
      if (overlap_R.defined()) overlap_by_row[row] = overlap_R.narrow(0, offset[i], count);
    }
  }
  const bool has_overlap =
      std::ranges::all_of(overlap_by_row, [](const at::Tensor& x) { return x.defined(); });
  const at::Tensor log_probs_R = at::cat(by_row);
  MetricValues values = acceptance_metrics(
      rows, gradient_.rows_of(rows),
      {log_probs_R, has_overlap ? at::cat(overlap_by_row) : at::Tensor(), num_batches_ - 1});
  if (!sparse_trainer_) return values;
  values.merge(sparse_trainer_->train(rows, log_probs_R, settings_.tree.strategy()));
  values["time/sparse_train"] = seconds_between(start, clock_.now());
  return values;
}

MetricValues tree_metrics(const PrefixTree& tree, const std::vector<const Plan*>& plans,
                          const PassCosts* costs, double seconds, const TrainingRanks* ranks) {
  const TreeStatistics statistics = compute_statistics(tree);
  int64_t planned = 0, forwarded = 0, recomputed = 0, peak_bytes = 0;
  double predicted = 0;
  for (const Plan* plan : plans) {
    const Simulation simulation = simulate(*plan, costs, ranks ? ranks->pipeline() : Pipeline{});
    predicted += simulation.seconds;
    peak_bytes = std::max(peak_bytes, simulation.peak_bytes);
    planned += num_planned_tokens(*plan);
    forwarded += simulation.tokens_forwarded;
    recomputed += simulation.tokens_recomputed;
  }
  MetricValues values;
  if (Communicator* const data_parallel_group = ranks ? ranks->data_parallel_group() : nullptr) {
    const std::vector<double> own = {static_cast<double>(planned), static_cast<double>(forwarded),
                                     static_cast<double>(recomputed), static_cast<double>(peak_bytes),
                                     predicted};
    const auto size = static_cast<size_t>(data_parallel_group->size());
    std::vector<double> all(own.size() * size);
    data_parallel_group->run({.kind = Collective::Kind::kAllGather,
                              .send = own.data(),
                              .receive = all.data(),
                              .count = std::ssize(own),
                              .element = Element::kDouble});
    planned = forwarded = recomputed = peak_bytes = 0;
    double slowest = 0, total = 0;
    for (size_t at = 0; at < all.size(); at += own.size()) {
      planned += static_cast<int64_t>(all[at]);
      forwarded += static_cast<int64_t>(all[at + 1]);
      recomputed += static_cast<int64_t>(all[at + 2]);
      peak_bytes = std::max(peak_bytes, static_cast<int64_t>(all[at + 3]));
      slowest = std::max(slowest, all[at + 4]);
      total += all[at + 4];
    }
    // All ranks of a context-parallel group report the same numbers.
    for (int64_t* sum : {&planned, &forwarded, &recomputed}) *sum /= ranks->sizes().context;
    predicted = slowest;
    if (total > 0) values["ranks/slowest_over_mean"] = slowest / (total / static_cast<double>(size));
  }
  values["tree/compression"] = statistics.compression;
  values["tree/attention_compression"] = statistics.attention_compression;
  if (!plans.empty())
    values["tree_token_ratio"] = 1 - effective_reuse_ratio(planned, statistics.num_flat_tokens);
  values["tree/recomputed_fraction"] =
      forwarded > 0 ? static_cast<double>(recomputed) / static_cast<double>(forwarded) : 0.0;
  if (costs) values["memory/predicted"] = static_cast<double>(peak_bytes);
  if (costs && seconds > 0) values["tree/predicted_over_measured"] = predicted / seconds;
  return values;
}

}  // namespace bough
