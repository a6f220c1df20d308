// Environments outside of this process: conversations over the channels of a WorkerPool, which are processes,
// connections to an endpoint, or servers of tools. A channel holds one conversation at a time and is used
// again for the next, if it can be. There are as many channels as conversations are open: callers keep to
// `workers` (max_open). A run and its evaluation each hold their own.
//
// A call that takes longer than `timeout_seconds` fails its conversation, and so does a channel that breaks;
// others go on. Opening a conversation whose channel died is tried again, `retries` times. A step is tried
// again only if the channel says that nothing has been done (ChannelReply::kNotDone), since tools may have
// acted.
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
    kReady,    // it can be used for a conversation: after its start, and after close() that said kClosing
    kAnswer,   // observation
    kFailed,   // the conversation failed; the channel is of use for others
    kNotDone,  // the call came to nothing and may be made again; else as kFailed
    kBroken,   // the channel is of no more use
  } kind = kReady;
  Observation observation{};
  EpisodeFailure failure = EpisodeFailure::kNone;  // of the last three
  std::string message{};
};

class EpisodeChannel : public WorkerChannel {
 public:
  enum class AfterClose { kFree, kClosing, kGone };

  virtual void begin(const EpisodeCall& call) = 0;
  // The conversation is over, no call is being made. Whether the channel is free for another.
  virtual AfterClose close() = 0;
  // Forgets a call that takes too long, or whose conversation was left. False: it cannot, the channel is of
  // no more use.
  virtual bool give_up() { return false; }
  // Sends and receives what can be at once. Returns the reply, if one has come.
  virtual std::optional<ChannelReply> advance() = 0;
};

// Blocks until a first channel is ready. UserError: it cannot be had. `open` is called by the pool's thread;
// IoError: there is none to be had at this time.
std::unique_ptr<Environment> make_environment_pool(const WorkerPoolOptions& options,
                                                   const EnvironmentSettings& settings,
                                                   std::function<std::unique_ptr<EpisodeChannel>()> open);

}  // namespace bough
