#include "train/sequence_steps.h"

#include "base/error.h"

namespace bough {

std::vector<double> trained_column(const Trajectory& row, const char* name) {
  const auto found = row.columns.find(name);
  std::vector<double> values;
  if (found == row.columns.end()) return values;
  const std::vector<double>& column = found->second;
  const bool is_by_token = column.size() == row.input_ids.size();  // else one value per token of mask 1
  size_t generated = 0;
  for (size_t i = 0; i < row.input_ids.size(); ++i) {
    if (row.trains(i)) values.push_back(column.at(is_by_token ? i : generated));
    generated += row.loss_mask[i] != 0;
  }
  return values;
}

void set_trained_column(Trajectory& row, const char* name, const double* values) {
  std::vector<double>& column = row.columns[name];
  column.assign(row.input_ids.size(), 0.0);
  for (size_t i = 0; i < column.size(); ++i)
    if (row.trains(i)) column[i] = *values++;
}

void append_row(SequenceSteps& steps, const Trajectory& row, double reward_scaling, bool needs_values) {
  if (row.turn_rewards.size() > 1 && row.turns.empty())
    throw UserError(str("a row of group ", quoted(row.group), " has ", row.turn_rewards.size(),
                        " turn_rewards but no `turns`, the turn of each token; expected both"));
  const size_t begin = steps.rewards.size();
  int32_t number = steps.turns.empty() ? 0 : steps.turns.back() + 1;
  std::vector<size_t> last_of_turn(row.turn_rewards.size(), SIZE_MAX);
  int32_t before = 0;
  for (size_t i = 0; i < row.input_ids.size(); ++i) {
    if (!row.trains(i)) continue;
    const int32_t turn = row.turns.empty() ? 0 : row.turns[i];
    if (steps.rewards.size() > begin && turn != before) ++number;
    before = turn;
    if (turn >= 0 && static_cast<size_t>(turn) < last_of_turn.size())
      last_of_turn[static_cast<size_t>(turn)] = steps.rewards.size();
    steps.rewards.push_back(0);
    steps.turns.push_back(number);
  }
  for (size_t k = 0; k < last_of_turn.size(); ++k)
    if (last_of_turn[k] != SIZE_MAX) steps.rewards[last_of_turn[k]] += row.turn_rewards[k] * reward_scaling;
  steps.truncated = row.finish_reason == "length";
  if (!needs_values) return;
  const std::vector<double> values = trained_column(row, kValuesColumn);
  if (values.size() != steps.rewards.size() - begin)
    throw UserError(str("adv_estimator gae: a sequence of group ", quoted(row.group), " has ",
                        steps.rewards.size() - begin, " trained tokens but ", values.size(),
                        " critic values; expected the field `values` in each line of a rollout file, as "
                        "`bough train` writes it, or another estimator"));
  steps.values.insert(steps.values.end(), values.begin(), values.end());
}

void finish_steps(SequenceSteps& steps, double shaped_reward) {
  if (steps.rewards.empty()) return;
  double given = 0;
  for (const double reward : steps.rewards) given += reward;
  steps.rewards.back() += shaped_reward - given;
}

}  // namespace bough
