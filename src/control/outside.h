// Groups of samples that are made outside of the run: agents written elsewhere hold the conversations, over
// whatever protocol implements this interface (serve/agent_server.h); control knows nothing of it.
//
//   gate ─▶ begin ─▶ offer() ─▶ an agent takes the group ─▶ its requests ─▶ pass() ─▶ finished() ─▶ rewards
//                                                                            └──────▶ failed() ─▶ dropped
//
// A group is offered when the staleness gate admits it, and is one of the running groups of the controller
// from then on, whether an agent has it or not: so nobody passes by the gate, and what an agent has been
// given is never taken back but at its own deadline.
#pragma once

#include <functional>
#include <string>

#include "control/generator.h"
#include "report/metrics.h"

namespace bough {

// What becomes of groups that were offered, each at most once; from any thread.
struct OutsideSink {
  std::function<void(FinishedGroup)> finished;
  std::function<void(uint64_t id, const std::string& reason)> failed;
  std::function<void()> wake;  // there is something for pass() to do
};

class OutsideGroups {
 public:
  virtual ~OutsideGroups() = default;
  // First of all.
  virtual void start(OutsideSink sink) = 0;
  // The group may be begun. From any thread; its problem lives until the group is scored.
  virtual void offer(GroupTask task) = 0;
  // Engine's thread, which uses the engine for nothing else meanwhile: takes what was asked, and one pass of
  // the engine. False: there was nothing to do.
  virtual bool pass() = 0;
  virtual int64_t samples_in_flight() const = 0;  // in the engine; engine's thread
  // Nobody is answered any more, and the sink is not called. Not from a thread that it calls.
  virtual void close() = 0;

  // What it waits for, for people: "3 groups wait for agents, 1 is held (5 of 8 sessions ended)"; "":
  // nothing.
  virtual std::string waits_for() const = 0;
  virtual MetricValues metrics() const = 0;  // counts are since the run's process began
};

}  // namespace bough
