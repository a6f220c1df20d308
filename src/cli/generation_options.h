// Options of the commands that generate.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cost/rollout_cost.h"
#include "engine/settings.h"
#include "env/environment.h"
#include "models/quantized_model.h"

namespace bough {

// --max-new-tokens, --temperature, --stop.
void add_sampling_options(Command& command, SamplingParameters& generation);

// Throws UserError that names the option if a value is out of its setting's range.
void check_generation(const SamplingParameters& generation);

struct EngineOptions {
  RolloutSettings settings;
  std::string kv_memory = "auto";
  std::vector<std::string> overrides;
};

// --max-concurrent, --kv-memory, --batch-invariant, --no-batch-invariant, --quantization, and all other
// engine settings as rollout.key=value.
void add_engine_options(Command& command, EngineOptions& options);

// --sparse-budget, --sparse-summary, --sparse-dense-layers: rollout.sparse for cost estimates.
void add_sparse_options(Command& command, SparseSettings& sparse);
// The attention for the cost model, from these settings. Throws UserError that names the option.
SparseAttention priced_attention(const SparseSettings& sparse);

// --environment and its keys.
void add_environment_options(Command& command, std::vector<std::string>& options);

// Parses the words of --environment: TYPE first, then key=value as under `environment` of a run. nullopt if
// there are no words. Throws UserError that names the key.
std::optional<EnvironmentSettings> environment_settings(const std::vector<std::string>& options);

// The engine's settings. An option takes precedence over rollout.key=value. Throws UserError that names the
// option.
RolloutSettings engine_settings(const EngineOptions& options);

// "24.1 MiB in the layers' matrices, 48 MiB unquantized".
std::string describe(const MatrixBytes& bytes);

}  // namespace bough
