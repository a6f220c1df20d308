#include "train/trainer.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "algo/minibatches.h"
#include "base/error.h"

namespace bough {

namespace {

// A metric of the whole step from those of its mini-batches. Losses are per optimizer step: their mean.
MetricValues combine(const WeightedSums& sums, size_t num_mini_batches) {
  MetricValues values;
  for (const auto& [name, metric] : sums) {
    values[name] = metric.kind == WeightedSum::Kind::sum
                       ? metric.value() / static_cast<double>(num_mini_batches)
                       : metric.value();
  }
  // Of factors or weights (mean)^2 / mean of their squares: the part of the tokens that equal ones would take
  // to be as good.
  for (const auto& [name, metric] : sums) {
    constexpr std::string_view kSquare = "_square_mean";
    if (!name.ends_with(kSquare)) continue;
    const double mean = values.at(name.substr(0, name.size() - kSquare.size()) + "_mean");
    const double square = values.extract(name).mapped();
    values[name.substr(0, name.find('/')) + "/effective_sample_size"] = square > 0 ? mean * mean / square : 0;
  }
  return values;
}

}  // namespace

Trainer::Trainer(Model& model, Model* reference, const ActorSettings& settings, int64_t total_steps,
                 const Clock& clock)
    : settings_(settings),
      gradient_(model, reference, settings, nullptr),
      optimizer_(model, settings.optimizer, total_steps * settings.ppo_n_minibatches),
      clock_(clock) {}

void Trainer::use_costs(StepCosts costs) {
  costs_ = std::move(costs);
  gradient_.use_costs(costs_.passes.get());
}

MetricValues Trainer::train(const std::vector<Trajectory>& batch) {
  const Clock::Time start = clock_.now();
  std::vector<const Trajectory*> kept;
  std::vector<int64_t> tokens;
  for (const Trajectory& trajectory : batch) {
    if (!trajectory.in_loss() || !trajectory.trains_a_token()) continue;
    kept.push_back(&trajectory);
    tokens.push_back(static_cast<int64_t>(trajectory.input_ids.size()));
  }
  MetricValues values;
  values["optim/skipped_steps"] = static_cast<double>(optimizer_.num_skipped());
  if (kept.empty()) return values;

  // All mini-batches are prepared before the first update: pi_old is the policy of the start.
  const std::string strategy = settings_.tree.strategy();
  const auto members = split_minibatches(group_numbers(kept), tokens, settings_.ppo_n_minibatches);
  std::vector<TrainBatch> minis;
  for (const std::vector<int64_t>& indices : members) {
    std::vector<const Trajectory*> mini;
    for (const int64_t index : indices) mini.push_back(kept[static_cast<size_t>(index)]);
    minis.push_back(gradient_.prepare(mini, members.size() == 1, strategy));
  }

  std::vector<Plan> plans;
  WeightedSums sums;
  double grad_norm = 0, lr = 0, gradient_seconds = 0;
  for (const TrainBatch& mini : minis) {
    plans.push_back(gradient_.plan(mini, strategy));
    const Clock::Time planned = clock_.now();
    const WalkResult result = gradient_.accumulate(plans.back(), mini);
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
  for (const Trajectory* trajectory : kept) sequences.emplace_back(trajectory->input_ids);
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
    for (const Trajectory* trajectory : kept)
      trained.insert(trained.end(), trajectory->loss_mask.begin(), trajectory->loss_mask.end());
    const StepWork work = count_work(tree, trained, costs_.work);
    values["perf/mfu"] = kStepOverForward * work.tree / (costs_.matrix_product_rate * seconds);
  }
  return values;
}

MetricValues tree_metrics(const PrefixTree& tree, const std::vector<const Plan*>& plans,
                          const PassCosts* costs, double seconds) {
  const TreeStatistics statistics = compute_statistics(tree);
  int64_t planned = 0, forwarded = 0, recomputed = 0, peak_bytes = 0;
  double predicted = 0;
  for (const Plan* plan : plans) {
    const Simulation simulation = simulate(*plan, costs);
    predicted += simulation.seconds;
    peak_bytes = std::max(peak_bytes, simulation.peak_bytes);
    planned += num_planned_tokens(*plan);
    forwarded += simulation.tokens_forwarded;
    recomputed += simulation.tokens_recomputed;
  }
  MetricValues values;
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
