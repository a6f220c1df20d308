#include "train/trainer.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "algo/minibatches.h"
#include "base/error.h"

namespace bough {

namespace {

double seconds_between(Clock::Time begin, Clock::Time end) {
  return std::chrono::duration<double>(end - begin).count();
}

// Of each sequence the number of its group, by first appearance.
std::vector<int64_t> group_numbers(const std::vector<Trajectory>& batch) {
  std::vector<int64_t> numbers;
  std::map<std::string_view, int64_t> known;
  for (const Trajectory& rollout : batch)
    numbers.push_back(known.try_emplace(rollout.group, static_cast<int64_t>(known.size())).first->second);
  return numbers;
}

bool has_trained_token(const Trajectory& rollout) {
  for (size_t i = 0; i < rollout.input_ids.size(); ++i)
    if (rollout.trains(i)) return true;
  return false;
}

// A metric of the whole step from those of its mini-batches. Losses are per optimizer step: their mean.
MetricValues combine(const WeightedSums& sums, size_t num_mini_batches) {
  MetricValues values;
  for (const auto& [name, metric] : sums) {
    values[name] = metric.kind == WeightedSum::Kind::sum
                       ? metric.value() / static_cast<double>(num_mini_batches)
                       : metric.value();
  }
  return values;
}

}  // namespace

struct Trainer::MiniBatch {
  TrainBatch batch;
  std::vector<int64_t> groups;     // [S]
  std::vector<double> advantages;  // [S]
  std::vector<float> behaviour;    // [R]
};

Trainer::Trainer(Model& model, Model* reference, const ActorSettings& settings, int64_t total_steps,
                 const Clock& clock)
    : model_(model),
      reference_(reference),
      settings_(settings),
      loss_(make_loss(settings.loss)),
      optimizer_(model, settings.optimizer, total_steps * settings.ppo_n_minibatches),
      executor_(model),
      clock_(clock) {
  BOUGH_CHECK(!loss_->needs_reference() || reference_, "the loss needs a reference model");
}

Trainer::MiniBatch Trainer::make_mini_batch(const std::vector<Trajectory>& batch,
                                            const std::vector<int64_t>& members) const {
  MiniBatch mini;
  const std::vector<int64_t> groups = group_numbers(batch);
  std::vector<TokenSpan> sequences;
  std::vector<std::span<const uint8_t>> masks;
  for (const int64_t index : members) {
    const Trajectory& rollout = batch[static_cast<size_t>(index)];
    sequences.emplace_back(rollout.input_ids);
    masks.emplace_back(rollout.loss_mask);
    mini.groups.push_back(groups[static_cast<size_t>(index)]);
    mini.advantages.push_back(rollout.advantage.empty() ? 0.0 : rollout.advantage.front());
  }
  mini.batch = make_batch(sequences, masks, batch[static_cast<size_t>(members.front())].temperature);
  for (size_t s = 0; s < members.size(); ++s) {
    const Trajectory& rollout = batch[static_cast<size_t>(members[s])];
    for (const int32_t position : mini.batch.trained_positions[s])
      mini.behaviour.push_back(rollout.logprobs[static_cast<size_t>(position)]);
  }
  return mini;
}

Plan Trainer::plan_of(const MiniBatch& mini, const std::string& strategy) const {
  return make_plan(strategy, plan_request(mini.batch, settings_.mb_spec, costs_.passes.get()));
}

// All fields that do not change while the batch is trained on.
void Trainer::fill_fixed_fields(MiniBatch& mini, bool proximal_is_current) {
  const at::ScalarType dtype = accumulator_type(model_.dtype());
  LossRows& fields = mini.batch.fields;
  std::vector<int64_t> trained_tokens;
  for (const auto& positions : mini.batch.trained_positions)
    trained_tokens.push_back(static_cast<int64_t>(positions.size()));
  fields.weights_R = expand_to_rows(sequence_weights(settings_.aggregation, trained_tokens, mini.groups),
                                    fields.sequences_R, dtype);
  fields.advantages_R = expand_to_rows(mini.advantages, fields.sequences_R, dtype);
  fields.behaviour_log_probs_R = at::tensor(mini.behaviour, at::kFloat).to(dtype);
  fields.proximal_is_current = proximal_is_current;
  if (!proximal_is_current && loss_->needs_proximal()) {
    fields.proximal_log_probs_R =
        executor_.forward(plan_of(mini, settings_.tree_training_mode), mini.batch).log_probs_R;
  }
  if (loss_->needs_reference()) {
    Executor reference(*reference_);
    fields.reference_log_probs_R =
        reference.forward(plan_of(mini, settings_.tree_training_mode), mini.batch).log_probs_R;
  }
}

MetricValues Trainer::train(const std::vector<Trajectory>& batch) {
  const Clock::Time start = clock_.now();
  const std::vector<int64_t> numbers = group_numbers(batch);
  std::vector<int64_t> kept, groups, tokens;
  for (size_t s = 0; s < batch.size(); ++s) {
    const Trajectory& rollout = batch[s];
    if (!rollout.trained || !has_trained_token(rollout)) continue;
    kept.push_back(static_cast<int64_t>(s));
    groups.push_back(numbers[s]);
    tokens.push_back(static_cast<int64_t>(rollout.input_ids.size()));
  }
  MetricValues values;
  values["optim/skipped_steps"] = static_cast<double>(optimizer_.num_skipped());
  if (kept.empty()) return values;

  std::vector<MiniBatch> minis;
  for (const auto& members : split_minibatches(groups, tokens, settings_.ppo_n_minibatches)) {
    std::vector<int64_t> sequences;
    for (const int64_t member : members) sequences.push_back(kept[static_cast<size_t>(member)]);
    minis.push_back(make_mini_batch(batch, sequences));
  }
  // Before the first update, all of them: pi_old is the policy of the start.
  for (MiniBatch& mini : minis) fill_fixed_fields(mini, minis.size() == 1);

  std::vector<Plan> plans;
  WeightedSums sums;
  double grad_norm = 0, lr = 0, gradient_seconds = 0;
  for (MiniBatch& mini : minis) {
    plans.push_back(plan_of(mini, settings_.tree_training_mode));
    const Clock::Time planned = clock_.now();
    const WalkResult result = executor_.forward_backward(plans.back(), mini.batch, *loss_);
    gradient_seconds += seconds_between(planned, clock_.now());
    merge(sums, result.metrics);
    const Optimizer::Report report = optimizer_.step();
    grad_norm += report.grad_norm / static_cast<double>(minis.size());
    lr = report.lr;
  }
  values.merge(combine(sums, minis.size()));
  values["optim/grad_norm"] = grad_norm;
  values["optim/lr"] = lr;
  values["optim/skipped_steps"] = static_cast<double>(optimizer_.num_skipped());

  std::vector<TokenSpan> sequences;
  for (const int64_t index : kept)
    sequences.emplace_back(batch[static_cast<size_t>(index)].input_ids);
  const PrefixTree tree = build_prefix_tree(sequences);
  std::vector<const Plan*> plan_pointers;
  for (const Plan& plan : plans) plan_pointers.push_back(&plan);
  values.merge(tree_metrics(tree, plan_pointers, costs_.passes.get(), gradient_seconds));
  const double seconds = std::max(1e-9, seconds_between(start, clock_.now()));
  values["time/train"] = seconds;
  values["perf/train_tokens_per_s"] = static_cast<double>(tree.num_flat_tokens()) / seconds;
  values["perf/unique_tokens_per_s"] = static_cast<double>(tree.num_tokens()) / seconds;
  if (costs_.matrix_product_rate > 0) {
    std::vector<uint8_t> trained;
    for (const int64_t index : kept) {
      const auto& mask = batch[static_cast<size_t>(index)].loss_mask;
      trained.insert(trained.end(), mask.begin(), mask.end());
    }
    const StepWork work = count_work(tree, trained, costs_.work);
    values["perf/mfu"] = kStepOverForward * work.tree / (costs_.matrix_product_rate * seconds);
  }
  return values;
}

double Trainer::time_gradient(const std::vector<Trajectory>& batch, const std::string& strategy) {
  std::vector<int64_t> members;
  for (size_t s = 0; s < batch.size(); ++s)
    if (batch[s].trained) members.push_back(static_cast<int64_t>(s));
  if (members.empty()) return 0;
  MiniBatch mini = make_mini_batch(batch, members);
  fill_fixed_fields(mini, true);
  const Clock::Time start = clock_.now();
  const Plan plan = plan_of(mini, strategy);
  executor_.forward_backward(plan, mini.batch, *loss_);
  const double seconds = seconds_between(start, clock_.now());
  model_.zero_gradients();
  return seconds;
}

MetricValues tree_metrics(const PrefixTree& tree, const std::vector<const Plan*>& plans,
                          const PassCosts* costs, double seconds) {
  const TreeStatistics statistics = compute_statistics(tree);
  int64_t forwarded = 0, recomputed = 0, peak_bytes = 0;
  double predicted = 0;
  for (const Plan* plan : plans) {
    const Simulation simulation = simulate(*plan, costs);
    predicted += simulation.seconds;
    peak_bytes = std::max(peak_bytes, simulation.peak_bytes);
    forwarded += simulation.tokens_forwarded;
    recomputed += simulation.tokens_recomputed;
  }
  MetricValues values;
  values["tree/compression"] = statistics.compression;
  values["tree/attention_compression"] = statistics.attention_compression;
  values["tree/recomputed_fraction"] =
      forwarded > 0 ? static_cast<double>(recomputed) / static_cast<double>(forwarded) : 0.0;
  if (costs) values["memory/predicted"] = static_cast<double>(peak_bytes);
  if (costs && seconds > 0) values["tree/predicted_over_measured"] = predicted / seconds;
  return values;
}

}  // namespace bough
