#include "train/step_metrics.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string_view>

#include "train/critic.h"
#include "train/sequence_steps.h"

namespace bough {

MetricValues combine(const WeightedSums& sums, int64_t num_updates) {
  MetricValues values;
  for (const auto& [name, metric] : sums) {
    values[name] = metric.kind == WeightedSum::Kind::sum ? metric.value() / static_cast<double>(num_updates)
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

int64_t tokens_twice(const std::vector<TokenSpan>& sequences, int64_t num_ranks,
                     const BalanceWeights& weights) {
  const PrefixTree tree = build_prefix_tree(sequences);
  int64_t tokens = -tree.num_tokens();
  for (const RankShare& share : balance_load(tree, num_ranks, weights)) tokens += share.num_tokens;
  return tokens;
}

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
