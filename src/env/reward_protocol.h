// The messages of rewards (worker_protocol.h has what they share with environments').
//
//   Bough:  {"id": 7, "prompt": "...", "completion": "...", "answer": "...", "fields": {...}}
//   worker: {"id": 7, "reward": 0.5}                                    or   {"id": 7, "error": "..."}
//
// `fields` is the problem's record without prompt, completion and answer. A worker has one request at a time.
// An endpoint may leave out the id, since it answers each request on a connection of its own.
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
    refused,    // the worker cannot be used; message says why
    reward,     // finite
    failure,    // this one call failed; message says why
    malformed,  // the protocol was broken, so the worker is not used any more; message quotes the reply
    lost,       // no reply: the worker died, or the connection broke; message says how
  };
  Kind kind = Kind::malformed;
  std::optional<int64_t> id;  // of the request
  double reward = 0;
  std::string message;
  bool transient = false;  // a failure that another attempt may not have
};

// The request as one line, without a line break. Bytes that are not UTF-8 become U+FFFD.
std::string encode_request(int64_t id, const RewardRequest& request);

// Never throws: a text that is no reply is `malformed`. Replies of processes must have the request's id.
WorkerReply parse_reply(std::string_view text, bool needs_id = true);

}  // namespace bough
