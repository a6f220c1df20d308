// Converts trajectories to the executor's input. Training, `bough step`, `bough sft`, calibration and tests
// all use these functions.
//
// One Trajectory is one row of the batch. A row of the batch is left out if `trained` is false, `valid` is
// false (its reward failed) or it is a baseline (Trajectory::in_loss()). Rows of the batch with equal `group`
// and `trajectory` are one conversation and together count as one sequence: each of N rows has 1/N of a
// sequence's weight in the loss, and their reward enters the group's mean once.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "algo/filters.h"
#include "algo/loss.h"
#include "data/trajectory.h"
#include "plan/plan.h"
#include "train/settings.h"
#include "train/token_age.h"
#include "train/token_marks.h"

namespace bough {

// Sequences, their trained tokens, and the loss's fields. A loss row is one trained token of one sequence.
struct TrainBatch {
  std::vector<TokenSpan> sequences;                     // spans of the trajectories, or of `marked`
  std::vector<std::vector<int32_t>> trained_positions;  // by sequence, ascending, all > 0; one loss row each
  std::vector<int64_t> row_offset;  // [S + 1]: sequence s has loss rows [row_offset[s], row_offset[s + 1])
  double temperature = 1;           // the head divides logits by it
  // Set by mark_tokens(): the marked token ids, and the tokens that kReplayMark indices refer to.
  std::shared_ptr<const std::vector<std::vector<int32_t>>> marked;
  std::shared_ptr<const std::vector<ReplayedToken>> replayed;
  // By sequence: the experts that the trainer's own pass used. nullptr: the trajectories' records count.
  std::shared_ptr<const std::vector<RoutedExperts>> routed_experts;
  // Fields of all loss rows on the CPU, accumulator type. The executor sets log_probs_R and entropies_R.
  LossRows fields;
  // int64 [R, K]: top-k tokens whose log-probabilities plan execution also returns. Undefined: none.
  at::Tensor top_k_ids_RK;
  // [R], CPU, accumulator type: for a critic, the trajectories' columns `values` and `returns`. A column is
  // undefined unless every trained token has an entry in it.
  at::Tensor old_values_R, returns_R;

  int64_t num_rows() const { return row_offset.back(); }
  const ReplayedToken* replay_of(int32_t marked_token) const {
    return (marked_token & kReplayMark) != 0
               ? &(*replayed)[static_cast<size_t>(marked_token & (kReplayMark - 1))]
               : nullptr;
  }
  int32_t token_of(int32_t marked_token) const {
    const ReplayedToken* replay = replay_of(marked_token);
    return replay ? replay->token : token_id(marked_token);
  }
};

// Makes a batch with these loss fields:
// - weights by `aggregation` over the whole batch;
// - advantages; undefined if no trajectory has any, and 0 for a trajectory that lacks them;
// - behavior log-probabilities; undefined if no trajectory has any;
// - versions; undefined unless each trained token has a version >= 0.
// GradientStep computes proximal and reference log-probabilities. `dtype`: the model's accumulator type. The
// trajectories must outlive the batch. Throws InternalError if temperatures differ or lengths are wrong.
TrainBatch make_batch(const std::vector<const Trajectory*>& trajectories,
                      const AggregationSettings& aggregation, at::ScalarType dtype);
TrainBatch make_batch(const std::vector<Trajectory>& trajectories, const AggregationSettings& aggregation,
                      at::ScalarType dtype);

// Sets advantages from rewards, which are shaped, filtered and compared inside each group.
// - A sequence that already has an advantage keeps it, but its reward counts in the group's mean.
// - A row of the batch that a filter drops becomes `trained: false`. One that is not valid counts nowhere.
// - The rows of one conversation get the conversation's advantage, or their part of its per-token advantages.
// age: the action `mask` sets the advantages of too old tokens to 0 at the end; `drop_group` drops every
// group with such a token.
// set_values: sets a critic's values and the KL's rewards of the trained sequences (sequence_steps.h). Empty
// if the estimator needs neither. Called only if it needs one; with values the sequences also get returns.
// Returns the filters' result, in which one conversation is one sequence. Throws UserError if rows of a
// conversation differ in reward, if overlong_reward_penalty is set without max_response_tokens, or as
// compute_advantages does.
using SetValues = std::function<void(std::vector<Trajectory>& batch)>;
FilterResult set_advantages(std::vector<Trajectory>& batch, const ActorSettings& settings,
                            std::optional<int64_t> max_response_tokens, const AgeLimit& age = {},
                            const SetValues& set_values = {});

// Returns why the filters drop a whole group, "equal rewards" or "nothing left"; nullopt if they keep a
// sample of it. A run that needs full batches then samples another group. `group`: all samples of one prompt.
std::optional<std::string> why_dropped(const std::vector<Trajectory>& group, const ActorSettings& settings,
                                       std::optional<int64_t> max_response_tokens);

// Each sequence's group index. Groups are numbered by first appearance.
std::vector<int64_t> group_numbers(const std::vector<const Trajectory*>& trajectories);

// Spans of the tokens of all trajectories, including those that are not in the loss.
std::vector<TokenSpan> token_spans(const std::vector<Trajectory>& trajectories);
// One flag per token, sequence after sequence, no prefix merged. 1: trained. The flag of position 0 is 0.
std::vector<uint8_t> trained_flags(const std::vector<Trajectory>& trajectories);

// The request for make_plan, without memory budget and costs. The spans' data belongs to the batch.
PlanRequest plan_request(const TrainBatch& batch, int64_t max_tokens_per_pass);
// The request for make_plan under a run's settings. The memory budget is used only if there are costs. costs:
// not owned; nullptr if plans are made without costs.
PlanRequest plan_request(const TrainBatch& batch, const MicroBatchSettings& settings,
                         const TreeTrainingSettings& tree, const PassCosts* costs);

}  // namespace bough
