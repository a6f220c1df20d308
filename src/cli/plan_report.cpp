#include "cli/plan_report.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/format.h"
#include "cli/command.h"

namespace bough {

namespace {

Json iteration_json(const IterationCost& cost) {
  return {{"rollout_seconds", cost.rollout.seconds()},  {"recompute_seconds", cost.recompute_seconds},
          {"update_seconds", cost.update_seconds},      {"sparse_step_seconds", cost.sparse_step_seconds},
          {"decode_passes", cost.rollout.passes},       {"kv_bytes", cost.rollout.kv_bytes},
          {"summary_bytes", cost.rollout.summary_bytes}};
}

std::string percent(double ratio) {
  return str(format_significant(100 * ratio, 3), "%");
}

std::string strategy_table(const PlanReport& report) {
  using Row = std::array<std::string, 9>;
  std::vector<Row> rows = {{"strategy", "passes", "max tokens", "forwarded", "recomputed", "ERR", "seconds",
                            "peak memory", "vs dense"}};
  const StrategyCost& dense = report.of("dense");
  std::string notes;
  for (const StrategyCost& cost : report.strategies) {
    if (!cost.error.empty()) {
      rows.push_back({cost.strategy, "-", "-", "-", "-", "-", "-", "-", "-"});
      notes += str(cost.strategy, ": ", cost.error, "\n");
      continue;
    }
    const Simulation& s = cost.simulation;
    rows.push_back(
        {cost.strategy, format_thousands(s.num_passes), format_thousands(cost.plan.max_tokens_per_pass),
         format_thousands(s.tokens_forwarded), format_thousands(s.tokens_recomputed),
         percent(cost.effective_reuse), format_significant(s.seconds, 3),
         str(format_bytes(static_cast<double>(s.peak_bytes)), cost.fits ? "" : " (!)"),
         dense.error.empty() ? str(format_significant(dense.simulation.seconds / s.seconds, 3), "x") : "-"});
    if (!cost.fits && notes.find("(!)") == std::string::npos)
      notes += "(!) does not fit into the device's memory beside weights and gradients\n";
  }
  std::array<size_t, 9> widths{};
  for (const Row& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const Row& row : rows) {
    text += row[0] + std::string(widths[0] - row[0].size(), ' ');
    for (size_t i = 1; i < row.size(); ++i) text += std::string(widths[i] - row[i].size() + 2, ' ') + row[i];
    text += "\n";
  }
  return text + notes;
}

std::string choice(const PlanReport& report) {
  const StrategyCost& chosen = report.of("auto");
  const StrategyCost& dense = report.of("dense");
  std::string text =
      str("auto chooses ", chosen.plan.strategy, " with passes of at most ",
          format_thousands(chosen.plan.max_tokens_per_pass), " tokens: least memory of the plans within ",
          format_significant(100 * (kAsFast - 1), 2), "% of the least predicted time");
  int64_t num_blocks = 0, num_by_layer = 0;
  for (const PlannedTree& planned : chosen.plan.trees)
    for (const Block& block : planned.blocks) {
      ++num_blocks;
      num_by_layer += recomputes_layers(block.keep);
    }
  if (num_by_layer > 0)
    text += str("; ", format_thousands(num_by_layer), " of its ", format_thousands(num_blocks),
                " blocks recompute their layers in backward");
  if (const int64_t num_on_host = chosen.simulation.num_on_host; num_on_host > 0)
    text += str(", ", format_thousands(num_on_host), " with the layer inputs in host memory");
  if (dense.error.empty())
    text += str(", ", format_significant(dense.simulation.seconds / chosen.simulation.seconds, 3),
                "x faster than dense, which does ", format_significant(report.work_ratio, 3),
                " times the work; compression is ", format_significant(report.tree.compression, 3));
  return text + "\n";
}

std::string rank_table(const std::vector<RankCost>& ranks) {
  double sum = 0, largest = 0;
  std::string text = str("\nover ", ranks.size(), " ranks:\n");
  for (size_t k = 0; k < ranks.size(); ++k) {
    text += str("rank ", k, "  ", format_thousands(ranks[k].tree_tokens), " tree tokens, ",
                format_significant(ranks[k].seconds, 3), " s\n");
    sum += ranks[k].seconds;
    largest = std::max(largest, ranks[k].seconds);
  }
  if (largest > 0)
    text += str("balance ", format_significant(100 * sum / static_cast<double>(ranks.size()) / largest, 3),
                "%: mean time / slowest time\n");
  return text;
}

}  // namespace

Json report_json(const PlanReport& report) {
  Json strategies = Json::object();
  for (const StrategyCost& cost : report.strategies) {
    if (!cost.error.empty()) {
      strategies[cost.strategy] = {{"error", cost.error}};
      continue;
    }
    const Simulation& s = cost.simulation;
    strategies[cost.strategy] = {{"passes", s.num_passes},
                                 {"max_tokens_per_pass", cost.plan.max_tokens_per_pass},
                                 {"tokens_forwarded", s.tokens_forwarded},
                                 {"tokens_recomputed", s.tokens_recomputed},
                                 {"blocks_on_host", s.num_on_host},
                                 {"err", cost.effective_reuse},
                                 {"peak_stack_tokens", s.peak_stack_tokens},
                                 {"peak_pass_tokens", s.peak_pass_tokens},
                                 {"predicted_seconds", s.seconds},
                                 {"predicted_peak_bytes", s.peak_bytes},
                                 {"fits_device", cost.fits}};
  }
  Json ranks = Json::array();
  for (const RankCost& rank : report.ranks)
    ranks.push_back({{"tree_tokens", rank.tree_tokens}, {"predicted_seconds", rank.seconds}});
  const TreeStatistics& tree = report.tree;
  return {{"num_sequences", tree.num_sequences},
          {"tokens", tree.num_flat_tokens},
          {"tree_tokens", tree.num_tree_tokens},
          {"compression", tree.compression},
          {"work_ratio", report.work_ratio},
          {"attention_compression", tree.attention_compression},
          {"por", tree.potential_overlap_ratio},
          {"longest_path", tree.longest_path},
          {"mean_depth", tree.mean_depth},
          {"leaves", tree.num_leaves},
          {"branch_points", tree.num_branch_points},
          {"max_tokens_per_mb", report.max_tokens_per_mb},
          {"stages", report.stages},
          {"chosen", report.of("auto").plan.strategy},
          {"strategies", strategies},
          {"ranks", ranks},
          {"iteration", iteration_json(report.dense_iteration)},
          {"sparse_iteration", report.sparse_iteration ? iteration_json(*report.sparse_iteration) : Json()}};
}

std::string readable_report(const PlanReport& report, const CostModel& costs) {
  const TreeStatistics& tree = report.tree;
  std::string text =
      table_text({{"sequences", format_thousands(tree.num_sequences)},
                  {"tokens", format_thousands(tree.num_flat_tokens)},
                  {"tree tokens", format_thousands(tree.num_tree_tokens)},
                  {"compression", format_significant(tree.compression)},
                  {"work ratio", str(format_significant(report.work_ratio),
                                     ": FLOPs of a dense step / FLOPs with the tree")},
                  {"attention compression", format_significant(tree.attention_compression)},
                  {"POR", str(percent(tree.potential_overlap_ratio),
                              ": potential overlap ratio, the share of the tokens that the tree saves")},
                  {"longest path", str(format_thousands(tree.longest_path), " tokens")},
                  {"leaves", format_thousands(tree.num_leaves)},
                  {"branch points", format_thousands(tree.num_branch_points)},
                  {"model", str(costs.shape().name, ", ", costs.device().dtype)},
                  {"device", str(costs.device().name, ": ", costs.device().source)}});
  text +=
      str("\npredicted gradient step",
          report.stages > 1 ? str(" over ", report.stages, " pipeline stages") : "", ", passes of at most ",
          format_thousands(report.max_tokens_per_mb), " tokens:\n", strategy_table(report),
          "ERR: effective reuse ratio, the share of the tokens that the plan saves; at most POR\n\n",
          choice(report));
  if (report.ranks.size() > 1) text += rank_table(report.ranks);
  return text;
}

std::string iteration_table(const PlanReport& report, int64_t max_running, const std::string& budget) {
  std::string text = str("\npredicted seconds of an iteration, with at most ", format_thousands(max_running),
                         " samples at once:\n");
  const auto line = [&](const std::string& name, const IterationCost& cost) {
    const auto seconds = [](double value) { return format_significant(value, 3); };
    text += str(name, ": rollout ", seconds(cost.rollout.seconds()), " (attention ",
                seconds(cost.rollout.attention_seconds), ", ", format_bytes(cost.rollout.bytes()),
                " of keys and values), recompute ", seconds(cost.recompute_seconds), ", update ",
                seconds(cost.update_seconds));
    if (cost.sparse_step_seconds > 0)
      text += str(", step of the sparse policy ", seconds(cost.sparse_step_seconds));
    text += str("; total ", seconds(cost.total()), ", rollout ",
                percent(cost.rollout.seconds() / cost.total()), " of it\n");
  };
  line("dense", report.dense_iteration);
  if (!report.sparse_iteration) return text;
  line(str("budget ", budget), *report.sparse_iteration);
  return text +
         str("speed over dense: rollout ",
             format_significant(
                 report.dense_iteration.rollout.seconds() / report.sparse_iteration->rollout.seconds(), 3),
             "x, iteration ",
             format_significant(report.dense_iteration.total() / report.sparse_iteration->total(), 3), "x\n");
}

std::string reuse_note(const PlanReport& report) {
  std::string text =
      str("POR (potential overlap ratio) ", percent(report.tree.potential_overlap_ratio),
          ": the share of the tokens that the whole tree saves. ERR (effective reuse ratio), the "
          "share that a plan saves: ");
  std::string separator;
  for (const StrategyCost& cost : report.strategies) {
    if (!cost.error.empty()) continue;
    text += str(separator, cost.strategy, " ", percent(cost.effective_reuse));
    separator = ", ";
  }
  return text + ".";
}

}  // namespace bough
