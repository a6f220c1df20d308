#include "train/gradient_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <utility>

#include "algo/policy_rows.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/median.h"
#include "kernels/common/device.h"
#include "plan/load_balance.h"
#include "train/context_parallel.h"
#include "train/parallel_groups.h"
#include "train/router_losses.h"
#include "tree/prefix_tree.h"

namespace bough {

namespace {

// Whether the KL's rewards may be subtracted from the estimator's advantages. True for estimators that do not
// normalize advantages over the batch's tokens. Normalization would also scale the KL per token.
bool takes_kl_in_advantages(const std::string& estimator) {
  return estimator == "grpo" || estimator == "dr_grpo" || estimator == "rloo" || estimator == "opo" ||
         estimator == "remax" || estimator == "maxrl";
}

void check_frozen(const LossSettings& settings, const AdvantageSettings& advantages,
                  const FrozenModels& frozen) {
  if (settings.uses_reference() && !frozen.reference)
    throw UserError(str("setting ", settings.kl_loss_coef != 0.0 ? "kl_loss_coef" : "kl_ctl",
                        ": needs a reference model, but this command has none; expected 0"));
  if (settings.teacher.is_used() && !frozen.teacher)
    throw UserError("setting teacher.path: this command has no teacher; leave it out, or use `bough train`");
  if (settings.kl_ctl != 0.0 && !advantages.takes_kl_rewards() &&
      !takes_kl_in_advantages(advantages.adv_estimator))
    throw UserError(str("setting kl_ctl: adv_estimator ", advantages.adv_estimator,
                        " normalizes advantages over tokens and does not support a KL in the reward; "
                        "expected kl_loss_coef instead, or one of grpo, dr_grpo, rloo, opo, remax, maxrl, "
                        "gae, reinforce_plus_plus"));
}

// Whether every trained token has the inference engine's top-k tokens.
bool has_engine_top(const std::vector<const Trajectory*>& trajectories) {
  for (const Trajectory* row : trajectories)
    for (size_t i = 1; row->in_loss() && i < row->input_ids.size(); ++i)
      if (row->trains(i) && (row->top_ids.size() <= i || row->top_ids[i].empty())) return false;
  return true;
}

}  // namespace

GradientStep::GradientStep(Model& model, FrozenModels frozen, const ActorSettings& settings,
                           const PassCosts* costs, const TrainingRanks* ranks, const SparsePolicy& sparse)
    : model_(model),
      frozen_(frozen),
      settings_(settings),
      costs_(costs),
      ranks_(ranks && ranks->all() ? ranks : nullptr),
      sparse_(sparse),
      pass_memory_(model.device(), ranks_),
      loss_(make_loss(settings.loss)),
      executor_(executor_of(model)),
      kl_controller_(settings.loss),
      entropy_controller_(settings.loss) {
  if (settings.routing_replay != "none" && !model.config().is_mixture())
    throw UserError(str("actor.routing_replay: got ", settings.routing_replay,
                        ", but the model has no experts; expected none"));
  check_router_losses("actor.", settings.router_losses, model.config());
  check_offload("actor.activation_offload", settings.tree.offload(), model.device().is_cpu());
  if (settings.deterministic && (!loss_->token_separable() || settings.advantages.needs_values()))
    throw UserError(str(
        "actor.deterministic: ", loss_->token_separable() ? "a critic" : str("the loss ", settings.loss.loss),
        " needs more than one shard at a time; expected a token-separable loss (ppo) without a critic, or "
        "false"));
  if (settings.deterministic && ranks_ && kFixedShares % ranks_->num_replicas() != 0)
    throw UserError(
        str("actor.deterministic: got ", ranks_->num_replicas(), " ranks, expected 1, 2, 4 or 8"));
  if (settings.loss.loss != "sft") check_frozen(settings.loss, settings.advantages, frozen);
}

TrainBatch GradientStep::rows_of(const std::vector<const Trajectory*>& trajectories) {
  AggregationSettings aggregation = settings_.aggregation;
  if (aggregation.loss_aggregation == "auto") aggregation.loss_aggregation = loss_->aggregation();
  TrainBatch batch = make_batch(trajectories, aggregation, accumulator_type(model_.dtype()));
  const MarkSettings marks{.sampled = sparse_.is_sparse(),
                           .experts = settings_.replays_rollout_experts(),
                           .majority = settings_.routing_differences == "majority"};
  if (marks.experts) check_routed_experts(trajectories);
  if (!marks.sampled && !marks.experts) return batch;
  const RouteDifferences differences = mark_tokens(batch, trajectories, marks);
  route_differences_.rows += differences.rows;
  route_differences_.different += differences.different;
  return batch;
}

void GradientStep::check_routed_experts(const std::vector<const Trajectory*>& trajectories) const {
  const ModelConfig& config = model_.config();
  const int64_t layers = config.num_sparse_layers();
  for (const Trajectory* row : trajectories) {
    if (!row->in_loss()) continue;
    const RoutedExperts& routed = row->routed_experts;
    const auto refuse = [&](const std::string& got, const std::string& expected) {
      throw UserError(str("actor.routing_replay R3: a rollout of group ", quoted(row->group), " has ", got,
                          " in routed_experts; expected ", expected));
    };
    if (routed.num_rows() + 1 < std::ssize(row->input_ids))
      refuse(str(routed.num_rows(), " rows for ", row->input_ids.size(), " tokens"),
             "a row for each token but the last: rollouts that were generated with "
             "rollout.return_routed_experts, or routing_replay none");
    if (!routed.empty() && (routed.num_layers != layers || routed.num_chosen != config.experts_per_token))
      refuse(str(routed.num_chosen, " experts in each of ", routed.num_layers, " layers"),
             str(config.experts_per_token, " in each of ", layers, ", as the model has"));
    for (const uint16_t expert : routed.experts)
      if (expert >= config.num_experts)
        refuse(str("expert ", expert), str("numbers below ", config.num_experts, ", as the model has"));
  }
}

// R2: from now on the batch's tokens use `routed`, the experts of the pass with the weights before the first
// optimizer step of the batch.
void GradientStep::replay_own_experts(const std::vector<const Trajectory*>& trajectories,
                                      std::vector<RoutedExperts> routed, TrainBatch& batch) const {
  if (Communicator* const group = ranks_ ? ranks_->loss_group() : nullptr) gather_experts(routed, *group);
  batch.routed_experts = std::make_shared<const std::vector<RoutedExperts>>(std::move(routed));
  mark_tokens(batch, trajectories, {.sampled = sparse_.is_sparse(), .experts = true});
}

TrainBatch GradientStep::prepare_batch(const std::vector<const Trajectory*>& trajectories, bool is_one_update,
                                       const std::string& strategy, const RowValues& reference) {
  TrainBatch batch = rows_of(trajectories);
  LossRows& fields = batch.fields;
  if (!is_one_update && settings_.loss.prox_logp_method == "reuse_train_logp" && loss_->needs_proximal())
    throw UserError(
        "setting prox_logp_method: reuse_train_logp needs ppo_n_minibatches 1 and ppo_epochs 1: after the "
        "first optimizer step the training pass no longer computes pi_old; expected recompute or loglinear");
  if (loss_->needs_versions()) {
    if (!fields.versions_R.defined() && batch.num_rows() > 0)
      throw UserError(
          str("setting prox_logp_method: ", settings_.loss.prox_logp_method,
              " needs the version that sampled each token, but some trained tokens have none (`versions` "
              "of a rollout file); expected recompute"));
    if (!fields.versions_R.defined()) fields.versions_R = at::zeros({0}, at::kInt);
  }
  if (fields.versions_R.defined() && batch.num_rows() > 0)
    fields.version = fields.versions_R.max().item<int64_t>();
  if (version_) fields.version = *version_;
  const bool old_is_behaviour = loss_->needs_behaviour() && !loss_->needs_proximal();
  fields.proximal_is_current = is_one_update && !old_is_behaviour;
  fields.entropy_coef = entropy_controller_.coefficient();
  if (loss_->needs_rows()) fields.rows_R = at::arange(batch.num_rows(), at::kLong);
  const LossSettings& settings = settings_.loss;
  const bool is_policy_loss = settings.loss != "sft";
  const bool in_reward = is_policy_loss && settings.kl_ctl != 0.0 && !settings_.has_kl_rewards();
  fields.reference_log_probs_R = reference.log_probs_R;
  fields.reference_top_k_RK = reference.top_k_log_probs_RK;
  const TopKTokens given = loss_->top_k_tokens();
  const bool is_asked =
      asks_for_engine_top_ && given != TopKTokens::kPolicyTop && has_engine_top(trajectories);
  const bool lists_engine_top = given == TopKTokens::kEngineTop || is_asked;
  // A forward execution computes the log-probabilities of the listed tokens. The reference does so on demand.
  const bool reference_reads_them = loss_->needs_reference_top_k();
  if (lists_engine_top && reference_reads_them) set_top_k_tokens(trajectories, batch);
  if (is_policy_loss && (settings.kl_loss_coef != 0.0 || in_reward) && !reference.log_probs_R.defined()) {
    const RowValues own = executor_of(*frozen_.reference).execute_forward(plan(batch, strategy), batch);
    fields.reference_log_probs_R = own.log_probs_R;
    fields.reference_top_k_RK = own.top_k_log_probs_RK;
  }
  if (lists_engine_top && !reference_reads_them) set_top_k_tokens(trajectories, batch);

  const bool keeps_old = !fields.proximal_is_current && loss_->needs_proximal();
  const bool records_own = settings_.routing_replay == "R2" && !is_one_update;
  if (keeps_old || in_reward || given == TopKTokens::kPolicyTop || records_own) {
    std::vector<RoutedExperts> routed(batch.sequences.size());
    const RowValues old =
        executor_.execute_forward(plan(batch, strategy), batch,
                                  {.top_k = given == TopKTokens::kPolicyTop ? settings.teacher.topk : 0,
                                   .routed_experts = records_own ? &routed : nullptr});
    if (records_own) replay_own_experts(trajectories, std::move(routed), batch);
    if (keeps_old) fields.proximal_log_probs_R = old.log_probs_R;
    if (keeps_old) fields.proximal_top_k_RK = old.top_k_log_probs_RK;
    if (in_reward && batch.num_rows() > 0) {
      const at::Tensor kl_R = kl_in_reward(batch, old.log_probs_R, fields.reference_log_probs_R);
      fields.advantages_R = fields.advantages_R.sub(kl_to_go(kl_R, fields.sequences_R), kl_controller_.value);
    }
    if (given == TopKTokens::kPolicyTop) batch.top_k_ids_RK = old.top_ids_RK;
  }
  if (loss_->needs_teacher()) {
    const RowValues teacher = executor_of(*frozen_.teacher).execute_forward(plan(batch, strategy), batch);
    fields.teacher_log_probs_R = teacher.log_probs_R;
    if (given == TopKTokens::kPolicyTop) fields.teacher_top_k_RK = teacher.top_k_log_probs_RK;
  }
  return batch;
}

// Sets the engine's top-k tokens of each loss row. Loss rows with fewer top-k tokens are padded with a token
// of probability 0.
void GradientStep::set_top_k_tokens(const std::vector<const Trajectory*>& trajectories,
                                    TrainBatch& batch) const {
  size_t width = 0;
  std::vector<const Trajectory*> rows;
  for (const Trajectory* trajectory : trajectories)
    if (trajectory->in_loss()) rows.push_back(trajectory);
  const auto each = [&](const auto& use) {
    for (size_t s = 0; s < rows.size(); ++s)
      for (const int32_t position : batch.trained_positions[s]) use(*rows[s], static_cast<size_t>(position));
  };
  each([&](const Trajectory& row, size_t i) {
    if (row.top_ids.size() <= i || row.top_ids[i].empty())
      throw UserError(
          str("setting ",
              loss_->needs_reference_top_k() ? std::string("kl_loss_type: topk")
                                             : "correction: " + settings_.loss.correction,
              " needs the engine's most likely tokens at each trained token, but some have none "
              "(`top_ids` of a rollout file); expected gconfig.top_logprobs above 0, for example 20"));
    width = std::max(width, row.top_ids[i].size());
  });
  std::vector<int64_t> ids;
  std::vector<double> log_probs;
  each([&](const Trajectory& row, size_t i) {
    ids.insert(ids.end(), row.top_ids[i].begin(), row.top_ids[i].end());
    log_probs.insert(log_probs.end(), row.top_logprobs[i].begin(), row.top_logprobs[i].end());
    ids.resize(ids.size() + width - row.top_ids[i].size(), 0);
    log_probs.resize(ids.size(), -std::numeric_limits<double>::infinity());
  });
  const int64_t vocabulary = model_.config().vocab_size;
  for (const int64_t id : ids)
    if (id < 0 || id >= vocabulary)
      throw UserError(str("a rollout's top_ids has token ", id, ", outside the vocabulary of ", vocabulary));
  const auto shape = {batch.num_rows(), static_cast<int64_t>(width)};
  batch.top_k_ids_RK = at::tensor(ids, at::kLong).view(shape);
  batch.fields.behaviour_top_k_RK =
      at::tensor(log_probs, at::kDouble).to(accumulator_type(model_.dtype())).view(shape);
}

at::Tensor GradientStep::kl_rewards(const TrainBatch& batch, const std::string& strategy) {
  const at::Tensor reference_R =
      executor_of(*frozen_.reference).execute_forward(plan(batch, strategy), batch).log_probs_R;
  return kl_in_reward(batch, values(batch, strategy).log_probs_R, reference_R).mul(-kl_controller_.value);
}

// The KL of each loss row. Also adds the batch to the mean that finish() reports.
at::Tensor GradientStep::kl_in_reward(const TrainBatch& batch, const at::Tensor& old_log_probs_R,
                                      const at::Tensor& reference_log_probs_R) {
  const at::Tensor kl_R = kl_estimate(settings_.loss.kl_estimator, old_log_probs_R, reference_log_probs_R);
  const double sequences = static_cast<double>(std::ranges::count_if(
      batch.trained_positions, [](const auto& positions) { return !positions.empty(); }));
  kl_in_reward_.merge({WeightedSum::Kind::mean,
                       mean_of_sequence_means(kl_R, batch.fields.sequences_R) * sequences, sequences});
  return kl_R;
}

MetricValues GradientStep::finish(const WeightedSums& sums) {
  const LossSettings& settings = settings_.loss;
  MetricValues values;
  if (settings.kl_ctl != 0.0) {
    values["kl_ctl/coef"] = kl_controller_.value;
    values["kl_ctl/kl"] = kl_in_reward_.value();
    kl_controller_.update(kl_in_reward_.value(), static_cast<int64_t>(kl_in_reward_.weight));
    kl_in_reward_ = {};
  }
  if (settings.target_entropy) {
    values["policy/entropy_coef"] = *entropy_controller_.coefficient();
    if (const auto entropy = sums.find("policy/entropy"); entropy != sums.end() && entropy->second.weight > 0)
      entropy_controller_.update(entropy->second.value());
  }
  if (route_differences_.rows > 0)
    values["experts/records_differ"] =
        static_cast<double>(route_differences_.different) / static_cast<double>(route_differences_.rows);
  route_differences_ = {};
  const int64_t num_steps = version_.value_or(num_finished_) + 1;
  ++num_finished_;
  if (settings.ref_model_sync_steps > 0 && num_steps % settings.ref_model_sync_steps == 0) {
    const auto from = model_.parameters(), to = frozen_.reference->parameters();
    BOUGH_CHECK(from.size() == to.size(), "the reference has ", to.size(), " tensors, the model ",
                from.size());
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < from.size(); ++i) {
      const auto acc = accumulator_type(model_.dtype());
      to[i]->value.copy_(
          at::lerp(to[i]->value.to(acc), from[i]->value.to(acc), settings.ref_model_mixup_alpha));
    }
    values["policy/reference_renewed"] = 1;
  } else if (settings.ref_model_sync_steps > 0) {
    values["policy/reference_renewed"] = 0;
  }
  return values;
}

Json GradientStep::state() const {
  if (settings_.loss.kl_ctrl.type != "adaptive" && !settings_.loss.target_entropy) return nullptr;
  return {{"kl_ctl", kl_controller_.value},
          {"entropy_coef", entropy_controller_.value},
          {"entropy_is_on", entropy_controller_.is_on}};
}

void GradientStep::restore(const Json& state) {
  if (!state.is_object()) return;
  kl_controller_.value = state.at("kl_ctl").get<double>();
  entropy_controller_.value = state.at("entropy_coef").get<double>();
  entropy_controller_.is_on = state.at("entropy_is_on").get<bool>();
}

Plan GradientStep::plan(const TrainBatch& batch, const std::string& strategy) const {
  PlanRequest request = plan_request(batch, settings_.mb_spec, settings_.tree, costs_);
  if (costs_ && !request.memory_bytes) request.memory_bytes = pass_memory_.bytes();
  if (ranks_) request.pipeline = ranks_->pipeline();
  if (settings_.deterministic) return plan_shards(request, strategy);
  return ranks_ && ranks_->num_replicas() > 1
             ? plan_shard(strategy, request, ranks_->replica(), ranks_->num_replicas())
             : make_plan(strategy, request);
}

// The plans of this rank's fixed shares, one after another.
Plan GradientStep::plan_shards(const PlanRequest& request, const std::string& strategy) const {
  const int64_t size = ranks_ ? ranks_->num_replicas() : 1, rank = ranks_ ? ranks_->replica() : 0;
  const int64_t own = kFixedShares / size;
  Plan all;
  for (int64_t share = rank * own; share < (rank + 1) * own; ++share) {
    Plan plan = plan_shard(strategy, request, share, kFixedShares);
    all.strategy = plan.strategy;
    all.max_tokens_per_pass = std::max(all.max_tokens_per_pass, plan.max_tokens_per_pass);
    std::ranges::move(plan.trees, std::back_inserter(all.trees));
  }
  return all;
}

// Computes the gradients of this rank's shares (kFixedShares, collective_buckets.h) one by one, each from
// zero. Two partial sums of the same number of shares are added as soon as both exist. So at most log2(number
// of shares) partial sums are in memory besides the current gradient.
ExecutionResult GradientStep::add_gradient_by_shares(const Plan& plan, const TrainBatch& batch) {
  const int64_t size = ranks_ ? ranks_->num_replicas() : 1, rank = ranks_ ? ranks_->replica() : 0;
  const int64_t own = kFixedShares / size;
  const PrefixTree tree = build_prefix_tree(batch.sequences);
  const auto shares = balance_load(tree, kFixedShares, balance_weights(costs_));
  std::vector<int64_t> share_of_sequence(batch.sequences.size());
  for (size_t share = 0; share < shares.size(); ++share)
    for (const int64_t sequence : shares[share].sequences)
      share_of_sequence[static_cast<size_t>(sequence)] = static_cast<int64_t>(share);
  std::vector<Plan> plans(static_cast<size_t>(own), Plan{plan.strategy, plan.max_tokens_per_pass, {}});
  for (const PlannedTree& planned : plan.trees)
    if (!planned.sequences.empty())
      plans.at(static_cast<size_t>(share_of_sequence[static_cast<size_t>(planned.sequences[0])] - rank * own))
          .trees.push_back(planned);

  model_.allocate_gradients();
  const std::vector<Parameter*> parameters = model_.trained_parameters();
  ExecutorOptions options = options_of(model_);  // of one share; its sums over ranks come at the end
  options.ranks = options.context_ranks = nullptr;
  if (settings_.router_losses.router_aux_loss_coef > 0)
    options.expert_shares_E = executor_.expert_shares(plan, batch);
  Executor executor(model_, options);
  std::vector<ExecutionResult> results;
  std::vector<std::pair<int64_t, std::vector<at::Tensor>>> partial;  // number of shares, gradient sum
  for (const Plan& share : plans) {
    results.push_back(executor.execute(share, batch, *loss_));
    int64_t count = 1;
    for (; !partial.empty() && partial.back().first == count; count *= 2) {
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i]->main_grad.add_(partial.back().second[i]);
      partial.pop_back();
    }
    if (count == own) break;
    std::vector<at::Tensor> gradient;
    for (const Parameter* parameter : parameters) {
      gradient.push_back(parameter->main_grad.clone());
      parameter->main_grad.zero_();
    }
    partial.emplace_back(count, std::move(gradient));
  }
  return sum_shards(std::move(results), data_parallel_group());
}

ExecutionResult GradientStep::add_gradient(const Plan& plan, const TrainBatch& batch, BlockHead* beside) {
  ExecutionResult result = settings_.deterministic ? add_gradient_by_shares(plan, batch)
                                                   : executor_.execute(plan, batch, *loss_, beside);
  if (sums_gradients_) sum_gradients(model_, data_parallel_group());
  synchronize(model_.device());
  return result;
}

StepTimer::StepTimer(Model& model, FrozenModels frozen, const ActorSettings& settings,
                     const std::vector<Trajectory>& batch, const Options& options)
    : model_(model),
      ranks_(options.ranks),
      costs_(context_costs({std::shared_ptr<void>(), options.costs}, ranks_ ? ranks_->sizes().context : 1)),
      step_(model, frozen, settings, costs_.get(), ranks_),
      asked_strategy_(options.strategy) {
  for (const Trajectory& trajectory : batch) batch_.push_back(&trajectory);
  model_.allocate_gradients();
}

void StepTimer::run(bool counted) {
  const PeakBytes peak(model_.device());
  synchronize(model_.device());
  if (ranks_ && ranks_->all()) ranks_->all()->barrier();
  const auto start = std::chrono::steady_clock::now();
  model_.zero_gradients();
  const TrainBatch batch = step_.prepare_batch(batch_, /*is_one_update=*/true, asked_strategy_);
  const Plan plan = step_.plan(batch, asked_strategy_);
  const ExecutionResult result = step_.add_gradient(plan, batch);
  synchronize(model_.device());
  if (counted) seconds_.push_back(seconds_since(start));
  peak_bytes_ = std::max(peak_bytes_, peak.bytes());
  loss_ = result.loss;
  num_trained_ = batch.num_rows();
  strategy_ = plan.strategy;
  max_tokens_per_pass_ = plan.max_tokens_per_pass;
  simulation_ = simulate(plan, step_.costs(), ranks_ ? ranks_->pipeline() : Pipeline{});
}

double StepTimer::median_seconds() const {
  BOUGH_CHECK(!seconds_.empty(), "no measured step was counted");
  return median(seconds_);
}

}  // namespace bough
