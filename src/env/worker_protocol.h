// What Bough and a reward worker say to each other: one JSON object a line, UTF-8, over one stream socket.
//
//   worker: {"ready": true}                the user's file is loaded   or   {"ready": false, "error": "..."}
//   Bough:  {"id": 7, "prompt": "...", "completion": "...", "fields": {...}}
//   worker: {"id": 7, "reward": 0.5}                                    or   {"id": 7, "error": "..."}
//
// A worker has one request at a time. Pure functions: nothing here knows about processes.
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
    refused,    // the user's file cannot be used; message says why
    reward,     // finite
    failure,    // of this one call; message says why
    malformed,  // not the protocol: the worker cannot be trusted any further; message says what came
  };
  Kind kind = Kind::malformed;
  int64_t id = -1;
  double reward = 0;
  std::string message;
};

// The request as a line with its line break. `fields` is the record without `prompt` and `completion`, which
// are arguments of their own, and with `answer`. Bytes that are not UTF-8 become U+FFFD.
std::string encode_request(int64_t id, const RewardRequest& request);

// Never throws: a line that is not a reply gives `malformed`.
WorkerReply parse_reply(std::string_view line);

// Cuts a stream into lines. A line longer than kMaxReplyBytes is a broken worker: overflowed() stays true.
class LineSplitter {
 public:
  static constexpr size_t kMaxReplyBytes = 1 << 20;

  void append(std::string_view bytes);
  std::optional<std::string> next();  // without its line break
  bool overflowed() const { return overflowed_; }

 private:
  std::string pending_;
  size_t searched_ = 0;  // no line break before this
  bool overflowed_ = false;
};

}  // namespace bough
