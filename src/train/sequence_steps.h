// Converts trajectories to the input of estimators by token and by turn (algo/advantages.h). Also handles the
// columns of a critic, one number per token and 0 for tokens that are not trained:
// - `values`: the value before each token was sampled, computed when the batch was scored;
// - `returns`: the targets of the values.
// And a column of the KL in the reward, `kl_rewards`: -kl_ctl times the KL at each token.
//
// Rewards in time. The last trained token of turn k (`turns`) gets the reward turn_rewards[k] ·
// reward_scaling. The conversation's last trained token also gets the remainder of the shaped reward. So the
// rewards of a conversation always add up to the shaped reward. A row of the batch without `turns` is one
// turn, and a turn never continues in another row of the batch.
#pragma once

#include <vector>

#include "algo/advantages.h"
#include "data/trajectory.h"

namespace bough {

inline constexpr const char* kValuesColumn = "values";
inline constexpr const char* kReturnsColumn = "returns";
inline constexpr const char* kKlRewardsColumn = "kl_rewards";
// min(1, pi / mu) of each token under the trained policy (acceptance.h). Set only if samples are selected by
// acceptance.
inline constexpr const char* kAcceptanceColumn = "acceptance";

// The column's entries at the trained tokens of a row of the batch, in order. Empty if it has no such column.
std::vector<double> trained_column(const Trajectory& row, const char* name);
// Sets the column from one number per trained token; all other tokens get 0.
void set_trained_column(Trajectory& row, const char* name, const double* values);

// Appends a row of the batch to the steps of its conversation. Throws UserError if the row has several
// turn_rewards but no `turns`, or if values are needed and the row lacks them.
void append_row(SequenceSteps& steps, const Trajectory& row, double reward_scaling, bool needs_values);
// Call after the conversation's last row: adds the remainder of the shaped reward to the last trained token.
void finish_steps(SequenceSteps& steps, double shaped_reward);

}  // namespace bough
