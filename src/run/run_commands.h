// A run's answers to the commands of its user (report/run_control.h):
//
//   pause        no group and no step begins until resume. Groups in generation are finished; a synchronous
//                run finishes its step, so that its bits do not change
//   checkpoint   at the end of the step in work; at once if the run is paused
//   evaluate     the weights after the step in work
//   stop         as Ctrl-C: a checkpoint is written
//
// A command is answered when it is done, or at once if it is refused.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "control/controller.h"
#include "report/run_control.h"

namespace bough {

// Used on the control thread, but for stops().
class RunCommands {
 public:
  // `controller` and `clock` must outlive this object. They are used by follow() first.
  RunCommands(const std::filesystem::path& run, const Clock& clock, Controller& controller, bool can_evaluate)
      : run_(run), queue_(run, clock), controller_(controller), can_evaluate_(can_evaluate) {}

  void follow();  // begins new commands, and answers those that are done
  void on_record(int64_t step, const MetricValues& values);
  bool stops() const { return stops_.load(); }  // the user wants the run to stop; from any thread
  void end();                                   // the run is over: answers the commands that are left

 private:
  struct Open {
    ControlQueue::Request request;
    int64_t step = 0;                         // checkpoint, evaluate: the step that the command waits for
    std::optional<ControlAnswer> evaluation;  // the answer, when the step is recorded
  };

  // Begins a command. Returns its answer if there is nothing to wait for.
  std::optional<ControlAnswer> begin(Open& open);
  std::optional<ControlAnswer> begin_checkpoint(Open& open);
  std::optional<ControlAnswer> begin_evaluation(Open& open);
  std::optional<ControlAnswer> answer_of(const Open& open) const;
  ControlAnswer answer_at_end(const Open& open) const;
  bool is_open(const std::string& command) const;
  std::string checkpoint_of(int64_t step) const;

  const std::filesystem::path run_;
  ControlQueue queue_;
  Controller& controller_;
  const bool can_evaluate_;
  std::vector<Open> open_;
  std::atomic<bool> stops_ = false;
};

}  // namespace bough
