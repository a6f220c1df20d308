// Gradient steps of a rollout file, timed: what `bough step` and `bough bench step` measure.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algo/loss.h"
#include "cli/rollout_batch.h"
#include "cli/torch_options.h"
#include "cost/cost_model.h"
#include "train/executor.h"
#include "tree/prefix_tree.h"

namespace bough {

// What both commands are given.
struct StepOptions {
  std::string model, rollouts;
  int64_t repeat = 1;
  TorchOptions torch;
  std::optional<int64_t> max_tokens_per_mb;
  std::string memory;
  std::string loss = "pg";
  std::optional<bool> batch_invariant;
  bool json = false;
};
void add_step_options(CLI::App& command, StepOptions& options);

// What a step is taken of.
struct StepInput {
  int64_t max_tokens_per_pass;
  std::optional<int64_t> memory_bytes;
  std::unique_ptr<Loss> loss;
  RolloutBatch rollouts;
  std::unique_ptr<Model> model;
  CostModel costs;
  TreeStatistics statistics;
  StepWork work;
};

// Checks the options, sets torch up and reads the files; UserError where one of them is bad.
StepInput load_step(const StepOptions& options);

// Repetitions of one plan's step. Weights stay as they are; main_grad holds the last repetition's gradient.
class StepTimer {
 public:
  // The input must outlive it. Allocates the gradients.
  StepTimer(const StepInput& input, const std::string& mode);

  // From the batch to the gradient, planning included.
  void run(bool counted);

  const std::vector<double>& seconds() const { return seconds_; }  // of the counted runs, in order
  double median_seconds() const;
  int64_t peak_bytes() const { return peak_bytes_; }  // over weights and gradients; of all runs
  double loss() const { return loss_value_; }
  int64_t num_trained() const { return num_trained_; }
  const std::string& strategy() const { return strategy_; }             // what was taken
  int64_t max_tokens_per_pass() const { return max_tokens_per_pass_; }  // of the plan taken
  const Simulation& simulation() const { return simulation_; }

 private:
  const StepInput& input_;
  std::string mode_;
  Executor executor_;
  std::vector<double> seconds_;
  int64_t peak_bytes_ = 0;
  double loss_value_ = 0;
  int64_t num_trained_ = 0;
  std::string strategy_;
  int64_t max_tokens_per_pass_ = 0;
  Simulation simulation_;
};

}  // namespace bough
