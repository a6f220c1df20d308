// Conversations of a run as a person reads them, in report.html: groups, each with its conversations, where
// they forked from each other, and in each the turns with their tokens, calls, times, errors and rewards.
// Bounded: so many groups, conversations, messages and bytes, with a word where something was left out.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bough {

struct TalkMessage {
  std::string role, name;  // name: of the tool that answers
  std::string reasoning, content;
  std::vector<std::pair<std::string, std::string>> calls;  // name and arguments
  // Of a turn of the model.
  std::optional<int64_t> turn;
  int64_t tokens = 0;
  double engine_seconds = 0;       // until it was there
  double environment_seconds = 0;  // until it was answered
  double reward = 0;
  bool retokenized = false;  // its text would have been other tokens than those sampled
};

struct Talk {
  std::string name;  // "#0"
  std::string reason, failure;
  std::optional<double> reward;
  std::map<std::string, double> rewards;
  int64_t turns = 0, tokens = 0, invalid_calls = 0, rows = 1;
  std::vector<TalkMessage> messages;
  // The tokens of its last row, in order: runs of what the model wrote and of what it was shown.
  struct Run {
    int64_t tokens = 0;
    bool is_model = false;
  };
  std::vector<Run> runs;
  // The one before it in the group that it has most tokens in common with, from the first token on.
  std::string forks_from;
  int64_t common_tokens = 0;
  int64_t fork_turn = -1;  // the turn in which they part; -1: before the first
};

struct TalkGroup {
  int64_t step = 0;
  std::string name;
  std::vector<Talk> talks;
};

std::string conversations_section(const std::vector<TalkGroup>& groups);  // empty without groups

}  // namespace bough
