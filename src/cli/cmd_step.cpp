// `bough step`: the gradient of one training step on a rollout file, timed. Weights are not changed.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "algo/loss.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/format.h"
#include "base/log.h"
#include "base/settings.h"
#include "cli/command.h"
#include "cli/plan_costs.h"
#include "cli/rollout_batch.h"
#include "cli/torch_options.h"
#include "kernels/common/cpu_allocator.h"
#include "models/checkpoint.h"
#include "models/model_shape.h"
#include "train/executor.h"

namespace bough {

namespace {

struct StepOptions {
  std::string model, rollouts, grads;
  int64_t repeat = 1;
  TorchOptions torch;
  std::string mode = "auto";
  std::optional<int64_t> max_tokens_per_mb;
  std::string memory;
  std::string loss = "pg";
  bool json = false;
};

struct StepReport {
  std::vector<double> seconds;  // one a counted repetition, ascending
  int64_t peak_bytes = 0;
  double loss = 0;
  int64_t num_trained = 0;
  double work_ratio = 1;
  TreeStatistics statistics;
  Simulation simulation;
  std::string mode;
  int64_t max_tokens_per_pass = 0;
};

std::unique_ptr<Loss> make_step_loss(const std::string& name) {
  if (name != "pg" && name != "grpo")
    throw UserError(str("--loss: got ", quoted(name), ", expected pg or grpo"));
  LossSettings settings;
  settings.loss = name == "pg" ? "pg" : "ppo";
  // The clip is against the policy that sampled the tokens: a single step has no other.
  settings.use_decoupled_loss = false;
  settings.recompute_logprob = false;
  return make_loss(settings);
}

void check_mode(const std::string& mode) {
  for (const char* known : {"auto", "dense", "packed", "path", "blocks"})
    if (mode == known) return;
  throw UserError(str("--mode: got ", quoted(mode), ", expected auto, dense, packed, path or blocks"));
}

StepReport take_step(const StepOptions& options, Model& model, const RolloutBatch& rollouts,
                     const Loss& loss) {
  StepReport report;
  const CostModel costs(device_profile(options.torch.device, options.torch.dtype),
                        model_shape(model.config(), model.dtype()));
  const PrefixTree tree = build_prefix_tree(rollouts.sequences);
  report.statistics = compute_statistics(tree);
  report.work_ratio = work_ratio(tree, rollouts.trained_flags(), work_model(costs.shape()));
  const auto plan_of = [&](const TrainBatch& batch) {
    PlanRequest request = plan_request(batch, options.max_tokens_per_mb.value_or(kDefaultMaxTokensPerPass));
    request.costs = &costs;
    request.memory_bytes = parse_memory("--memory", options.memory);
    return make_plan(options.mode, request);
  };

  Executor executor(model);
  model.allocate_gradients();
  const int64_t weights_and_gradients = cpu_allocated_bytes();
  reset_cpu_peak_bytes();
  for (int64_t i = 0; i <= options.repeat; ++i) {  // the first is the warm-up
    const auto start = std::chrono::steady_clock::now();
    model.zero_gradients();
    const TrainBatch batch = make_train_batch(rollouts, accumulator_type(model.dtype()));
    const Plan plan = plan_of(batch);
    const WalkResult result = executor.forward_backward(plan, batch, loss);
    if (i > 0) report.seconds.push_back(seconds_since(start));
    report.loss = result.loss;
    report.num_trained = batch.num_rows();
    report.mode = plan.strategy;
    report.max_tokens_per_pass = plan.max_tokens_per_pass;
    report.simulation = simulate(plan, &costs);
  }
  report.peak_bytes = cpu_peak_bytes() - weights_and_gradients;
  std::sort(report.seconds.begin(), report.seconds.end());
  return report;
}

double median(const std::vector<double>& ascending) {
  const size_t middle = ascending.size() / 2;
  return ascending.size() % 2 ? ascending[middle] : (ascending[middle - 1] + ascending[middle]) / 2;
}

void print_report(const StepOptions& options, const StepReport& report) {
  const auto& tree = report.statistics;
  if (options.json) {
    print_json({{"seconds_per_step", median(report.seconds)},
                {"seconds_min", report.seconds.front()},
                {"seconds_max", report.seconds.back()},
                {"peak_bytes", report.peak_bytes},
                {"predicted_peak_bytes", report.simulation.peak_bytes},
                {"predicted_seconds", report.simulation.seconds},
                {"loss", report.loss},
                {"sequences", tree.num_sequences},
                {"tokens", tree.num_flat_tokens},
                {"tree_tokens", tree.num_tree_tokens},
                {"trained_tokens", report.num_trained},
                {"compression", tree.compression},
                {"work_ratio", report.work_ratio},
                {"mode", report.mode},
                {"max_tokens_per_mb", report.max_tokens_per_pass},
                {"passes", report.simulation.num_passes},
                {"tokens_recomputed", report.simulation.tokens_recomputed},
                {"dtype", options.torch.dtype},
                {"threads", at::get_num_threads()},
                {"repeat", options.repeat}});
    return;
  }
  const std::string spread =
      options.repeat == 1 ? ""
                          : str(" (", format_duration(report.seconds.front()), " to ",
                                format_duration(report.seconds.back()), ", ", options.repeat, " times)");
  print_table(
      {{"step", format_duration(median(report.seconds)) + spread},
       {"loss", format_shortest(report.loss)},
       {"tokens", str(format_thousands(tree.num_flat_tokens), " in ", format_thousands(tree.num_sequences),
                      " sequences, ", format_thousands(report.num_trained), " trained")},
       {"tree tokens",
        str(format_thousands(tree.num_tree_tokens), ", compression ", format_significant(tree.compression),
            ", work ratio ", format_significant(report.work_ratio))},
       {"passes", str(format_thousands(report.simulation.num_passes), " of at most ",
                      format_thousands(report.max_tokens_per_pass), " tokens (", report.mode, "), ",
                      format_thousands(report.simulation.tokens_recomputed), " tokens recomputed")},
       {"peak memory",
        str(format_bytes(static_cast<double>(report.peak_bytes)), " over weights and gradients, predicted ",
            format_bytes(static_cast<double>(report.simulation.peak_bytes)))},
       {"computed in", str(options.torch.dtype, ", ", at::get_num_threads(), " threads")}});
}

void run_step(const StepOptions& options) {
  check_at_least("--repeat", options.repeat, 1);
  if (options.max_tokens_per_mb)
    check_at_least("--max-tokens-per-mb", *options.max_tokens_per_mb, 1, "a pass holds at least one token");
  check_mode(options.mode);
  parse_memory("--memory", options.memory);
  if (!options.grads.empty()) check_output_file("--grads", options.grads);
  const std::unique_ptr<Loss> loss = make_step_loss(options.loss);
  const TorchSetup setup = set_up_torch(options.torch);

  // The rollouts first: they are quickly found wrong, weights take long to load.
  const ModelConfig config = load_model_config(options.model);
  const RolloutBatch rollouts(read_rollouts(options.rollouts, {.vocab_size = config.vocab_size}));
  const std::unique_ptr<Model> model = load_model(options.model, setup.dtype, setup.device);
  const StepReport report = take_step(options, *model, rollouts, *loss);
  if (!options.grads.empty()) write_safetensors(options.grads, named_gradients(*model));
  print_report(options, report);
}

}  // namespace

void add_step_command(CommandLine& line) {
  auto options = std::make_shared<StepOptions>();
  CLI::App& command = line.add("step", "The gradient of one training step on a rollout file, timed",
                               [options] { run_step(*options); });
  command.add_option("--model", options->model, "Hugging Face directory; its weights are not changed")
      ->required()
      ->type_name("DIR");
  command.add_option("--rollouts", options->rollouts, "JSON Lines, .jsonl or .jsonl.zst")
      ->required()
      ->type_name("FILE");
  command.add_option("--grads", options->grads, "Write every parameter's gradient (.safetensors)")
      ->type_name("FILE");
  command.add_option("--repeat", options->repeat, "Repetitions, after one that is not counted")
      ->type_name("K");
  command.add_option("--mode", options->mode,
                     "auto: the least predicted time | dense | packed | path | blocks");
  command
      .add_option("--max-tokens-per-mb", options->max_tokens_per_mb,
                  str("Tokens whose activations are held at once (default: ", kDefaultMaxTokensPerPass, ")"))
      ->type_name("B");
  command
      .add_option("--memory", options->memory,
                  "Budget over weights and gradients, 40GiB: the plan keeps within it, or the\n"
                  "step is refused with what would do")
      ->type_name("BYTES");
  command.add_option("--loss", options->loss,
                     "pg: minus the mean of advantage x log-probability |\n"
                     "grpo: PPO clip against the file's log-probabilities");
  add_torch_options(command, options->torch);
  add_json_flag(command, options->json);
}

}  // namespace bough
