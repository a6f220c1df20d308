// One sampled sequence with all that training and reports know of it: the only form that a rollout has
// between an engine and train/make_batch. Rollout files (rollout_file.h) are these, a line each.
//
// A list by token has one value a token of input_ids, or is empty where the value is not known.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"

namespace bough {

// Which pages of their contexts tokens attended to in generation, where they attended by choice
// (kernels/page_choice): all but the first page and the last two, which they always do. A list each of a
// token's layers that choose, times key/value heads; of one token all lists are of one length.
struct PageChoices {
  std::vector<int32_t> positions;  // of the tokens, ascending
  std::vector<size_t> begin;       // where a token's lists begin in `pages`
  std::vector<uint16_t> pages;     // indices into the context's pages

  std::span<const uint16_t> of(size_t i) const {
    const size_t end = i + 1 < begin.size() ? begin[i + 1] : pages.size();
    return std::span(pages).subspan(begin[i], end - begin[i]);
  }
};

struct Trajectory {
  std::string group;            // sequences of one prompt share it
  std::string trajectory;       // rows of one trajectory share it; empty: a row by itself
  std::optional<int64_t> turn;  // which turn of the trajectory this row is

  // Lists by token.
  std::vector<int32_t> input_ids;  // prompt and response; may be empty
  std::vector<uint8_t> loss_mask;  // 1: the policy produced this token and is trained on it
  std::vector<float> logprobs;     // under the sampling policy at `temperature`; 0 where the mask is 0
  std::vector<int32_t> versions;   // the weight version that sampled it; -1 where the mask is 0
  std::vector<int32_t> turns;      // the turn it belongs to; -1 outside of turns
  std::vector<float> advantage;    // one a token; or a single value, the sequence's
  std::vector<std::vector<int32_t>> top_ids;     // the engine's most likely tokens at this position
  std::vector<std::vector<float>> top_logprobs;  // theirs, of the same lengths
  // More numbers by token under names of their own: one a token, or one a token of mask 1, in order.
  std::map<std::string, std::vector<double>> columns;

  PageChoices page_choices;  // where generation kept them (rollout.sparse.replay); not in files

  double temperature = 1.0;
  std::optional<double> reward;
  std::map<std::string, double> rewards;  // its parts, by name
  std::vector<double> turn_rewards;       // by turn
  bool valid = true;    // false: no reward could be had; the row leaves group mean, deviation and loss
  bool trained = true;  // false: a filter left it out; it takes part in no loss
  // The group's most likely response, whose reward is a baseline: in no group mean, filter or loss.
  bool baseline = false;

  // What people read.
  std::optional<std::string> answer, completion, prompt;
  std::optional<std::string> finish_reason;   // stop, length, stop_string, cancelled
  std::optional<std::string> reward_failure;  // the message of a reward that failed

  Json fields = Json::object();  // a file's other fields, kept

  // Position 0 has no prediction: its mask is ignored and not counted.
  bool trains(size_t position) const { return position > 0 && loss_mask[position] != 0; }
  bool trains_a_token() const {
    for (size_t i = 1; i < loss_mask.size(); ++i)
      if (loss_mask[i] != 0) return true;
    return false;
  }
  // Whether the loss sees it at all.
  bool in_loss() const { return trained && valid && !baseline; }
  // The tokens that the policy produced.
  int64_t num_generated() const {
    int64_t count = 0;
    for (const uint8_t mask : loss_mask) count += mask != 0;
    return count;
  }
};

// What people read of a sequence: fields of a file and the members that hold them, in the order in which they
// are written.
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
