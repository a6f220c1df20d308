// From trajectories to what the executor takes: the only way, for training, `bough step`, `bough sft`,
// calibration and tests alike.
//
// A row that is not trained or not valid is left out of the batch. Rows of one trajectory (equal `group` and
// `trajectory`) count as one sequence together: each of N rows has 1/N of a sequence's weight in the loss,
// and their reward enters the group's mean once.
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

namespace bough {

// Sparse policies compute a token that the policy drew otherwise than an equal one that it did not: sequences
// part where one of two equal tokens was drawn. So drawn tokens (loss_mask) carry this bit in a batch that a
// sparse policy walks through, in its tree and its plans; the executor takes it off. Tokens for which
// generation kept the pages that they chose carry a second one, and a number in the token's place, the same
// for equal tokens that chose alike: sequences part where equal tokens chose otherwise, too.
inline constexpr int32_t kDrawnMark = 1 << 30, kReplayMark = 1 << 29;
inline int32_t token_id(int32_t marked) {
  return marked & ~kDrawnMark;
}
struct ReplayedToken {
  int32_t token = 0;
  std::span<const uint16_t> pages;  // PageChoices' of a token, the trajectory's own
};

// Sequences, which of their tokens train, and the loss's fields, one row a trained token of a sequence.
struct TrainBatch {
  std::vector<TokenSpan> sequences;                     // the trajectories' own
  std::vector<std::vector<int32_t>> trained_positions;  // of each sequence, ascending, all > 0: its loss rows
  std::vector<int64_t> row_offset;  // [S + 1]: rows of sequence s are [row_offset[s], row_offset[s + 1])
  double temperature = 1;           // the head divides logits by it
  // Where tokens are marked (mark_drawn), what `sequences` are spans of, and what the marks of tokens that
  // generation chose pages for stand for.
  std::shared_ptr<const std::vector<std::vector<int32_t>>> marked;
  std::shared_ptr<const std::vector<ReplayedToken>> replayed;
  // Fields of all rows on the CPU, accumulator type; log_probs_R and entropies_R are the executor's.
  LossRows fields;
  // int64 [R, K]: tokens whose log-probabilities at the rows' positions a walk returns too; undefined: none.
  at::Tensor given_ids_RK;
  // Of a critic, where every trained token has them (the trajectories' columns `values` and `returns`): [R],
  // CPU, accumulator type.
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

// Weights by `aggregation` over the whole batch; advantages by token or by sequence, behaviour
// log-probabilities (both undefined where no trajectory has any; a missing advantage among others is 0), and
// versions (undefined unless each trained token has one of 0 or more).
// Proximal and reference log-probabilities take walks of their own: GradientStep. `dtype`: the model's
// accumulator type. The trajectories must outlive the batch and be of one temperature.
TrainBatch make_batch(const std::vector<const Trajectory*>& trajectories,
                      const AggregationSettings& aggregation, at::ScalarType dtype);
TrainBatch make_batch(const std::vector<Trajectory>& trajectories, const AggregationSettings& aggregation,
                      at::ScalarType dtype);

// A batch's sequences with marks; `trajectories` are those that the batch was made of.
void mark_drawn(TrainBatch& batch, const std::vector<const Trajectory*>& trajectories);

// Advantages from rewards: shaped, filtered, estimated inside each group, as `actor` of a run says. A
// sequence that has an advantage keeps it, yet counts in its group's mean; what a filter drops becomes
// `trained: false`; a row that is not valid counts nowhere. Rows of one trajectory share its advantage.
// `age`: what is too old for the batch, and what becomes of it. `set_values`: gives the sequences that are
// trained a critic's values (sequence_steps.h), where the estimator asks for them and the caller has a
// critic; then they also get their returns. Returns what the filters counted, trajectory by trajectory.
// UserError: rows of a trajectory that disagree in their reward; overlong_reward_penalty where nobody knows
// how many tokens a response may have; see compute_advantages.
using SetValues = std::function<void(std::vector<Trajectory>& batch)>;
FilterResult set_advantages(std::vector<Trajectory>& batch, const ActorSettings& settings,
                            std::optional<int64_t> max_response_tokens, const AgeLimit& age = {},
                            const SetValues& set_values = {});

// Why the filters leave nothing of a group, if they do: "equal rewards", or "nothing left". A run that wants
// full batches draws another one for it. `group`: the samples of one prompt, as set_advantages takes them.
std::optional<std::string> why_dropped(const std::vector<Trajectory>& group, const ActorSettings& settings,
                                       std::optional<int64_t> max_response_tokens);

// The number of each sequence's group, by first appearance.
std::vector<int64_t> group_numbers(const std::vector<const Trajectory*>& trajectories);

// Spans of the tokens of all trajectories, whether they are in the loss or not: what their tree is built
// from.
std::vector<TokenSpan> token_spans(const std::vector<Trajectory>& trajectories);
// A flag for each flat token, sequence after sequence; that of position 0 is 0.
std::vector<uint8_t> trained_flags(const std::vector<Trajectory>& trajectories);

// What make_plan needs of the batch; memory and costs are the caller's to add. The spans are the batch's own.
PlanRequest plan_request(const TrainBatch& batch, int64_t max_tokens_per_pass);
// What make_plan needs under a run's settings; the memory budget counts where there are costs, which are not
// owned.
PlanRequest plan_request(const TrainBatch& batch, const MicroBatchSettings& settings,
                         const TreeTrainingSettings& tree, const PassCosts* costs);

}  // namespace bough
