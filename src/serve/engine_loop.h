// Lets many threads use an engine that one thread drives: what they ask is done between two of its passes,
// what comes of it is handed out after each pass, all at once.
//
//   submit(), cancel() from any thread ─▶ queue ─▶ pass() on the engine's thread ─▶ deliver() on that thread
//
// run() makes passes until it is stopped; who has other work for that thread calls pass() between it.
// deliver() must hand the events on and return: the next pass waits for it. No torch.
#pragma once

#include <functional>
#include <string>
#include <unordered_set>
#include <variant>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"

namespace bough {

// Of one request: kAccepted or kRefused first; then tokens; kFinished last. A cancelled request has no more.
struct EngineEvent {
  enum class Kind { kAccepted, kRefused, kToken, kFinished };
  uint64_t id = 0;
  Kind kind = Kind::kToken;
  StreamedToken token;
  GenerationResult result;
  std::string message;  // why it was refused
};

class EngineLoop {
 public:
  using Deliver = std::function<void(std::vector<EngineEvent>)>;
  // Used by nobody else while run() is running.
  EngineLoop(Engine& engine, Deliver deliver);

  // All or nothing is taken between two passes. on_token is the loop's own.
  void submit(std::vector<GenerationRequest> requests);
  void cancel(uint64_t id);
  // Called after either, on the same thread: there is something for pass() to do.
  void on_commands(std::function<void()> wake);
  // What was asked for, then one pass of the engine. False: there was nothing to do.
  bool pass();
  int64_t num_running() const { return std::ssize(running_); }  // on the engine's thread
  // Looked at between passes, and at least ten times a second. What the engine throws is passed on.
  void run(const std::function<bool()>& stop);
  EngineStatistics statistics() const;  // after the last pass
  int32_t version() const;

 private:
  using Command = std::variant<GenerationRequest, uint64_t>;  // or the id of what is to be cancelled
  bool take_commands();
  void deliver_events();

  Engine& engine_;
  const Deliver deliver_;
  mutable Mutex mutex_;
  CondVar has_commands_;
  std::function<void()> wake_ GUARDED_BY(mutex_);
  std::vector<Command> commands_ GUARDED_BY(mutex_);
  EngineStatistics statistics_ GUARDED_BY(mutex_);
  int32_t version_ GUARDED_BY(mutex_) = 0;
  // Of the thread that runs.
  std::vector<EngineEvent> events_;
  std::unordered_set<uint64_t> running_;  // not cancelled
};

}  // namespace bough
