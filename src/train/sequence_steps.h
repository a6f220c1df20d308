// What estimators by token and by turn (algo/advantages.h) see of trajectories, and what a critic leaves with
// them: the columns `values` (before each token was drawn, when the batch was scored) and `returns` (what the
// values should have been), one a token, 0 where a token is not trained.
//
// Rewards in time. A turn's reward, turn_rewards[k] · reward_scaling, comes with the last trained token whose
// `turns` is k. What these leave of the trajectory's shaped reward comes with its last trained token: so the
// rewards of a trajectory always add up to the shaped one, and without turn_rewards all of it comes there. A
// row without `turns` is one turn, and a turn never goes on in another row.
#pragma once

#include <vector>

#include "algo/advantages.h"
#include "data/trajectory.h"

namespace bough {

inline constexpr const char* kValuesColumn = "values";
inline constexpr const char* kReturnsColumn = "returns";
// min(1, pi / mu) of each token under the policy that is trained (acceptance.h), where samples are chosen by
// it.
inline constexpr const char* kAcceptanceColumn = "acceptance";

// A column's values at the row's trained tokens, in order; empty where the row has no such column.
std::vector<double> trained_column(const Trajectory& row, const char* name);
// Sets the column from values at the trained tokens.
void set_trained_column(Trajectory& row, const char* name, const double* values);

// Appends a row of a trajectory to its steps. UserError: several turn_rewards, and no `turns` to say whose
// they are; no values where some are needed.
void append_row(SequenceSteps& steps, const Trajectory& row, double reward_scaling, bool needs_values);
// After the last row.
void finish_steps(SequenceSteps& steps, double shaped_reward);

}  // namespace bough
