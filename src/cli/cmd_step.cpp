// `bough step`: the gradient of one training step on a rollout file, timed. Weights are not changed.
#include <ATen/Parallel.h>

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "base/format.h"
#include "base/log.h"
#include "base/settings.h"
#include "cli/command.h"
#include "cli/plan_costs.h"
#include "cli/rollout_batch.h"
#include "cli/step_timing.h"
#include "cli/torch_options.h"
#include "models/checkpoint.h"
#include "models/model_shape.h"

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

void print_report(const StepOptions& options, const StepTimer& step, const TreeStatistics& tree,
                  double work_ratio) {
  const auto [least, most] = std::minmax_element(step.seconds().begin(), step.seconds().end());
  const Simulation& simulation = step.simulation();
  if (options.json) {
    print_json({{"seconds_per_step", step.median_seconds()},
                {"seconds_min", *least},
                {"seconds_max", *most},
                {"peak_bytes", step.peak_bytes()},
                {"predicted_peak_bytes", simulation.peak_bytes},
                {"predicted_seconds", simulation.seconds},
                {"loss", step.loss()},
                {"sequences", tree.num_sequences},
                {"tokens", tree.num_flat_tokens},
                {"tree_tokens", tree.num_tree_tokens},
                {"trained_tokens", step.num_trained()},
                {"compression", tree.compression},
                {"work_ratio", work_ratio},
                {"mode", step.strategy()},
                {"max_tokens_per_mb", step.max_tokens_per_pass()},
                {"passes", simulation.num_passes},
                {"tokens_recomputed", simulation.tokens_recomputed},
                {"dtype", options.torch.dtype},
                {"threads", at::get_num_threads()},
                {"repeat", options.repeat}});
    return;
  }
  const std::string spread = options.repeat == 1
                                 ? ""
                                 : str(" (", format_duration(*least), " to ", format_duration(*most), ", ",
                                       options.repeat, " times)");
  print_table(
      {{"step", format_duration(step.median_seconds()) + spread},
       {"loss", format_shortest(step.loss())},
       {"tokens", str(format_thousands(tree.num_flat_tokens), " in ", format_thousands(tree.num_sequences),
                      " sequences, ", format_thousands(step.num_trained()), " trained")},
       {"tree tokens",
        str(format_thousands(tree.num_tree_tokens), ", compression ", format_significant(tree.compression),
            ", work ratio ", format_significant(work_ratio))},
       {"passes", str(format_thousands(simulation.num_passes), " of at most ",
                      format_thousands(step.max_tokens_per_pass()), " tokens (", step.strategy(), "), ",
                      format_thousands(simulation.tokens_recomputed), " tokens recomputed")},
       {"peak memory",
        str(format_bytes(static_cast<double>(step.peak_bytes())), " over weights and gradients, predicted ",
            format_bytes(static_cast<double>(simulation.peak_bytes)))},
       {"computed in", str(options.torch.dtype, ", ", at::get_num_threads(), " threads")}});
}

void run_step(const StepOptions& options) {
  check_at_least("--repeat", options.repeat, 1);
  if (options.max_tokens_per_mb)
    check_at_least("--max-tokens-per-mb", *options.max_tokens_per_mb, 1, "a pass holds at least one token");
  check_mode("--mode", options.mode);
  parse_memory("--memory", options.memory);
  if (!options.grads.empty()) check_output_file("--grads", options.grads);
  const std::unique_ptr<Loss> loss = make_step_loss(options.loss);
  const TorchSetup setup = set_up_torch(options.torch);

  // The rollouts first: they are quickly found wrong, weights take long to load.
  const ModelConfig config = load_model_config(options.model);
  const RolloutBatch rollouts(read_rollouts(options.rollouts, {.vocab_size = config.vocab_size}));
  const std::unique_ptr<Model> model = load_model(options.model, setup.dtype, setup.device);
  const CostModel costs(device_profile(options.torch.device, options.torch.dtype),
                        model_shape(model->config(), model->dtype()));
  const PrefixTree tree = build_prefix_tree(rollouts.sequences);
  StepTimer step(*model, rollouts, *loss, costs,
                 {options.mode, options.max_tokens_per_mb.value_or(kDefaultMaxTokensPerPass),
                  parse_memory("--memory", options.memory)});
  step.run(/*counted=*/false);
  for (int64_t i = 0; i < options.repeat; ++i) step.run(/*counted=*/true);
  if (!options.grads.empty()) write_safetensors(options.grads, named_gradients(*model));
  print_report(options, step, compute_statistics(tree),
               count_work(tree, rollouts.trained_flags(), work_model(costs.shape())).ratio());
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
