#include "cli/generation_options.h"

#include <algorithm>

#include "base/error.h"
#include "base/format.h"
#include "base/given_settings.h"
#include "base/log.h"
#include "cli/torch_options.h"
#include "run/idle_settings.h"

namespace bough {

void add_sampling_options(Command& command, SamplingParameters& generation) {
  command.add_option("--max-new-tokens", generation.max_new_tokens, "A sample ends after this many tokens");
  command.add_option("--temperature", generation.temperature,
                     "Divides the logits; 0: always the most likely token");
  command.add_option("--stop", generation.stop, "A string that ends a sample; may be repeated")
      .one_value_each_time()
      .type_name("TEXT");
}

void check_generation(const SamplingParameters& generation) {
  SamplingParameters copy = generation;
  for (const SettingField& field : describe_settings(copy).fields) {
    if (field.shape != SettingShape::kSingle ||
        (field.kind != SettingKind::kInteger && field.kind != SettingKind::kNumber))
      continue;
    const Json value = field.get();
    const auto number = value.get<double>();
    if (number >= field.constraint.low && number <= field.constraint.high) continue;
    std::string option = "--" + field.key;
    std::replace(option.begin(), option.end(), '_', '-');
    throw UserError(str(option, ": got ",
                        field.kind == SettingKind::kInteger ? dump_line(value) : str(number), ", expected ",
                        field.constraint.describe(), ": ", field.help));
  }
  if (generation.min_new_tokens > generation.max_new_tokens)
    throw UserError(str("--min-new-tokens: got ", generation.min_new_tokens,
                        ", expected at most --max-new-tokens, ", generation.max_new_tokens));
}

void add_engine_options(Command& command, EngineOptions& options) {
  command.add_option("--max-concurrent", options.settings.max_concurrent_rollouts,
                     "Samples generated at once");
  command.add_option("--kv-memory", options.kv_memory, "Most memory for keys and values (auto: 4GiB)")
      .type_name("BYTES");
  add_batch_invariant_flag(command, options.settings.batch_invariant);
  command.add_option("--quantization", options.settings.quantization,
                     "none | int8: generate with 8-bit weights in the layers");
  command
      .add_option("settings", options.overrides,
                  "Further engine settings, as in a run: rollout.sparse.budget=512")
      .type_name("[rollout.KEY=VALUE ...]");
}

namespace {
struct EngineOverrides {
  RolloutSettings rollout;
  template <class V>
  void visit(V& v) {
    v("rollout", rollout, "generation");
  }
};
}  // namespace

void add_sparse_options(Command& command, SparseSettings& sparse) {
  const auto take_budget = [&sparse](const std::vector<std::string>& words) {
    sparse.budget.clear();
    for (const std::string& word : words) sparse.budget.push_back(SparseBudget::from_text(word));
  };
  command
      .add_option_function(
          "--sparse-budget", take_budget,
          "Also estimate generation with this rollout.sparse.budget: tokens (512), blocks (16x32), or a "
          "list that grows with the context (512 8192:1024)")
      .type_name("TOKENS ...");
  command.add_option("--sparse-block", sparse.block, "rollout.sparse.block: 4 | 8 | 16 | 32 | 64");
  command.add_option("--sparse-summary", sparse.summary, "rollout.sparse.summary: mean | minmax");
  command.add_option("--sparse-dense-layers", sparse.dense_layers, "rollout.sparse.dense_layers");
}

SparseAttention priced_attention(const SparseSettings& sparse) {
  check_at_least("--sparse-dense-layers", sparse.dense_layers, 0);
  if (sparse.summary != "mean" && sparse.summary != "minmax")
    throw UserError(str("--sparse-summary: got ", quoted(sparse.summary), ", expected mean or minmax"));
  try {
    std::map<int64_t, int64_t> budgets = sparse.budget_blocks();
    for (auto& [from, budget] : budgets) budget *= sparse.block;
    return {.budgets = std::move(budgets),
            .dense_layers = sparse.dense_layers,
            .vectors_per_summary = sparse.summary == "mean" ? 1 : 2,
            .block_tokens = sparse.block};
  } catch (const UserError& error) {
    throw UserError(str("--sparse-budget: ", error.what()));
  }
}

void add_environment_options(Command& command, std::vector<std::string>& options) {
  command
      .add_option(
          "--environment", options,
          "Sample conversations with an environment: calculator, guess, python, command, http or mcp, then "
          "key=value as under `environment` of a run (path=my_env.py:MyEnv max_turns=8)")
      .type_name("TYPE KEY=VALUE ...");
}

std::optional<EnvironmentSettings> environment_settings(const std::vector<std::string>& options) {
  if (options.empty()) return std::nullopt;
  std::vector<std::string> overrides = {"type=" + options[0]};
  overrides.insert(overrides.end(), options.begin() + 1, options.end());
  auto settings = parse_settings<EnvironmentSettings>("", "--environment", overrides);
  if (settings.type.empty())
    throw UserError(
        "--environment: the type is empty, expected calculator, guess, python, command, http or mcp");
  return settings;
}

RolloutSettings engine_settings(const EngineOptions& options) {
  check_at_least("--max-concurrent", options.settings.max_concurrent_rollouts, 1);
  const std::string& quantization = options.settings.quantization;
  if (quantization != "none" && quantization != "int8")
    throw UserError(str("--quantization: got ", quoted(quantization), ", expected none or int8"));
  RolloutSettings settings = parse_settings<EngineOverrides>("", "command line", options.overrides).rollout;
  const auto idle = idle_engine_settings(settings, given_settings<EngineOverrides>("", options.overrides));
  if (!idle.empty()) log_warning(describe(idle));
  const RolloutSettings& given = options.settings;
  const RolloutSettings defaults;
  if (given.max_concurrent_rollouts != defaults.max_concurrent_rollouts)
    settings.max_concurrent_rollouts = given.max_concurrent_rollouts;
  if (given.batch_invariant) settings.batch_invariant = given.batch_invariant;
  if (quantization != defaults.quantization) settings.quantization = quantization;
  if (options.kv_memory != "auto") settings.kv_memory = parse_bytes("--kv-memory", options.kv_memory);
  return settings;
}

std::string describe(const MatrixBytes& bytes) {
  return str(format_bytes(static_cast<double>(bytes.held)), " in the layers' matrices, ",
             format_bytes(static_cast<double>(bytes.unquantized)), " unquantized");
}

}  // namespace bough
