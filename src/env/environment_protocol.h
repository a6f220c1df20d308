// What Bough and environments outside of it say to each other: JSON objects, UTF-8. A process gets and writes
// one a line (environment_process.h); an HTTP endpoint gets one as the body of a POST and answers with one
// (environment_http.h).
//
//   Bough:       {"id": 1, "method": "reset", "problem": {...}, "seed": 7}
//   environment: {"id": 1, "messages": [{"role": "user", "content": "..."}], "tools": [...]}
//   Bough:       {"id": 2, "method": "step", "action": {"text": "...", "content": "...", "reasoning": "...",
//                 "calls": [{"id": "...", "name": "...", "arguments": {...}}]}}
//   environment: {"id": 2, "messages": [...], "reward": 0.5, "done": false, "rewards": {"style": 1}}
//   Bough:       {"method": "close"}
//   environment: {"id": 2, "error": "..."}              fails the conversation
//
// `messages` may be a text: then it is one message, of the role tool for each call of the turn, else user.
// Without messages of its own, reset leaves those of the problem. Pure functions: nothing here knows about
// processes or sockets.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "env/environment.h"

namespace bough {

// What an environment is asked: to open a conversation (no action) or to answer a turn of the model.
struct EpisodeCall {
  Problem problem;
  uint64_t seed = 0;
  std::optional<Action> action;

  bool is_reset() const { return !action; }
  size_t num_calls() const { return action ? action->calls.size() : 0; }
};

OrderedJson request_of(const EpisodeCall& call);  // without `id`

// What is no reply of the protocol; what() says what came.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};
Observation read_observation(const OrderedJson& reply, size_t num_calls);

// On one line; bytes that are not UTF-8 become U+FFFD.
std::string dump_ordered(const OrderedJson& json);

}  // namespace bough
