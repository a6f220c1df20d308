// The messages of rewards. worker_protocol.h has the parts that rewards and environments have in common.
//
//   Bough:  {"id": 7, "prompt": "...", "completion": "...", "answer": "...", "fields": {...}}
//   worker: {"id": 7, "reward": 0.5}                                    or   {"id": 7, "error": "..."}
//
// `fields` is the problem's record without prompt, completion and answer. A worker gets one request at a
// time. An endpoint may omit the id in its answer, because each request has a connection of its own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "env/reward.h"

namespace bough {

struct WorkerReply {
  enum class Kind {
    ready,
    refused,    // the worker cannot be used; `message` says why
    reward,     // `reward` is finite
    failure,    // only this call failed; `message` says why
    malformed,  // the reply breaks the protocol, so the worker is given up; `message` quotes the reply
    lost,       // no reply: the worker died or the connection broke; `message` says how
  };
  Kind kind = Kind::malformed;
  std::optional<int64_t> id;  // of the request
  double reward = 0;
  std::string message;
  bool transient = false;  // another attempt may succeed
};

// Writes the request on one line, without a line break. Bytes that are not UTF-8 become U+FFFD.
std::string encode_request(int64_t id, const RewardRequest& request);

// Never throws: a text that is no reply gives `malformed`. If needs_id is true (processes), the reply must
// repeat the request's id.
WorkerReply parse_reply(std::string_view text, bool needs_id = true);

}  // namespace bough
