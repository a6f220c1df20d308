// The messages between Bough and environments outside of it: JSON objects in UTF-8. A process reads and
// writes one per line (environment_process.h). An HTTP endpoint gets one as the body of a POST and answers
// with one (environment_http.h).
//
//   Bough:       {"id": 1, "method": "reset", "problem": {...}, "seed": 7}
//   environment: {"id": 1, "messages": [{"role": "user", "content": "..."}], "tools": [...]}
//   Bough:       {"id": 2, "method": "step", "action": {"text": "...", "content": "...", "reasoning": "...",
//                 "calls": [{"id": "...", "name": "...", "arguments": {...}}]}}
//   environment: {"id": 2, "messages": [...], "reward": 0.5, "done": false, "rewards": {"style": 1}}
//   Bough:       {"method": "close"}
//   environment: {"id": 2, "error": "..."}              fails the conversation
//
// `messages` may be a text. The text becomes one tool message per call of the turn, or one user message if
// the turn has no calls. If reset returns no messages, the problem's messages are used. All functions are
// pure: they use no processes and no sockets.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "env/environment.h"

namespace bough {

// A call of an environment: to open a conversation (no action) or to answer a turn of the model.
struct EpisodeCall {
  Problem problem;
  uint64_t seed = 0;
  std::optional<Action> action;

  bool is_reset() const { return !action; }
  size_t num_calls() const { return action ? action->calls.size() : 0; }
};

OrderedJson request_of(const EpisodeCall& call);  // without `id`

// Thrown if a reply breaks the protocol. what() quotes the wrong part.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// num_calls: calls of the turn that the reply answers. Throws Malformed.
Observation read_observation(const OrderedJson& reply, size_t num_calls);

}  // namespace bough
