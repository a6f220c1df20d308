// `bough step`: computes and times the gradient of one training step on a rollout file. Weights are not
// changed.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/format.h"
#include "base/log.h"
#include "cli/command.h"
#include "cli/launch_ranks.h"
#include "cli/self_tests.h"
#include "cli/step_input.h"
#include "cost/calibrate.h"
#include "kernels/adamw/adamw.h"
#include "models/checkpoint.h"

namespace bough {

namespace {

struct StepCommandOptions : StepOptions {
  std::string grads;
  std::string mode = "auto";
  RanksOptions ranks;
};

double norm_of(const NamedTensors& gradients) {
  double sum = 0;
  for (const auto& [name, gradient] : gradients) sum += sum_of_squares(gradient.contiguous()).item<double>();
  return std::sqrt(sum);
}

void print_report(const StepCommandOptions& options, const StepTimer& step, const StepInput& input,
                  double gradient_norm, int64_t num_ranks) {
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
                {"grad_norm", gradient_norm},
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
                {"blocks_on_host", simulation.num_on_host},
                {"dtype", dtype_name(input.model->dtype())},
                {"threads", at::get_num_threads()},
                {"ranks", num_ranks},
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
       {"gradient norm", format_significant(gradient_norm, 6)},
       {"tokens", str(format_thousands(tree.num_flat_tokens), " in ", format_thousands(tree.num_sequences),
                      " sequences, ", format_thousands(step.num_trained()), " trained")},
       {"tree tokens",
        str(format_thousands(tree.num_tree_tokens), ", compression ", format_significant(tree.compression),
            ", work ratio ", format_significant(work_ratio))},
       {"passes",
        str(format_thousands(simulation.num_passes), " of at most ",
            format_thousands(step.max_tokens_per_pass()), " tokens (", step.strategy(), "), ",
            format_thousands(simulation.tokens_recomputed), " tokens recomputed",
            simulation.num_on_host > 0 ? str(", layer inputs of ", format_thousands(simulation.num_on_host),
                                             " blocks in host memory")
                                       : "")},
       {"peak memory",
        str(format_bytes(static_cast<double>(step.peak_bytes())), " over weights and gradients, predicted ",
            format_bytes(static_cast<double>(simulation.peak_bytes)))},
       {"computed in",
        str(dtype_name(input.model->dtype()), ", ", num_ranks > 1 ? str(num_ranks, " ranks of ") : "",
            at::get_num_threads(), " threads", num_ranks > 1 ? "; passes and memory are rank 0's" : "")}});
}

void run_step(const StepCommandOptions& options) {
  check_strategy("--mode", options.mode);
  if (!options.grads.empty()) check_output_file("--grads", options.grads);
  RanksOptions of_ranks = options.ranks;
  if (!of_ranks.ranks) of_ranks.ranks = step_settings(options, options.mode).num_ranks();
  std::unique_ptr<Communicator> ranks = enter_ranks(of_ranks, options.torch.device);
  const bool is_first = ranks->rank() == 0;
  if (!is_first) set_log_level(LogLevel::kSilent);  // other ranks would log the same
  if (options.torch.device == "cuda" && ranks->size() > 1) {
    if (const std::string warning = open_tested_cuda_library(); !warning.empty()) log_warning(warning);
    ranks = nccl_communicator(std::move(ranks));
  }
  const ActorSettings settings = step_settings(options, options.mode);
  const TrainingRanks groups(ranks.get(), settings.sizes_of(ranks->size()));
  const StepInput input = load_step(options, settings, &groups);
  const std::unique_ptr<StepTimer> timer = input.timer(input.settings.tree.strategy(), &groups);
  StepTimer& step = *timer;
  step.run(/*counted=*/false);
  for (int64_t i = 0; i < options.repeat; ++i) step.run(/*counted=*/true);
  const NamedTensors gradients = named_gradients(*input.model);  // a collective call: all ranks make it
  if (!is_first) return;
  if (!options.grads.empty()) write_safetensors(options.grads, gradients);
  print_report(options, step, input, norm_of(gradients), ranks->size());
}

}  // namespace

void add_step_command(CommandLine& line) {
  auto options = std::make_shared<StepCommandOptions>();
  Command command = line.add("step", "Computes and times the gradient of one training step on a rollout file",
                             [options] { run_step(*options); });
  add_step_options(command, *options);
  command.add_option("--grads", options->grads, "Write every parameter's gradient (.safetensors)")
      .type_name("FILE");
  add_ranks_options(command, options->ranks);
  command.add_option("--mode", options->mode,
                     str(format_choices(strategy_names()), "; auto: the least predicted time"));
}

}  // namespace bough
