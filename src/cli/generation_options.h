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

// UserError naming the option, as --its-key, whose value is out of the setting's range.
void check_generation(const SamplingParameters& generation);

struct EngineOptions {
  RolloutSettings settings;
  std::string kv_memory = "auto";
  std::vector<std::string> overrides;
};

// --max-concurrent, --kv-memory, --batch-invariant, --no-batch-invariant, --quantization, and any other
// setting of a run's engine as rollout.key=value.
void add_engine_options(Command& command, EngineOptions& options);

// --sparse-budget, --sparse-summary, --sparse-dense-layers: rollout.sparse of a run that is only priced.
void add_sparse_options(Command& command, SparseSettings& sparse);
// What it costs to generate under them. UserError naming the option.
SparseAttention priced_attention(const SparseSettings& sparse);

// --environment and its keys.
void add_environment_options(Command& command, std::vector<std::string>& options);

// What they say: TYPE first, then key=value as under `environment` of a run. None where nothing was given.
// UserError naming the key.
std::optional<EnvironmentSettings> environment_settings(const std::vector<std::string>& options);

// The settings; an option that is given wins over rollout.key=value. UserError naming the option.
RolloutSettings engine_settings(const EngineOptions& options);

// "24.1 MiB in the layers' matrices, 48 MiB unquantized".
std::string describe(const MatrixBytes& bytes);

}  // namespace bough
