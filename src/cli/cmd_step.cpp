// `bough step`: the gradient of one training step on a rollout file, timed. Weights are not changed.
#include <ATen/Parallel.h>

#include <algorithm>

#include "base/error.h"
#include "base/format.h"
#include "cli/command.h"
#include "cli/step_input.h"
#include "models/checkpoint.h"

namespace bough {

namespace {

struct Options : StepOptions {
  std::string grads;
  std::string mode = "auto";
};

void print_report(const Options& options, const StepTimer& step, const StepInput& input) {
  const auto [least, most] = std::minmax_element(step.seconds().begin(), step.seconds().end());
  const Simulation& simulation = step.simulation();
  const TreeStatistics& tree = input.statistics;
  const double work_ratio = input.work.ratio();
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

void run_step(const Options& options) {
  check_strategy("--mode", options.mode);
  if (!options.grads.empty()) check_output_file("--grads", options.grads);
  const StepInput input = load_step(options, step_settings(options, options.mode));
  const std::unique_ptr<StepTimer> timer = input.timer(input.settings.tree.strategy());
  StepTimer& step = *timer;
  step.run(/*counted=*/false);
  for (int64_t i = 0; i < options.repeat; ++i) step.run(/*counted=*/true);
  if (!options.grads.empty()) write_safetensors(options.grads, named_gradients(*input.model));
  print_report(options, step, input);
}

}  // namespace

void add_step_command(CommandLine& line) {
  auto options = std::make_shared<Options>();
  CLI::App& command = line.add("step", "The gradient of one training step on a rollout file, timed",
                               [options] { run_step(*options); });
  add_step_options(command, *options);
  command.add_option("--grads", options->grads, "Write every parameter's gradient (.safetensors)")
      ->type_name("FILE");
  command.add_option("--mode", options->mode,
                     str(format_choices(strategy_names()), "; auto is the least predicted time"));
}

}  // namespace bough
