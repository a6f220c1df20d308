// `bough rollout`: prompts to a rollout file.
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
#include "data/prompts.h"
#include "data/rollout_file.h"
#include "models/tokenizer.h"
#include "rollout/embedded_engine.h"

namespace bough {

namespace {

struct RolloutOptions {
  std::string model, prompts, out;
  SamplingParameters generation;
  EngineOptions engine;
  int64_t seed = 1;
  TorchOptions torch;
  bool json = false;
};

void check_options(const RolloutOptions& options) {
  check_generation(options.generation);
  check_at_least("--seed", options.seed, 0);
  check_output_file("--out", options.out);
}

// The tokenizer where the directory has one: prompts as input_ids need none.
std::optional<Tokenizer> load_tokenizer(const std::string& directory) {
  std::error_code ignored;
  if (!std::filesystem::exists(std::filesystem::path(directory) / "tokenizer.json", ignored)) return {};
  return Tokenizer::load(directory);
}

// Generates all groups, in the order of the prompts. Steps stop between passes on Ctrl-C: nothing is written
// then.
std::vector<Trajectory> generate(Engine& engine, const RolloutOptions& options,
                                 std::vector<Prompt>& prompts) {
  const StopFlag stop;
  const auto count = static_cast<int64_t>(prompts.size());
  const auto next_task = [&prompts, next = size_t{0}]() mutable -> std::optional<GroupTask> {
    if (next == prompts.size()) return std::nullopt;
    const Prompt& prompt = prompts[next];
    return GroupTask{.id = next++, .name = prompt.group, .prompt_ids = prompt.input_ids};
  };
  Generator generator(
      {.engine = engine}, next_task,
      {.sampling = options.generation, .seed = static_cast<uint64_t>(options.seed), .all_logprobs = true});
  log_info(str("rollout: ", format_thousands(options.generation.n_samples), " samples of ",
               format_thousands(count), " prompts"));
  Progress progress("rollout", count, "prompts");
  auto groups = generator.collect(
      count,
      {.stop = [&stop] { return stop.requested(); },
       .on_progress = [&](int64_t, int64_t) { progress.advance(); },
       .on_step =
           [&] { progress.advance(0, str(format_thousands(engine.statistics().new_tokens), " tokens")); }});
  if (!groups) throw Interrupted(str("interrupted; ", quoted(options.out), " was not written"));
  std::vector<Trajectory> rollouts;
  for (FinishedGroup& group : *groups) {
    for (Trajectory& rollout : group.samples) {
      rollout.fields =
          prompts[group.id].extra;  // the prompt's other fields (an answer, say) go with its rollouts
      rollouts.push_back(std::move(rollout));
    }
  }
  return rollouts;
}

void run_rollout(const RolloutOptions& options) {
  check_options(options);
  const RolloutSettings settings = engine_settings(options.engine);
  const TorchSetup setup = set_up_torch(options.torch);
  const ModelConfig config = load_model_config(options.model);
  const std::optional<Tokenizer> tokenizer = load_tokenizer(options.model);
  PromptReadOptions read{.vocab_size = config.vocab_size};
  if (tokenizer) read.encode = [&](const std::string& text) { return tokenizer->encode(text, true); };
  std::vector<Prompt> prompts = read_prompts(options.prompts, read);
  const auto [model, matrices, engine] =
      load_engine(options.model, tokenizer, settings, setup.dtype, setup.device);

  const auto start = std::chrono::steady_clock::now();
  const std::vector<Trajectory> rollouts = generate(*engine, options, prompts);
  const double seconds = seconds_since(start);
  write_rollouts(options.out, rollouts);
  const EngineStatistics statistics = engine->statistics();
  const double rate = static_cast<double>(statistics.new_tokens) / std::max(seconds, 1e-9);
  if (options.json) {
    print_json({{"sequences", rollouts.size()},
                {"new_tokens", statistics.new_tokens},
                {"seconds", seconds},
                {"new_tokens_per_second", rate},
                {"prefill_tokens", statistics.prefill_tokens},
                {"cached_tokens", statistics.cached_tokens},
                {"quantization", settings.quantization},
                {"matrix_bytes", matrices.held},
                {"unquantized_matrix_bytes", matrices.unquantized}});
  } else {
    std::vector<std::pair<std::string, std::string>> table = {
        {"sequences",
         str(format_thousands(static_cast<int64_t>(rollouts.size())), " of ",
             format_thousands(static_cast<int64_t>(prompts.size())), " prompts in ", options.out)},
        {"new tokens", str(format_thousands(statistics.new_tokens), " in ", format_duration(seconds), ", ",
                           format_count(rate), " a second")},
        {"prompt tokens", str(format_thousands(statistics.prefill_tokens), " computed, ",
                              format_thousands(statistics.cached_tokens), " found computed")}};
    if (settings.quantization != "none") table.emplace_back("weights", describe(matrices));
    print_table(table);
  }
}

}  // namespace

void add_rollout_command(CommandLine& line) {
  auto options = std::make_shared<RolloutOptions>();
  SamplingParameters& generation = options->generation;
  CLI::App& command = line.add("rollout", "Samples of each prompt of a file, as a rollout file",
                               [options] { run_rollout(*options); });
  command.add_option("--model", options->model, "Hugging Face directory")->required()->type_name("DIR");
  command.add_option("--prompts", options->prompts, "JSON Lines with `prompt` text or `input_ids`")
      ->required()
      ->type_name("FILE");
  command.add_option("--out", options->out, "Rollout file to write, .jsonl or .jsonl.zst")
      ->required()
      ->type_name("FILE");
  command.add_option("--n-samples", generation.n_samples, "Samples of each prompt");
  add_sampling_options(command, generation);
  command.add_option("--min-new-tokens", generation.min_new_tokens,
                     "Stop tokens are not drawn before this many");
  command.add_option("--top-p", generation.top_p,
                     "Draw from the most likely tokens with this probability together");
  command.add_option("--top-k", generation.top_k, "Draw from this many most likely tokens; 0: all");
  command.add_option("--min-p", generation.min_p,
                     "Draw from tokens with at least this part of the most likely one's probability; 0: all");
  command.add_option("--repetition-penalty", generation.repetition_penalty,
                     "Divides the logits of tokens of prompt and response; 1: off");
  command.add_option("--presence-penalty", generation.presence_penalty,
                     "Subtracted from the logits of tokens of the response; 0: off");
  command.add_option("--frequency-penalty", generation.frequency_penalty,
                     "Subtracted as often as the token stands in the response; 0: off");
  command.add_flag("--ignore-eos", generation.ignore_eos, "The model's own stop tokens do not stop");
  command.add_option("--seed", options->seed, "Draws are a function of it");
  add_engine_options(command, options->engine);
  add_torch_options(command, options->torch);
  add_json_flag(command, options->json);
}

}  // namespace bough
