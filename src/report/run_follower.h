// Follows the files of a run's folder: what they hold now, and what is added while the run works. The page of
// a run (run_page.h) is fed by it, live and saved. Files are only read. Damaged lines are skipped.
//
// Files: metrics.jsonl, timeline.jsonl, log.txt, progress.json, and the names in rollouts/ and traces/.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "report/timeline.h"

namespace bough {

// The rollout file of a step, rollouts/step_N.jsonl.zst, and the steps that have one, ascending.
std::filesystem::path rollouts_of_step(const std::filesystem::path& folder, int64_t step);
std::vector<int64_t> list_rollout_steps(const std::filesystem::path& folder);
// The groups that are in no step's file (run/trace_store.h): traces/dropped_N.jsonl.zst of a step, and
// traces/waiting_N.jsonl.zst, one group each.
std::filesystem::path dropped_in_step(const std::filesystem::path& folder, int64_t step);
std::filesystem::path waiting_group(const std::filesystem::path& folder, int64_t number);
// traces/evaluation_N.jsonl.zst: samples of the weights after step N; and the steps that have one, ascending.
std::filesystem::path evaluation_of_step(const std::filesystem::path& folder, int64_t step);
std::vector<int64_t> list_evaluated_steps(const std::filesystem::path& folder);
// The numbers N of the files FOLDER/<prefix>N.jsonl.zst, ascending.
std::vector<int64_t> list_numbers(const std::filesystem::path& folder, std::string_view prefix);

// Reads the complete lines that were appended to a file since the last call.
class LineTail {
 public:
  explicit LineTail(std::filesystem::path path) : path_(std::move(path)) {}
  // Calls `use` for each new line, without its line break. Returns false if the file was replaced or became
  // shorter since the last call. The next call then begins at the file's start. A missing file has no lines.
  bool read(const std::function<void(std::string_view line)>& use);

 private:
  std::filesystem::path path_;
  ino_t inode_ = 0;
  int64_t position_ = 0;  // after the last complete line
};

class RunFollower {
 public:
  // The points that snapshot() gives of each curve at most. It takes every n-th point, and always the last
  // one.
  static constexpr size_t kMostPoints = 4000;
  static constexpr size_t kMostSpans = 1500;  // of the timeline: the last ones

  explicit RunFollower(std::filesystem::path folder);

  // Reads what is new. Returns it as events for the page, each an object with `kind`: metrics, timeline,
  // problems, progress, steps (also if a group of the step in work was scored). The event `reload` stands for
  // all others: a file was cut (the run was resumed), so the page must take a new snapshot.
  std::vector<Json> poll();

  // Everything, in one object. Keys as in src/report/web/store.js.
  Json snapshot() const;

  const std::filesystem::path& folder() const { return folder_; }
  // Steps with a rollout file or an evaluation's samples, ascending.
  const std::vector<int64_t>& steps() const { return steps_; }
  const std::map<std::string, double>& last_values() const { return last_values_; }
  int64_t last_step() const { return last_step_; }
  struct Curve {
    std::vector<int64_t> steps;
    std::vector<double> values;
  };
  const std::map<std::string, Curve>& curves() const { return curves_; }
  const Json& progress() const { return progress_; }  // null: the run writes none
  // Warnings and errors of log.txt by kind: objects with level, text (of the first), count, first, last
  // (times).
  Json problems() const;

 private:
  // Lines of log.txt of level warning and above that differ only in their numbers.
  struct Problem {
    std::string level, text, first, last;  // text: the first message; first and last: times
    int64_t count = 0;
  };

  void clear();
  void take_metrics(std::string_view line, std::vector<Json>& events);
  void take_log_line(std::string_view line);
  bool read_progress();  // true: it changed
  bool list_steps();     // true: they, or the groups of the step in work, changed

  std::filesystem::path folder_;
  LineTail metrics_file_, timeline_file_, log_file_;
  std::map<std::string, Curve> curves_;
  std::map<std::string, double> last_values_;
  int64_t last_step_ = -1;
  std::deque<TimelineSpan> spans_;
  std::map<std::string, std::map<std::string, double>> busy_;  // seconds by lane and activity, all spans
  double timeline_end_ = 0;
  std::vector<Problem> problems_;
  std::map<std::string, size_t> problem_of_;  // by the message without its numbers
  bool is_problem_ = false;                   // whether the last line of the log with a time is one
  Json progress_;                             // null: the run writes none
  std::vector<int64_t> steps_;
  Json open_;  // the step in work: {"step", "waiting" (groups), "bytes" (of dropped groups)}; null: no groups
};

}  // namespace bough
