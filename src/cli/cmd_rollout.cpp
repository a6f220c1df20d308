// `bough rollout`: generates a rollout file from prompts, or from conversations with an environment.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>

#include "base/clock.h"
#include "base/error.h"
#include "base/format.h"
#include "base/log.h"
#include "base/progress.h"
#include "base/signals.h"
#include "cli/command.h"
#include "cli/generation_options.h"
#include "cli/torch_options.h"
#include "control/generator.h"
#include "control/prompt_check.h"
#include "control/prompt_encoder.h"
#include "data/dataset.h"
#include "data/prompts.h"
#include "data/rollout_file.h"
#include "rollout/embedded_engine.h"
#include "text/prompt_ids.h"
#include "text/tokenizer.h"

namespace bough {

namespace {

struct RolloutOptions {
  std::string model, prompts, out;
  SamplingParameters generation;
  EngineOptions engine;
  std::vector<std::string> environment;
  bool trace = false;
  int64_t seed = 1;
  TorchOptions torch;
  bool json = false;
};

void check_options(const RolloutOptions& options) {
  check_generation(options.generation);
  check_at_least("--seed", options.seed, 0);
  check_output_file("--out", options.out);
  if (options.trace && options.environment.empty())
    throw UserError("--trace prints conversations, which need an environment; give --environment, too");
}

// The encoder, if the directory has a tokenizer. Prompts as input_ids need none.
std::optional<PromptEncoder> load_encoder(const std::string& directory) {
  std::error_code ignored;
  if (!std::filesystem::exists(std::filesystem::path(directory) / "tokenizer.json", ignored)) return {};
  return PromptEncoder::from_directory(directory);
}

// Generates all groups, in the order of their tasks. Ctrl-C stops between passes, and then no file is
// written.
std::vector<FinishedGroup> generate(const GeneratorParts& parts, const RolloutOptions& options,
                                    TaskSource& tasks, size_t num_tasks) {
  const StopFlag stop;
  const auto count = static_cast<int64_t>(num_tasks);
  Engine& engine = parts.engine;
  GeneratorOptions generation{
      .sampling = options.generation, .seed = static_cast<uint64_t>(options.seed), .all_logprobs = true};
  if (parts.environment) generation.samples_in_flight = 2 * options.engine.settings.max_concurrent_rollouts;
  Generator generator(parts, tasks, generation);
  log_info(str("rollout: ", format_thousands(options.generation.n_samples), " samples for each of ",
               format_thousands(count), " prompts"));
  Progress progress("rollout", count, "prompts");
  auto groups = generator.collect(
      count,
      {.stop = [&stop] { return stop.requested(); },
       .on_progress = [&](int64_t, int64_t) { progress.advance(); },
       .on_step =
           [&] { progress.advance(0, str(format_thousands(engine.statistics().new_tokens), " tokens")); }});
  if (!groups) throw Interrupted(str("interrupted; ", quoted(options.out), " was not written"));
  return std::move(*groups);
}

class PromptTasks final : public TaskSource {
 public:
  explicit PromptTasks(const std::vector<Prompt>& prompts) : prompts_(prompts) {}
  std::optional<GroupTask> next() override {
    if (next_ == prompts_.size()) return std::nullopt;
    const Prompt& prompt = prompts_[next_];
    return GroupTask{.id = next_++, .name = prompt.group, .prompt_ids = prompt.input_ids};
  }

 private:
  const std::vector<Prompt>& prompts_;
  size_t next_ = 0;
};

std::vector<Trajectory> answer_prompts(Engine& engine, const RolloutOptions& options,
                                       const std::vector<Prompt>& prompts) {
  PromptTasks tasks(prompts);
  std::vector<Trajectory> rollouts;
  for (FinishedGroup& group : generate({.engine = engine}, options, tasks, prompts.size()))
    for (Trajectory& rollout : group.samples) {
      // A prompt's other fields (for example an answer) are copied to its rollouts.
      rollout.fields = prompts[group.id].extra;
      rollouts.push_back(std::move(rollout));
    }
  return rollouts;
}

std::vector<Trajectory> hold_conversations(Engine& engine, const RolloutOptions& options,
                                           const EnvironmentSettings& settings, const PromptEncoder& encoder,
                                           const ModelLimits& limits) {
  const DatasetSettings dataset{.path = options.prompts, .answer_required = false};
  Dataset problems = read_dataset(dataset);
  if (settings.begins_with_problem())
    problems = fit_prompts(
        problems, dataset, encoder,
        {.key = "prompts", .model = options.model, .limits = limits, .shows_progress = !options.json});
  const ConversationFormat format(encoder, settings, limits.max_length);
  const std::unique_ptr<Environment> environment = make_environment(settings);
  environment->check(problems);
  const GeneratorParts parts{engine, &encoder, environment.get(), &format};
  DatasetTasks tasks(problems);
  std::vector<Trajectory> rollouts;
  for (FinishedGroup& group : generate(parts, options, tasks, problems.size()))
    for (Trajectory& rollout : group.samples) rollouts.push_back(std::move(rollout));
  return rollouts;
}

void run_rollout(const RolloutOptions& options) {
  check_options(options);
  const RolloutSettings settings = engine_settings(options.engine);
  const TorchSetup setup = set_up_torch(options.torch);
  const ModelConfig config = load_model_config(options.model);
  const std::optional<PromptEncoder> encoder = load_encoder(options.model);
  std::optional<Tokenizer> tokenizer;
  if (encoder) tokenizer = encoder->tokenizer();
  const std::optional<EnvironmentSettings> environment = environment_settings(options.environment);
  std::vector<Prompt> prompts;
  if (environment && !encoder)
    throw UserError(str(options.model, ": conversations need a tokenizer.json, and the model has none"));
  if (!environment) {
    PromptReadOptions read{.vocab_size = config.vocab_size,
                           .max_length = config.max_length(),
                           .max_length_reason = config.max_length_reason()};
    if (encoder) read.encode = [&](const Problem& problem) { return encoder->encode(problem).ids; };
    prompts = read_prompts(options.prompts, read);
  }
  const auto [model, matrices, engine] =
      load_engine(options.model, tokenizer, settings, setup.dtype, setup.device, setup.precisions);

  const auto start = std::chrono::steady_clock::now();
  const std::vector<Trajectory> rollouts =
      environment ? hold_conversations(*engine, options, *environment, *encoder, model_limits(config))
                  : answer_prompts(*engine, options, prompts);
  const double seconds = seconds_since(start);
  write_rollouts(options.out, rollouts);
  std::vector<const Trajectory*> rows;
  for (const Trajectory& rollout : rollouts) {
    rows.push_back(&rollout);
    if (!options.trace) continue;
    if (const std::string text = describe_conversation(rollout); !text.empty()) print_text(text + "\n");
  }
  const EngineStatistics statistics = engine->statistics();
  const double rate = static_cast<double>(statistics.new_tokens) / std::max(seconds, 1e-9);
  if (options.json) {
    Json result = {{"sequences", rollouts.size()},
                   {"new_tokens", statistics.new_tokens},
                   {"seconds", seconds},
                   {"engine_seconds", statistics.seconds},
                   {"new_tokens_per_second", rate},
                   {"prefill_tokens", statistics.prefill_tokens},
                   {"cached_tokens", statistics.cached_tokens},
                   {"recomputed_tokens", statistics.recomputed_tokens},
                   {"quantization", settings.quantization},
                   {"matrix_bytes", matrices.held},
                   {"unquantized_matrix_bytes", matrices.unquantized}};
    if (environment) result["conversations"] = conversation_metrics(rows);
    print_json(result);
  } else {
    std::vector<std::pair<std::string, std::string>> table = {
        {"sequences",
         str(format_thousands(static_cast<int64_t>(rollouts.size())),
             environment ? ""
                         : str(" of ", format_thousands(static_cast<int64_t>(prompts.size())), " prompts"),
             " in ", options.out)},
        {"new tokens", str(format_thousands(statistics.new_tokens), " in ", format_duration(seconds), ", ",
                           format_count(rate), " a second")},
        {"prompt tokens", str(format_thousands(statistics.prefill_tokens), " computed, ",
                              format_thousands(statistics.cached_tokens), " from the cache")}};
    if (settings.quantization != "none") table.emplace_back("weights", describe(matrices));
    for (const auto& [name, value] : conversation_metrics(rows))
      table.emplace_back(name.substr(name.find('/') + 1), format_significant(value, 4));
    print_table(table);
  }
}

}  // namespace

void add_rollout_command(CommandLine& line) {
  auto options = std::make_shared<RolloutOptions>();
  SamplingParameters& generation = options->generation;
  Command command =
      line.add("rollout", "Samples responses to the prompts of a file, and writes a rollout file",
               [options] { run_rollout(*options); });
  command.add_option("--model", options->model, "Hugging Face directory").required().type_name("DIR");
  command
      .add_option("--prompts", options->prompts,
                  "JSON Lines with `prompt`, `messages` or `input_ids`; with --environment: problems")
      .required()
      .type_name("FILE");
  command.add_option("--out", options->out, "Rollout file to write, .jsonl or .jsonl.zst")
      .required()
      .type_name("FILE");
  command.add_option("--n-samples", generation.n_samples, "Samples per prompt");
  add_sampling_options(command, generation);
  command.add_option("--min-new-tokens", generation.min_new_tokens,
                     "Stop tokens are not sampled before this many tokens");
  command.add_option("--top-p", generation.top_p,
                     "Sample from the most likely tokens whose probabilities sum to this; 1: all");
  command.add_option("--top-k", generation.top_k, "Sample from this many most likely tokens; 0: all");
  command.add_option("--min-p", generation.min_p,
                     "Sample from tokens with at least this share of the highest probability; 0: all");
  command.add_option("--repetition-penalty", generation.repetition_penalty,
                     "Divides the logits of tokens that are in the prompt or the response; 1: off");
  command.add_option("--presence-penalty", generation.presence_penalty,
                     "Subtracted from the logits of tokens that are in the response; 0: off");
  command.add_option("--frequency-penalty", generation.frequency_penalty,
                     "Subtracted from a token's logit once per occurrence in the response; 0: off");
  command.add_flag("--ignore-eos", generation.ignore_eos, "The model's own stop tokens do not end a sample");
  add_environment_options(command, options->environment);
  command.add_flag("--trace", options->trace, "Print the conversations as readable text");
  command.add_option("--seed", options->seed, "Seed of sampling");
  add_engine_options(command, options->engine);
  add_torch_options(command, options->torch);
  add_json_flag(command, options->json);
}

}  // namespace bough
