// `bough bench step`: the time of every strategy (plan/plan.h) on a rollout file, and a lower bound of this
// time. `bough bench profile`: measures the device profile from which plan costs are computed.
//
// The lower bound: the FLOPs of one training step on the prefix tree, divided by the best FLOP/s of a matrix
// product, measured in the same run at the model's shapes. The FLOPs are the linear layers of each token,
// lm_head of each head row, attention of each visible pair of tokens, and twice as much for backward.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "cli/command.h"
#include "cli/op_times.h"
#include "cli/step_input.h"
#include "cost/calibrate.h"
#include "cost/rates.h"

namespace bough {

namespace {

struct BenchStepOptions : StepOptions {
  std::vector<std::string> modes = {strategy_names().begin(), strategy_names().end()};
};

struct StepBound {
  double rate = 0;     // FLOP/s
  double seconds = 0;  // of one training step on the tree
  double dense_seconds = 0;
};

struct Line {
  std::string mode;
  std::unique_ptr<StepTimer> timer;
  std::string error;  // set if the strategy has no plan
};

// The name under which an op is listed in the command's output: a Bough kernel without the suffix _forward or
// _backward, "matrix products", or "libtorch: " and the op's name.
std::string op_group(const std::string& op) {
  if (op == "bough::matrix_product" || op == "bough::batch_invariant_product" ||
      op == "bough::add_matrix_product_")
    return "matrix products";
  if (!op.starts_with("bough::"))
    return "libtorch: " + op.substr(op.find("::") == std::string::npos ? 0 : op.find("::") + 2);
  std::string name = op.substr(7);
  for (const char* suffix : {"_forward", "_backward_", "_backward"})
    if (name.ends_with(suffix)) {
      name = name.substr(0, name.size() - std::string_view(suffix).size());
      break;
    }
  std::replace(name.begin(), name.end(), '_', ' ');
  return name;
}

// Each listed op's share of the time of one training step, largest first. "between ops" is the time outside
// of ops.
std::vector<std::pair<std::string, double>> op_shares(StepTimer& timer, at::Device device) {
  const auto start = std::chrono::steady_clock::now();
  std::map<std::string, double> groups;
  {
    OpTimes times(device);
    timer.run(/*counted=*/false);
    for (const auto& [op, seconds] : times.seconds()) groups[op_group(op)] += seconds;
  }
  const double total = seconds_since(start);
  double inside = 0;
  for (const auto& [group, seconds] : groups) inside += seconds;
  std::vector<std::pair<std::string, double>> shares(groups.begin(), groups.end());
  shares.emplace_back("between ops", std::max(0.0, total - inside));
  for (auto& [group, seconds] : shares) seconds /= total;
  std::sort(shares.begin(), shares.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return shares;
}

Json line_json(const Line& line, const TreeStatistics& tree, const StepBound& bound) {
  if (!line.timer) return {{"error", line.error}};
  const StepTimer& step = *line.timer;
  const double seconds = step.median_seconds();
  return {{"strategy", step.strategy()},
          {"max_tokens_per_mb", step.max_tokens_per_pass()},
          {"passes", step.simulation().num_passes},
          {"tokens_recomputed", step.simulation().tokens_recomputed},
          {"seconds_per_step", seconds},
          {"predicted_seconds", step.simulation().seconds},
          {"tokens_per_second", static_cast<double>(tree.num_flat_tokens) / seconds},
          {"tree_tokens_per_second", static_cast<double>(tree.num_tree_tokens) / seconds},
          {"bound_fraction", bound.seconds / seconds},
          {"peak_bytes", step.peak_bytes()},
          {"predicted_peak_bytes", step.simulation().peak_bytes}};
}

std::string line_text(const Line& line, const TreeStatistics& tree, const StepBound& bound,
                      double dense_seconds) {
  if (!line.timer) return line.error;
  const StepTimer& step = *line.timer;
  const double seconds = step.median_seconds();
  const auto per_second = [&](int64_t tokens) {
    return format_thousands(std::llround(static_cast<double>(tokens) / seconds));
  };
  std::string text = str(format_duration(seconds), ", ", format_significant(100 * bound.seconds / seconds, 2),
                         "% of the bound");
  if (dense_seconds > 0) text += str(", ", format_significant(dense_seconds / seconds, 3), "x dense");
  return text + str("; ", per_second(tree.num_flat_tokens), " tokens/s flat, ",
                    per_second(tree.num_tree_tokens), " unique; ", step.simulation().num_passes,
                    " passes of ", step.max_tokens_per_pass(), "; ",
                    format_bytes(static_cast<double>(step.peak_bytes())), ", predicted ",
                    format_bytes(static_cast<double>(step.simulation().peak_bytes)));
}

void run_bench_step(const BenchStepOptions& options) {
  for (const auto& mode : options.modes) check_strategy("--modes", mode);
  const StepInput input = load_step(options, step_settings(options, ""));
  if (input.settings.tree.strategy() != "auto")
    throw UserError("actor.tree_training_mode: cannot be set here; choose the strategies with --modes");
  const TreeStatistics& statistics = input.statistics;
  const StepWork& work = input.work;

  std::vector<Line> lines;
  for (const auto& mode : options.modes) {
    Line line{mode, nullptr, ""};
    auto timer = input.timer(mode);
    try {
      timer->run(/*counted=*/false);
      line.timer = std::move(timer);
    } catch (const UserError& error) {
      line.error = error.what();
    }
    lines.push_back(std::move(line));
  }
  StepBound bound;
  for (int64_t i = 0; i < options.repeat; ++i) {  // in turns, so that a busy minute affects all
    bound.rate = std::max(
        bound.rate, matrix_product_rate(input.costs.shape(), input.model->dtype(), input.model->device()));
    for (auto& line : lines)
      if (line.timer) line.timer->run(/*counted=*/true);
  }
  bound.seconds = kStepOverForward * work.tree / bound.rate;
  bound.dense_seconds = kStepOverForward * work.flat / bound.rate;
  std::vector<std::pair<std::string, double>> shares;
  const auto first =
      std::find_if(lines.begin(), lines.end(), [](const Line& line) { return line.timer != nullptr; });
  if (first != lines.end()) shares = op_shares(*first->timer, input.model->device());

  if (options.json) {
    Json strategies = Json::object(), ops = Json::object();
    for (const auto& line : lines) strategies[line.mode] = line_json(line, statistics, bound);
    for (const auto& [op, share] : shares) ops[op] = share;
    print_json({{"tokens", statistics.num_flat_tokens},
                {"tree_tokens", statistics.num_tree_tokens},
                {"compression", statistics.compression},
                {"work_ratio", work.ratio()},
                {"flops", kStepOverForward * work.tree},
                {"matrix_product_flops_per_second", bound.rate},
                {"bound_seconds", bound.seconds},
                {"dense_bound_seconds", bound.dense_seconds},
                {"strategies", strategies},
                {"ops", ops},
                {"ops_of", first != lines.end() ? first->mode : ""},
                {"dtype", dtype_name(input.model->dtype())},
                {"threads", at::get_num_threads()},
                {"repeat", options.repeat}});
    return;
  }
  print_table(
      {{"tokens", str(format_thousands(statistics.num_flat_tokens), ", in the tree ",
                      format_thousands(statistics.num_tree_tokens))},
       {"compression", format_significant(statistics.compression)},
       {"work ratio", str(format_significant(work.ratio()), ": FLOPs of a dense step / FLOPs with the tree")},
       {"matrix products", str(format_significant(bound.rate / 1e9, 3), " GFLOP/s, measured")},
       {"lower bound", str(format_duration(bound.seconds), " with the tree, ",
                           format_duration(bound.dense_seconds), " dense")},
       {"computed in", str(dtype_name(input.model->dtype()), ", ", at::get_num_threads(),
                           " threads, medians of ", options.repeat, " interleaved runs")}});
  const auto dense = std::find_if(lines.begin(), lines.end(),
                                  [](const Line& line) { return line.mode == "dense" && line.timer; });
  const double dense_seconds = dense == lines.end() ? 0 : dense->timer->median_seconds();
  print_text("\n");
  std::vector<std::pair<std::string, std::string>> rows;
  rows.reserve(lines.size());
  for (const auto& line : lines)
    rows.emplace_back(line.mode, line_text(line, statistics, bound, dense_seconds));
  print_table(rows);
  if (first == lines.end()) return;
  print_text(str("\ntime of ", first->mode, " by op:\n"));
  rows.clear();
  for (const auto& [op, share] : shares)
    if (share >= 0.005) rows.emplace_back(op, str(format_significant(100 * share, 2), "%"));
  print_table(rows);
}

struct ProfileOptions {
  TorchOptions torch;
  std::string out;
  bool json = false;
};

// GFLOP/s by tokens of a pass. The curve gives seconds for each number of tokens, at one FLOP per token.
std::string rates_text(const CostCurve& curve) {
  std::string text;
  for (size_t i = 0; i < curve.sizes.size(); ++i)
    if (curve.values[i] > 0)
      text += str(text.empty() ? "" : "  ", curve.sizes[i], ": ",
                  format_significant(static_cast<double>(curve.sizes[i]) / curve.values[i] / 1e9, 3));
  return text;
}

void run_bench_profile(const ProfileOptions& options) {
  if (!options.out.empty()) check_output_file("--out", options.out);
  const TorchSetup setup = set_up_torch(options.torch);
  const DeviceProfile profile = calibrate(setup.device, setup.dtype, {.show_progress = !options.json});
  if (!options.out.empty()) write_file_atomically(options.out, dump_pretty(profile.to_json()));
  if (options.json) {
    print_json(profile.to_json());
    return;
  }
  print_table(
      {{"device", str(profile.name, ", ", profile.dtype, ", ",
                      format_bytes(static_cast<double>(profile.memory_bytes)))},
       {"source", profile.source},
       {"GFLOP/s by tokens", ""},
       {"products forward", rates_text(profile.linear_forward)},
       {"  and backward", rates_text(profile.linear_backward)},
       {"lm_head forward", rates_text(profile.head_forward)},
       {"  and backward", rates_text(profile.head_backward)},
       {"attention forward", rates_text(profile.attention_forward.by_queries)},
       {"  and backward", rates_text(profile.attention_backward.by_queries)},
       {"least time of a layer", str(format_duration(profile.seconds_per_layer_forward), " forward, ",
                                     format_duration(profile.seconds_per_layer_backward), " backward")}});
}

}  // namespace

void add_bench_command(CommandLine& line) {
  Command bench = line.add("bench", "Measures this machine on your own data", [] {
    throw UserError("the benchmark's name is missing; expected step, rollout, serve or profile");
  });
  add_bench_rollout_command(line, bench);
  add_bench_serve_command(line, bench);
  auto options = std::make_shared<BenchStepOptions>();
  options->repeat = 3;
  Command command =
      line.add(bench, "step", "Times the gradient of a rollout file by every strategy, beside a lower bound",
               [options] { run_bench_step(*options); });
  add_step_options(command, *options);
  command
      .add_option("--modes", options->modes,
                  "Strategies to time, interleaved; the first one's time is also shown by op")
      .type_name("MODE ...");

  auto profile = std::make_shared<ProfileOptions>();
  Command profiling =
      line.add(bench, "profile", "Measures the device profile from which plan costs are computed",
               [profile] { run_bench_profile(*profile); });
  add_torch_options(profiling, profile->torch, /*loads_model=*/false);
  profiling
      .add_option("--out", profile->out, "File for the profile; the setting `calibration` of a run reads it")
      .type_name("FILE");
  add_json_flag(profiling, profile->json);
}

}  // namespace bough
