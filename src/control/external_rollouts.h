// Groups whose conversations are held outside of the run, by external agents. This interface hides the
// protocol from the controller (implementation: serve/agent_server.h).
//
//   limiter ─▶ begin ─▶ offer() ─▶ an agent takes it ─▶ its requests ─▶ pass() ─┬▶ finished() ─▶ rewards
//                                                                               └▶ failed() ─▶ dropped
//
// A group is offered when the staleness limiter admits it. From then on the controller counts the group as
// running, even if no agent has taken it. So no agent can bypass the limiter, and an agent loses its group
// only at the group's own deadline.
#pragma once

#include <string>

#include "control/generator.h"
#include "report/metrics.h"

namespace bough {

// Receives the outcome of offered groups, at most one per group. Called from any thread.
class ExternalRolloutSink {
 public:
  virtual ~ExternalRolloutSink() = default;
  virtual void finished(FinishedGroup group) = 0;
  virtual void failed(uint64_t id, const std::string& reason) = 0;
  virtual void wake() = 0;  // pass() has something to do
};

class ExternalRollouts {
 public:
  virtual ~ExternalRollouts() = default;
  // Called once, before all other functions. `sink` must live until close() returns.
  virtual void start(ExternalRolloutSink& sink) = 0;
  // Makes the group available: from now on an agent may start it. Callable from any thread. The caller must
  // keep the group's problem alive until the group is scored.
  virtual void offer(GroupTask task) = 0;
  // Called on the engine's thread, which does not use the engine during the call. Accepts the requests that
  // have come, and runs one pass of the engine. Returns false if there was nothing to do.
  virtual bool pass() = 0;
  virtual int64_t samples_in_flight() const = 0;  // in the engine; called on the engine's thread
  // After close() returns, no request is answered and the sink is not called. Must not be called from within
  // the sink.
  virtual void close() = 0;

  // Says what the groups wait for, for people: "3 groups wait for agents, 1 is held (5 of 8 sessions ended)".
  // Empty: they wait for nothing.
  virtual std::string waits_for() const = 0;
  virtual MetricValues metrics() const = 0;  // counts since the process began
};

}  // namespace bough
