// Lets many threads use an engine that one thread drives. Commands take effect between two passes of the
// engine. The events of a pass are delivered together after the pass.
//
//   submit(), cancel() from any thread ─▶ queue ─▶ pass() on the engine's thread ─▶ deliver() on that thread
//
// run() makes passes until it is stopped. A caller that uses the engine's thread for other tasks too calls
// pass() instead. deliver() must hand the events to another thread and return, because the next pass waits
// for it. No torch.
#pragma once

#include <functional>
#include <string>
#include <unordered_set>
#include <variant>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"

namespace bough {

// A request's first event is kAccepted or kRefused. Then come kToken events, at last kFinished. A cancelled
// request has no more events.
struct EngineEvent {
  enum class Kind { kAccepted, kRefused, kToken, kFinished };
  uint64_t id = 0;
  Kind kind = Kind::kToken;
  StreamedToken token;
  GenerationResult result;
  std::string message;  // kRefused: the reason
};

class EngineLoop {
 public:
  using Deliver = std::function<void(std::vector<EngineEvent>)>;
  // `engine` must outlive the loop. Nothing else may use `engine` during run() or pass().
  EngineLoop(Engine& engine, Deliver deliver);

  // All requests of one call enter the engine between the same two passes. The loop sets their on_token.
  void submit(std::vector<GenerationRequest> requests);
  void cancel(uint64_t id);
  // Sets a function that submit() and cancel() call at their end, on their caller's thread. It says that
  // pass() has commands to execute.
  void on_commands(std::function<void()> wake);
  // Executes the queued commands, then one pass of the engine. Returns false if there was nothing to do.
  bool pass();
  int64_t num_running() const { return std::ssize(running_); }  // on the engine's thread
  // Makes passes until stop() returns true. stop() is called between passes and at least every 100 ms while
  // the engine is idle. Rethrows exceptions of the engine.
  void run(const std::function<bool()>& stop);
  EngineStatistics statistics() const;  // after the last pass
  int32_t version() const;

 private:
  using Command = std::variant<GenerationRequest, uint64_t>;  // or the id of a request to cancel
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
  // Engine's thread only.
  std::vector<EngineEvent> events_;
  std::unordered_set<uint64_t> running_;  // accepted, neither finished nor cancelled
};

}  // namespace bough
