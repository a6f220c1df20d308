// Input of `bough step` and `bough bench step`: a model, a rollout file and the settings of a run's actor.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/torch_options.h"
#include "cost/cost_model.h"
#include "train/gradient_step.h"
#include "tree/prefix_tree.h"

namespace bough {

struct StepOptions {
  std::string model, rollouts;
  std::vector<std::string> overrides;  // actor.key=value
  int64_t repeat = 1;
  TorchOptions torch;
  std::optional<int64_t> max_tokens_per_mb;
  std::string memory;
  std::string loss = "pg";
  std::optional<bool> batch_invariant;
  bool from_rewards = false;
  bool json = false;
};
void add_step_options(Command& command, StepOptions& options);

// The settings of one training step: defaults, then the options, then the overrides. `mode` is
// tree_training_mode; "" keeps its default. Throws UserError like parse_settings(), or if a setting asks for
// more than one optimizer step.
ActorSettings step_settings(const StepOptions& options, const std::string& mode);

// A loaded model and batch.
struct StepInput {
  ActorSettings settings;
  std::vector<Trajectory> rollouts;  // only those that enter the loss, with advantages
  std::unique_ptr<Model> model;
  CostModel costs;
  TreeStatistics statistics;
  StepWork work;

  // This object and `ranks` must outlive the returned timer. The reference model of a KL term is the model
  // itself, as in the first training step of a run.
  std::unique_ptr<StepTimer> timer(const std::string& mode, const TrainingRanks* ranks = nullptr) const {
    return std::make_unique<StepTimer>(*model, model.get(), settings, rollouts,
                                       StepTimer::Options{.strategy = mode, .costs = &costs, .ranks = ranks});
  }
};

// Checks the options, sets up torch and reads the files. Throws UserError if an option or a file is bad. All
// ranks get rank 0's costs, so that all ranks plan the same way.
StepInput load_step(const StepOptions& options, const ActorSettings& settings,
                    const TrainingRanks* ranks = nullptr);

}  // namespace bough
