// What Bough and whatever computes rewards say to each other: JSON objects, UTF-8. A worker process gets and
// writes one a line; an HTTP endpoint gets one as the body of a POST and answers with one.
//
//   Bough:  {"id": 7, "prompt": "...", "completion": "...", "answer": "...", "fields": {...}}
//   worker: {"id": 7, "reward": 0.5}                                    or   {"id": 7, "error": "..."}
//
// A worker process may say first that it has loaded, and must where Bough waits for it:
//
//   worker: {"ready": true}                                    or   {"ready": false, "error": "..."}
//
// `fields` is the problem's record without prompt, completion and answer. A worker has one request at a time.
// An endpoint may leave out the id: its connection says which request it answers. Pure functions: nothing
// here knows about processes or sockets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "env/reward.h"

namespace bough {

// No reply is longer: what is, is a broken worker.
inline constexpr size_t kMaxReplyBytes = 1 << 20;

struct WorkerReply {
  enum class Kind {
    ready,
    refused,    // the worker cannot be used; message says why
    reward,     // finite
    failure,    // of this one call; message says why
    malformed,  // not the protocol: the worker cannot be trusted any further; message says what came
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

// Never throws: what is no reply is `malformed`. Replies of processes must have the request's id.
WorkerReply parse_reply(std::string_view text, bool needs_id = true);

// Untrusted text of any length as a message of at most 1,000 bytes, cut between characters.
std::string shortened(std::string_view text);

// Cuts a stream into lines. A line longer than kMaxReplyBytes is a broken worker: overflowed() stays true.
class LineSplitter {
 public:
  void append(std::string_view bytes);
  std::optional<std::string> next();  // without its line break
  bool overflowed() const { return overflowed_; }

 private:
  std::string pending_;
  size_t searched_ = 0;  // no line break before this
  bool overflowed_ = false;
};

}  // namespace bough
