#include "run/run_commands.h"

#include <algorithm>

#include "base/error.h"
#include "base/format.h"
#include "base/log.h"

namespace bough {

namespace {

ControlAnswer refused(std::string text) {
  return {.done = false, .text = std::move(text)};
}

ControlAnswer done(std::string text) {
  return {.done = true, .text = std::move(text)};
}

}  // namespace

void RunCommands::follow() {
  for (ControlQueue::Request& request : queue_.take()) {
    log_info(str("command of the user: ", quoted(request.command)));
    Open open{.request = std::move(request)};
    if (const auto answer = begin(open)) queue_.answer(open.request.id, *answer);
    else open_.push_back(std::move(open));
  }
  std::erase_if(open_, [&](const Open& open) {
    const auto answer = answer_of(open);
    if (answer) queue_.answer(open.request.id, *answer);
    return answer.has_value();
  });
}

bool RunCommands::is_open(const std::string& command) const {
  return std::any_of(open_.begin(), open_.end(),
                     [&](const Open& open) { return open.request.command == command; });
}

std::optional<ControlAnswer> RunCommands::begin(Open& open) {
  const std::string& command = open.request.command;
  if (controller_.is_stopping() || stops()) return refused("the run is stopping");
  if (command == "checkpoint") return begin_checkpoint(open);
  if (command == "evaluate") return begin_evaluation(open);
  if (command == "pause") {
    if (controller_.is_pausing())
      return refused(controller_.is_paused() ? "the run is paused already" : "the run is pausing already");
    controller_.on(PauseRequested{});
    return {};
  }
  if (command == "resume") {
    if (!controller_.is_pausing()) return refused("the run is not paused");
    controller_.on(ResumeRequested{});
    return done(str("continues after step ", controller_.num_steps()));
  }
  if (command != "stop") return refused(str("no such command: ", quoted(command)));
  stops_.store(true);
  return {};
}

std::optional<ControlAnswer> RunCommands::begin_checkpoint(Open& open) {
  const int64_t last = controller_.num_steps();
  if (is_open("checkpoint")) return refused("a checkpoint is requested already");
  if (controller_.is_paused() && controller_.checkpointed_step() == last)
    return refused(str("step ", last, " has a checkpoint already: ", checkpoint_of(last)));
  open.step = controller_.is_paused() ? last : last + 1;
  controller_.on(CheckpointRequested{});
  return {};
}

std::optional<ControlAnswer> RunCommands::begin_evaluation(Open& open) {
  if (!can_evaluate_) return refused("there is no validation set (valid_dataset.path)");
  if (is_open("evaluate")) return refused("an evaluation is requested already");
  if (controller_.is_pausing())
    return refused("the run is paused, and an evaluation follows a step: resume first");
  open.step = controller_.num_steps() + 1;
  controller_.on(EvaluationRequested{});
  return {};
}

std::string RunCommands::checkpoint_of(int64_t step) const {
  return (run_ / "checkpoints" / str("step_", step)).string();
}

std::optional<ControlAnswer> RunCommands::answer_of(const Open& open) const {
  const std::string& command = open.request.command;
  if (command == "pause") {
    if (controller_.is_paused()) return done(str("paused after step ", controller_.num_steps()));
    if (!controller_.is_pausing()) return refused("the pause ended before it began");
  } else if (command == "checkpoint") {
    const int64_t step = controller_.checkpointed_step();
    if (step >= open.step) return done(str("checkpoint of step ", step, ": ", checkpoint_of(step)));
  }
  return open.evaluation;
}

ControlAnswer RunCommands::answer_at_end(const Open& open) const {
  if (const auto answer = answer_of(open)) return *answer;
  const int64_t last = controller_.num_steps();
  if (!controller_.is_stopping()) return refused(str("the run has finished: step ", last, " was its last"));
  const std::string stopped = str("stopped after step ", last);
  if (open.request.command != "stop") return refused(stopped);
  return done(
      str(stopped, "; checkpoint: ", checkpoint_of(last), ". The command that started the run continues it"));
}

void RunCommands::on_record(int64_t step, const MetricValues& values) {
  const auto accuracy = values.find("eval/avg_at_k");
  for (Open& open : open_) {
    if (open.request.command != "evaluate" || open.step != step) continue;
    open.evaluation =
        accuracy == values.end()
            ? refused(str("step ", step, " has no result of an evaluation; log.txt says why"))
            : done(str("evaluation of step ", step, ": avg@k ", format_significant(accuracy->second, 4)));
  }
}

void RunCommands::end() {
  for (const Open& open : open_) queue_.answer(open.request.id, answer_at_end(open));
  open_.clear();
}

}  // namespace bough
