// What `bough step` and `bough bench step` are given: a model, a rollout file and the settings of a run's
// actor.
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

// The settings of one step: those that the options are short forms of (`mode` of tree_training_mode; empty:
// its default), then the overrides. UserError: see parse_settings; what a single gradient has no place for.
ActorSettings step_settings(const StepOptions& options, const std::string& mode);

// What a step is taken of.
struct StepInput {
  ActorSettings settings;
  std::vector<Trajectory> rollouts;  // those that enter the loss, with their advantages
  std::unique_ptr<Model> model;
  CostModel costs;
  TreeStatistics statistics;
  StepWork work;

  // The input must outlive it. The reference of a KL term is the model itself, as in the first step of a run.
  std::unique_ptr<StepTimer> timer(const std::string& mode, const TrainingRanks* ranks = nullptr) const {
    return std::make_unique<StepTimer>(*model, model.get(), settings, &costs, rollouts, mode, ranks);
  }
};

// Checks the options, sets torch up and reads the files; UserError where one of them is bad. Costs are rank
// 0's on every rank, so that all cut the batch alike.
StepInput load_step(const StepOptions& options, const ActorSettings& settings,
                    const TrainingRanks* ranks = nullptr);

}  // namespace bough
