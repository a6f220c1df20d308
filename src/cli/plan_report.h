// The report of `bough plan`: its data, and how they are shown as JSON or as text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "cost/cost_model.h"
#include "cost/rollout_cost.h"
#include "plan/plan.h"
#include "tree/prefix_tree.h"

namespace bough {

struct StrategyCost {
  std::string strategy;
  std::string error;  // why there is no plan; if set, the other fields are meaningless
  Plan plan;
  Simulation simulation;
  double effective_reuse = 0;  // ERR
  bool fits = true;            // in the device's memory, in addition to weights and gradients
};

struct RankCost {
  int64_t tree_tokens = 0;
  double seconds = 0;
};

// The times of one training step with its rollouts: C_rollout, C_recompute and C_update in DistillSparse,
// appendix B.
struct IterationCost {
  RolloutCost rollout;
  double recompute_seconds = 0;  // one plan execution, forward only
  double update_seconds = 0;     // one plan execution with gradients
  double sparse_step_seconds =
      0;  // for sparse_training.mode distill, in addition to the update; priced with dense attention
  double total() const {
    return rollout.seconds() + recompute_seconds + update_seconds + sparse_step_seconds;
  }
};

struct PlanReport {
  TreeStatistics tree;
  double work_ratio = 1;
  int64_t max_tokens_per_mb = 0;
  int64_t stages = 1;  // pipeline stages; the seconds of a strategy are those of the whole pipeline
  std::vector<StrategyCost> strategies;
  std::vector<RankCost> ranks;
  IterationCost dense_iteration;
  std::optional<IterationCost> sparse_iteration;

  const StrategyCost& of(std::string_view strategy) const {
    return *std::find_if(strategies.begin(), strategies.end(),
                         [&](const StrategyCost& cost) { return cost.strategy == strategy; });
  }
};

Json report_json(const PlanReport& report);
// The tree, the strategies, the strategy that auto chooses and, if there are several, the ranks, as text.
std::string readable_report(const PlanReport& report, const CostModel& costs);
// The predicted seconds of an iteration, as text. `max_running`: samples generated at once. `budget`: shown
// beside the sparse iteration, if there is one.
std::string iteration_table(const PlanReport& report, int64_t max_running, const std::string& budget);
// The text below the picture on the tree's page.
std::string reuse_note(const PlanReport& report);

}  // namespace bough
