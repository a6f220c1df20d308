// Environments outside of this process. Conversations use the channels of a WorkerPool: processes,
// connections to an endpoint, or MCP servers. A channel has one conversation at a time. If possible it is
// reused for the next one. There is one channel per open conversation. Each caller has at most `workers`
// conversations open (max_open). The run and its evaluation count separately.
//
// If a call takes longer than `timeout_seconds` or the channel breaks, the conversation fails. Other
// conversations are not affected. If a channel dies while it opens a conversation, the call is retried
// `retries` times. A step is retried only after ChannelReply::kNotDone, because otherwise tools may already
// have acted.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "env/environment_protocol.h"
#include "net/worker_pool.h"

namespace bough {

struct ChannelReply {
  enum Kind {
    kReady,    // the channel is free for a conversation: after its start, or after close() returned kClosing
    kAnswer,   // the call was answered by `observation`
    kFailed,   // the conversation failed; the channel can be used for others
    kNotDone,  // the call had no effect and may be repeated; if it is not, the conversation failed
    kBroken,   // the channel cannot be used any more
  } kind = kReady;
  Observation observation{};
  EpisodeFailure failure = EpisodeFailure::kNone;  // set for the last three kinds
  std::string message{};
};

class EpisodeChannel : public WorkerChannel {
 public:
  enum class AfterClose { kFree, kClosing, kGone };

  virtual void begin(const EpisodeCall& call) = 0;
  // Ends the conversation. The caller must first give up a running call. The result says when the channel can
  // take another conversation: now (kFree), after advance() has returned kReady (kClosing), or never (kGone).
  virtual AfterClose close() = 0;
  // Abandons a call that takes too long or whose conversation was ended. Returns false if the channel cannot
  // be used any more.
  virtual bool give_up() { return false; }
  // Sends and receives without blocking. Returns the reply if it is complete.
  virtual std::optional<ChannelReply> advance() = 0;
};

// Blocks until a first channel is ready. Throws UserError if that fails. `open` is called by the pool's
// thread. It throws IoError if no channel can be opened at this time.
std::unique_ptr<Environment> make_environment_pool(const WorkerPoolOptions& options,
                                                   const EnvironmentSettings& settings,
                                                   std::function<std::unique_ptr<EpisodeChannel>()> open);

}  // namespace bough
