// progress.json in a run's folder: what the run does now, for readers outside of its process
// (run_follower.h).
//
//   {"state": "running" | "finished" | "stopped" | "failed", "error": text, "activity": text, "since": time,
//    "step": N, "total_steps": N (0: not known), "started": time, "pid": N, "host": name,
//    "threads": {"engine": {"doing": "generate" | ... | "" (waits), "since": time}, ...},
//    "queue": {"running": N, "awaiting": N, "buffered": N, "training": N, "trained": N,
//              "dropped": {reason: N}}}
//
// `queue` counts groups (control/controller.h): in generation, waiting for rewards, scored, in training;
// trained and dropped since the process began.
// Times are seconds since 1970. `since` is the time at which the activity began: changes of numbers only,
// such as "rollout 3/16" to "rollout 4/16", do not count. The file is written in place, at most once a second
// while the activity changes, so a reader can see an incomplete one. Failed writes are ignored: the file is
// only for display.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/json.h"

namespace bough {

// "rollout 3/16" and "rollout 12/16" give the same text.
std::string without_numbers(std::string_view text);

class ProgressFile {
 public:
  // `clock` must outlive this object.
  ProgressFile(std::filesystem::path path, int64_t total_steps, const Clock& clock);

  // Call it again and again while the activity lasts: an activity that came too soon after a write is written
  // by a later call.
  void set_activity(const std::string& activity);
  void set_step(int64_t step);
  void set_queue(Json queue);
  // Thread and what it does; "": it waits.
  void set_threads(const std::vector<std::pair<std::string, std::string>>& doing);
  // The run ends. state: finished, stopped or failed; `error` says why it failed.
  void end(const std::string& state, const std::string& error = "");

 private:
  void write_if_due();
  void write();

  const std::filesystem::path path_;
  const Clock& clock_;
  Clock::Time last_write_;
  Json progress_;
  bool is_written_ = false;
};

}  // namespace bough
