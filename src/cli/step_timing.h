// Gradient steps of a rollout file, timed: what `bough step` and `bough bench step` measure.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algo/loss.h"
#include "cli/rollout_batch.h"
#include "train/executor.h"
#include "tree/cost_model.h"

namespace bough {

// How a step is planned.
struct StepPlan {
  std::string mode = "auto";  // auto, dense, packed, path or blocks
  int64_t max_tokens_per_pass = 0;
  std::optional<int64_t> memory_bytes;
};

// UserError unless the mode is known.
void check_mode(const std::string& option, const std::string& mode);

// "pg" or "grpo"; UserError naming --loss.
std::unique_ptr<Loss> make_step_loss(const std::string& name);

// Repetitions of one plan's step. Weights stay as they are; main_grad holds the last repetition's gradient.
class StepTimer {
 public:
  // All must outlive it. Allocates the gradients.
  StepTimer(Model& model, const RolloutBatch& rollouts, const Loss& loss, const CostModel& costs,
            StepPlan plan);

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
  Model& model_;
  const RolloutBatch& rollouts_;
  const Loss& loss_;
  const CostModel& costs_;
  StepPlan plan_;
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
