// `bough eval`: accuracy of a model on a data set.
#include "base/error.h"
#include "base/format.h"
#include "base/progress.h"
#include "base/signals.h"
#include "cli/command.h"
#include "cli/generation_options.h"
#include "cli/torch_options.h"
#include "control/evaluation.h"
#include "control/prompt_check.h"
#include "control/prompt_encoder.h"
#include "rollout/embedded_engine.h"

namespace bough {

namespace {

struct EvalOptions {
  std::string model;
  DatasetSettings dataset;
  std::string reward;
  RewardSettings reward_service;
  std::vector<std::string> environment;
  SamplingParameters generation;  // greedy: the temperature is 0
  EngineOptions engine;
  int64_t seed = 1;
  TorchOptions torch;
  bool json = false;
};

void check_options(EvalOptions options) {
  const auto check_choice = [](const char* flag, const std::string& value,
                               std::initializer_list<std::string_view> choices) {
    std::string all;
    for (const std::string_view choice : choices) {
      if (value == choice) return;
      all += str(all.empty() ? "" : " | ", choice);
    }
    throw UserError(str(flag, ": got ", quoted(value), ", expected ", all));
  };
  check_choice("--format", options.dataset.format, {"text", "chat"});
  check_choice("--overlong-prompts", options.dataset.overlong_prompts, {"error", "drop", "truncate_left"});
  check_at_least("--k", options.generation.n_samples, 1);
  check_generation(options.generation);
  internal::check_settings(describe_settings(options.dataset), "command line");
  check_at_least("--seed", options.seed, 0);
  if (options.generation.n_samples > 1 && options.generation.temperature == 0) {
    throw UserError("--k above 1 with --temperature 0: all samples would be the same; give a temperature");
  }
}

void print_result(const EvaluationResult& result) {
  print_table({{"accuracy", describe(result)},
               {str("pass@", result.k), format_significant(result.pass_at_k, 4)},
               {"reward, mean", format_significant(result.reward_mean, 4)},
               {"length, mean", str(format_significant(result.length_mean, 4), " tokens")},
               {"truncated", format_significant(result.truncated_fraction, 3)},
               {"rewards failed", format_thousands(result.failures)},
               {"time", format_duration(result.seconds)}});
}

void run_eval(const EvalOptions& options) {
  check_options(options);
  const RolloutSettings settings = engine_settings(options.engine);
  const TorchSetup setup = set_up_torch(options.torch);
  Dataset dataset = read_dataset(options.dataset);
  const PromptEncoder encoder = PromptEncoder::from_directory(options.model);
  const auto reward = make_reward(options.reward, options.reward_service);
  const std::optional<EnvironmentSettings> settings_of_environment =
      environment_settings(options.environment);
  if (settings_of_environment.value_or(EnvironmentSettings{}).begins_with_problem())
    dataset = fit_prompts(dataset, options.dataset, encoder,
                          {.key = "dataset",
                           .model = options.model,
                           .limits = model_limits(load_model_config(options.model)),
                           .shows_progress = !options.json});
  std::unique_ptr<Environment> environment;
  if (settings_of_environment) environment = make_environment(*settings_of_environment);
  const bool is_scored =
      settings_of_environment.value_or(EnvironmentSettings{}).is_scored_by_reward(!options.reward.empty());
  if (is_scored) reward->check(dataset);
  const LoadedEngine loaded =
      load_engine(options.model, encoder.tokenizer(), settings, setup.dtype, setup.device, setup.precisions);

  std::optional<ConversationFormat> conversations;
  if (environment)
    conversations.emplace(encoder, *settings_of_environment, loaded.model->config().max_length(), is_scored);
  const StopFlag stop;
  Progress progress("eval", static_cast<int64_t>(dataset.size()), "problems");
  EvaluationOptions evaluation;
  evaluation.sampling = options.generation;
  evaluation.seed = static_cast<uint64_t>(options.seed);
  evaluation.samples_in_flight = 2 * settings.max_concurrent_rollouts;
  evaluation.environment = environment.get();
  evaluation.conversations = conversations ? &*conversations : nullptr;
  evaluation.in_rounds = !settings.batch_invariant;
  evaluation.collect.stop = [&stop] { return stop.requested(); };
  evaluation.collect.on_progress = [&](int64_t, int64_t) { progress.advance(); };
  const auto result = evaluate(*loaded.engine, dataset, encoder, *reward, evaluation);
  progress.finish();
  if (!result) throw Interrupted("evaluation stopped");
  if (options.json) print_json(to_json(*result));
  else print_result(*result);
}

}  // namespace

void add_eval_command(CommandLine& line) {
  auto options = std::make_shared<EvalOptions>();
  options->dataset.shuffle = false;
  options->generation.temperature = 0;
  Command command = line.add("eval", "Accuracy of a model on problems: avg@k, pass@k, 95% interval",
                             [options] { run_eval(*options); });
  command.add_option("--model", options->model, "Hugging Face directory").required().type_name("DIR");
  command.add_option("--data", options->dataset.path, "Problems as JSON Lines").required().type_name("FILE");
  command.add_option("--format", options->dataset.format,
                     "Form of the prompts: text | chat (the model's chat template)");
  command.add_option("--shots", options->dataset.few_shot.shots,
                     "Number of worked examples before each question");
  command
      .add_option("--shots-from", options->dataset.few_shot.path,
                  "File whose first records are the worked examples")
      .type_name("FILE");
  command.add_option(
      "--overlong-prompts", options->dataset.overlong_prompts,
      "Prompts that do not fit the model's context: error | drop | truncate_left (plain text)");
  command.add_option("--limit", options->dataset.max_problems, "Number of problems to read; 0: all");
  command.add_option(
      "--reward", options->reward,
      "Reward, as in `bough train`: FILE.py:FUNCTION, http://... or '[{...}]' (default: number)");
  add_environment_options(command, options->environment);
  command.add_option("--k", options->generation.n_samples, "Samples per problem");
  add_sampling_options(command, options->generation);
  command.add_option("--seed", options->seed, "Seed of sampling");
  add_engine_options(command, options->engine);
  add_torch_options(command, options->torch);
  add_json_flag(command, options->json);
}

}  // namespace bough
