// A conversation as people read it: its turns with tokens, calls, times, errors and rewards, and where it
// forks from another one of its group. The page of a run and `bough rollout --trace` show it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bough {

struct MessageView {
  std::string role, name;  // name: the tool that answers
  std::string reasoning, content;
  std::vector<std::pair<std::string, std::string>> calls;  // name and arguments
  // This member and the following ones are set only for turns of the model.
  std::optional<int64_t> turn;
  int64_t tokens = 0;
  double engine_seconds = 0;       // time until the engine returned the turn
  double environment_seconds = 0;  // time until the environment answered it
  double reward = 0;
  bool retokenized = false;  // true: tokenizing the turn's text gives other tokens than the sampled ones
};

struct ConversationView {
  std::string name;  // "#0"
  std::string reason, failure;
  std::optional<double> reward;
  std::map<std::string, double> rewards;
  int64_t turns = 0, tokens = 0, invalid_calls = 0, rows = 1;  // rows of the batch
  std::vector<MessageView> messages;
  // The tokens of the conversation's last row of the batch, in order, as runs that the model wrote (is_model)
  // or was shown.
  struct Run {
    int64_t tokens = 0;
    bool is_model = false;
  };
  std::vector<Run> runs;
  // The name of the group's earlier conversation that has the longest token prefix in common with this one;
  // "" if there is none.
  std::string forks_from;
  int64_t common_tokens = 0;
  int64_t fork_turn = -1;  // the first turn that differs from forks_from; -1: before the first turn
};

struct ConversationGroup {
  int64_t step = 0;
  std::string name;
  std::vector<ConversationView> views;
};

}  // namespace bough
