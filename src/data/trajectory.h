// One sampled sequence with its data for training and reports: a row of the batch. Engines, rollout control
// and train/make_batch pass rollouts in this type. Each line of a rollout file is a Trajectory.
//
// A per-token list has one entry per token of input_ids. It is empty if its entries are not known.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"

namespace bough {

// The blocks of tokens that sparse attention selected during generation (kernels/page_choice).
// - The first and the last blocks of a context, which are always attended to, are not listed.
// - A token has one list of blocks per sparse layer and key/value head. All lists of a token have the same
//   length.
struct PageChoices {
  std::vector<int32_t> positions;  // of the tokens, ascending
  std::vector<size_t> begin;       // per entry of `positions`: start of the token's lists in `pages`
  std::vector<uint16_t> pages;     // numbers of blocks

  std::span<const uint16_t> of(size_t i) const {
    const size_t end = i + 1 < begin.size() ? begin[i + 1] : pages.size();
    return std::span(pages).subspan(begin[i], end - begin[i]);
  }
};

// The experts that a mixture of experts used for each token, as the engine recorded them: row i belongs to
// token i. A token's row is recorded when the token is computed, so the last sampled token has no row.
struct RoutedExperts {
  int64_t num_layers = 0;         // with experts
  int64_t num_chosen = 0;         // experts per token and layer
  std::vector<uint16_t> experts;  // [rows, num_layers, num_chosen]

  bool empty() const { return experts.empty(); }
  int64_t row_size() const { return num_layers * num_chosen; }
  int64_t num_rows() const { return empty() ? 0 : static_cast<int64_t>(experts.size()) / row_size(); }
  std::span<const uint16_t> row(int64_t token) const {
    return std::span(experts).subspan(static_cast<size_t>(token * row_size()),
                                      static_cast<size_t>(row_size()));
  }
  void truncate(int64_t max_rows) {
    if (num_rows() > max_rows) experts.resize(static_cast<size_t>(max_rows * row_size()));
  }
  bool operator==(const RoutedExperts&) const = default;
};

// A column of rows that begin with tokens which an earlier row of their conversation trains: 1 for each token
// that the policy sampled. Such a token has loss mask 0 in this row. Other rows do not have the column.
inline constexpr const char* kSampledColumn = "sampled";

// Columns that training adds to the rows it is trained on, for people: by trained token, rounded to 0.001.
// kMismatchColumn: the trainer's log-probability before the step minus the engine's. kEntropyColumn: the
// policy's entropy in nats.
inline constexpr const char* kMismatchColumn = "token_mismatch";
inline constexpr const char* kEntropyColumn = "token_entropy";

struct Trajectory {
  std::string group;            // the same for all samples of one prompt
  std::string trajectory;       // a conversation, whose rows weigh as one (train/make_batch.h); empty: none
  std::optional<int64_t> turn;  // the turn of the conversation that this row of the batch stores

  // Lists by token.
  std::vector<int32_t> input_ids;  // prompt and response; may be empty
  std::vector<uint8_t> loss_mask;  // 1: the policy sampled this token and is trained on it
  std::vector<float> logprobs;     // under the behavior policy at `temperature`; 0 where loss_mask is 0
  std::vector<int32_t> versions;   // the version that sampled the token; -1 where loss_mask is 0
  std::vector<int32_t> turns;      // the turn that the token belongs to; -1 outside of turns
  std::vector<float> advantage;    // one advantage per token, or a single one for the whole sequence
  std::vector<std::vector<int32_t>> top_ids;     // the engine's top-k tokens at this position
  std::vector<std::vector<float>> top_logprobs;  // log-probabilities of top_ids, same lengths
  // Further named lists of numbers. Each has one entry per token, or per token of loss mask 1, in order.
  std::map<std::string, std::vector<double>> columns;

  PageChoices page_choices;      // only with rollout.sparse.replay; not in rollout files
  RoutedExperts routed_experts;  // of input_ids, with or without a row for the last token; empty: not known

  double temperature = 1.0;
  std::optional<double> reward;
  std::map<std::string, double> rewards;  // the named rewards that make up `reward`, before weighting
  std::vector<double> turn_rewards;       // by turn
  bool valid = true;    // false: the reward failed. Left out of group mean, deviation and loss
  bool trained = true;  // false: a filter removed this Trajectory from the loss
  // True for the greedily sampled response of a group, generated in addition to its samples. The reward of
  // this response is the group's baseline. The response is left out of group mean, filter and loss.
  bool baseline = false;

  // Texts for people to read.
  std::optional<std::string> answer, completion, prompt;
  std::optional<std::string> finish_reason;   // stop, length, stop_string, cancelled
  std::optional<std::string> reward_failure;  // why the reward failed

  Json fields = Json::object();  // unknown fields of the rollout file

  // The token at position 0 has no token before it that predicts it, so its loss mask is ignored.
  bool trains(size_t position) const { return position > 0 && loss_mask[position] != 0; }
  bool trains_a_token() const {
    for (size_t i = 1; i < loss_mask.size(); ++i)
      if (loss_mask[i] != 0) return true;
    return false;
  }
  // Whether this row of the batch takes part in the loss.
  bool in_loss() const { return trained && valid && !baseline; }
  // One flag per token: 1 if the policy sampled it (kSampledColumn).
  std::vector<uint8_t> sampled() const {
    const auto column = columns.find(kSampledColumn);
    if (column == columns.end()) return loss_mask;
    return {column->second.begin(), column->second.end()};
  }
  // Number of tokens that this row trains: those of loss mask 1.
  int64_t num_generated() const {
    int64_t count = 0;
    for (const uint8_t mask : loss_mask) count += mask != 0;
    return count;
  }
};

// The fields of a rollout file that hold texts, with their members of Trajectory, in the order of writing.
struct TrajectoryText {
  const char* name;
  std::optional<std::string> Trajectory::*member;
};
inline constexpr TrajectoryText kTrajectoryTexts[] = {{"answer", &Trajectory::answer},
                                                      {"completion", &Trajectory::completion},
                                                      {"finish_reason", &Trajectory::finish_reason},
                                                      {"prompt", &Trajectory::prompt},
                                                      {"reward_failure", &Trajectory::reward_failure}};

}  // namespace bough
