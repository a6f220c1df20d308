// Environments outside of this process: conversations over channels, which are processes, connections to an
// endpoint, or servers of tools. A channel holds one conversation at a time and is used again for the next,
// if it can be. There are as many as conversations are open: whoever opens them keeps to `workers`
// (max_open). A run and its evaluation, which holds its own while the run's wait, do so each.
//
// One thread owns all channels and polls them until the nearest deadline:
//
//   begin, step, end ──orders──▶ thread ──call──▶ channel of the conversation
//                                  │  ▲                │
//              inbox ◀──reply──────┘  └────answer──────┘
//
// A call that takes longer than `timeout_seconds` fails its conversation, and so does a channel that breaks;
// others go on. Opening a conversation whose channel died is tried again, `retries` times; a step only where
// the channel says that nothing has been done (ChannelReply::kNotDone), since tools may have acted.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "env/environment_protocol.h"

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

// Where conversations are held, one at a time, with one call at a time. Nothing here blocks.
class EpisodeChannel {
 public:
  enum class AfterClose { kFree, kClosing, kGone };

  virtual ~EpisodeChannel() = default;  // ends at once what runs behind it

  virtual void begin(const EpisodeCall& call) = 0;
  // The conversation is over, no call is being made. Whether the channel is free for another.
  virtual AfterClose close() = 0;
  // Of a call that takes too long, or that nobody waits for any more: forgets it. False: it cannot, the
  // channel is of no more use.
  virtual bool give_up() { return false; }

  // For poll(); -1 while there is nothing to wait for.
  virtual int descriptor() const = 0;
  virtual bool wants_to_send() const = 0;
  // Something has come by other ways than the descriptor.
  virtual bool has_come() const { return false; }
  // Sends and receives what can be at once. What has come, if anything.
  virtual std::optional<ChannelReply> advance() = 0;
};

struct EnvironmentPoolOptions {
  std::string name;              // begins messages
  bool announces_ready = false;  // channels are free only after a reply kReady
  // Of those that do not, the first is watched so long: what cannot run ends the run at its start.
  std::chrono::milliseconds settling{0};
  std::chrono::milliseconds retry_pause{0};  // before a call is made again; doubles with each
};

// Blocks until a first channel is ready. UserError: it cannot be had. `open` is called by the pool's thread;
// IoError: there is none to be had at this time.
std::unique_ptr<Environment> make_environment_pool(const EnvironmentPoolOptions& options,
                                                   const EnvironmentSettings& settings,
                                                   std::function<std::unique_ptr<EpisodeChannel>()> open);

}  // namespace bough
