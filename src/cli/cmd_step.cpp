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
#include "cli/rollout_batch.h"
#include "cli/step_costs.h"
#include "cli/torch_options.h"
#include "kernels/common/cpu_allocator.h"
#include "models/checkpoint.h"
#include "train/executor.h"
#include "train/memory.h"

namespace bough {

namespace {

// Passes below this cost more in overhead than their memory is worth: the least that --memory falls back to.
constexpr int64_t kSmallestPass = 16;

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
  int64_t estimated_bytes = 0;
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

std::string strategy_of(const std::string& mode) {
  if (mode == "auto") return "path";
  if (mode == "dense" || mode == "packed" || mode == "path" || mode == "blocks") return mode;
  throw UserError(str("--mode: got ", quoted(mode), ", expected auto, dense, packed, path or blocks"));
}

// The memory budget in bytes, or nothing where there is none.
std::optional<int64_t> parse_memory(const std::string& text) {
  if (text.empty()) return {};
  try {
    const Bytes bytes = Bytes::parse(text);
    if (bytes.is_auto()) return {};
    return bytes.count;
  } catch (const UserError& error) {
    throw UserError(str("--memory: ", error.what()));
  }
}

struct Sizing {
  int64_t max_tokens_per_pass;
  int64_t estimated_bytes;
};

// The bound on a pass that fits the budget. A bound the user chose stays; the default is halved until it
// fits.
Sizing choose_pass_size(const StepOptions& options, const ModelConfig& config, at::ScalarType dtype,
                        const std::vector<TokenSpan>& sequences) {
  const std::string strategy = strategy_of(options.mode);
  const auto estimate = [&](int64_t max_tokens) {
    return estimate_memory(config, dtype, simulate(make_plan(strategy, {.sequences = sequences, .max_tokens_per_pass = max_tokens}))).total();
  };
  const std::optional<int64_t> budget = parse_memory(options.memory);
  Sizing sizing{options.max_tokens_per_mb.value_or(kDefaultMaxTokensPerPass), 0};
  sizing.estimated_bytes = estimate(sizing.max_tokens_per_pass);
  if (!budget) return sizing;
  while (!options.max_tokens_per_mb && sizing.estimated_bytes > *budget &&
         sizing.max_tokens_per_pass > kSmallestPass) {
    sizing.max_tokens_per_pass /= 2;
    sizing.estimated_bytes = estimate(sizing.max_tokens_per_pass);
  }
  if (sizing.estimated_bytes <= *budget) return sizing;
  const bool can_shrink = sizing.max_tokens_per_pass > kSmallestPass;
  throw UserError(str(
      "--memory ", quoted(options.memory), " does not hold keys, values and activations of this batch: ",
      "--mode ", strategy, " with passes of ", sizing.max_tokens_per_pass, " tokens needs ",
      sizing.estimated_bytes, " bytes (", format_bytes(static_cast<double>(sizing.estimated_bytes)), ")",
      can_shrink
          ? str("; with --max-tokens-per-mb ", kSmallestPass, " ", estimate(kSmallestPass), " bytes would do")
          : "; that is the smallest that would do"));
}

StepReport take_step(const StepOptions& options, Model& model, const RolloutBatch& rollouts,
                     const Loss& loss) {
  StepReport report;
  report.mode = strategy_of(options.mode);
  const Sizing sizing = choose_pass_size(options, model.config(), model.dtype(), rollouts.sequences);
  report.max_tokens_per_pass = sizing.max_tokens_per_pass;
  report.estimated_bytes = sizing.estimated_bytes;
  const PrefixTree tree = build_prefix_tree(rollouts.sequences);
  report.statistics = compute_statistics(tree);
  report.work_ratio = work_ratio(tree, rollouts.trained_flags(), work_model(model.config()));

  Executor executor(model);
  model.allocate_gradients();
  const int64_t weights_and_gradients = cpu_allocated_bytes();
  reset_cpu_peak_bytes();
  for (int64_t i = 0; i <= options.repeat; ++i) {  // the first is the warm-up
    const auto start = std::chrono::steady_clock::now();
    model.zero_gradients();
    const TrainBatch batch = make_train_batch(rollouts, accumulator_type(model.dtype()));
    const Plan plan = make_plan(report.mode, plan_request(batch, report.max_tokens_per_pass));
    const WalkResult result = executor.forward_backward(plan, batch, loss);
    if (i > 0) report.seconds.push_back(seconds_since(start));
    report.loss = result.loss;
    report.num_trained = batch.num_rows();
    report.simulation = simulate(plan);
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
                {"estimated_bytes", report.estimated_bytes},
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
        str(format_bytes(static_cast<double>(report.peak_bytes)), " over weights and gradients")},
       {"computed in", str(options.torch.dtype, ", ", at::get_num_threads(), " threads")}});
}

void run_step(const StepOptions& options) {
  check_at_least("--repeat", options.repeat, 1);
  if (options.max_tokens_per_mb)
    check_at_least("--max-tokens-per-mb", *options.max_tokens_per_mb, 1, "a pass holds at least one token");
  strategy_of(options.mode);
  parse_memory(options.memory);
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
  command.add_option("--mode", options->mode, "dense | path | auto (path)");
  command
      .add_option("--max-tokens-per-mb", options->max_tokens_per_mb,
                  str("Tokens of one pass at most (default: ", kDefaultMaxTokensPerPass, ")"))
      ->type_name("B");
  command
      .add_option("--memory", options->memory,
                  "Budget over weights and gradients, 40GiB: passes shrink to fit,\n"
                  "or the step is refused with what would do. Bounded: keys, values\n"
                  "and their gradients of the longest path, activations and\n"
                  "temporaries of one pass")
      ->type_name("BYTES");
  command.add_option("--loss", options->loss,
                     "pg: minus the mean of advantage x log-probability |\n"
                     "grpo: PPO clip against the file's log-probabilities");
  add_torch_options(command, options->torch);
  add_json_flag(command, options->json);
}

}  // namespace bough
