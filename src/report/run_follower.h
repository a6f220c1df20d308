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

// The files of one kind in a run's folder (run/trace_store.h): `prefix`, a number, ".jsonl.zst".
struct SampleFiles {
  const char *folder, *prefix;
  std::filesystem::path path(const std::filesystem::path& run, int64_t number) const;
  std::vector<int64_t> numbers(const std::filesystem::path& run) const;  // of the files that exist, ascending
};
inline constexpr SampleFiles kTrainedFiles = {"rollouts", "step_"}, kDroppedFiles = {"traces", "dropped_"},
                             kWaitingFiles = {"traces", "waiting_"},
                             kEvaluationFiles = {"traces", "evaluation_"};
// The step whose groups are in work: the one after the last trained step.
int64_t step_in_work(const std::filesystem::path& run);

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
  int64_t last_step() const { return last_step_; }
  struct Curve {
    std::vector<int64_t> steps;
    std::vector<double> values;
  };
  const std::map<std::string, Curve>& curves() const { return curves_; }
  const Json& progress() const { return progress_; }  // null: the run writes none
  // Warnings and errors of log.txt by kind: messages of one kind differ only in their numbers. Objects with
  // level, text (of the first), count, first, last (times).
  const Json& problems() const { return problems_; }

 private:
  void take_metrics(std::string_view line, std::vector<Json>& events);
  void take_span(std::string_view line, Json& spans);
  bool take_log_line(std::string_view line);  // true: a problem, or a part of one
  Json read_progress() const;                 // null: none, or it is being written
  // The event `steps`: those with a rollout file or an evaluation's samples, ascending. `open`: the step in
  // work, {"step", "waiting" (groups), "bytes" (of dropped groups)}; null: no groups.
  Json list_steps() const;

  std::filesystem::path folder_;
  LineTail metrics_file_, timeline_file_, log_file_;
  std::map<std::string, Curve> curves_;
  int64_t last_step_ = -1;
  std::deque<TimelineSpan> spans_;
  std::map<std::string, std::map<std::string, double>> busy_;  // seconds by lane and activity, all spans
  double timeline_end_ = 0;
  Json problems_ = Json::array();
  std::map<std::string, size_t> problem_of_;  // by the message without its numbers
  bool is_problem_ = false;                   // whether the last line of the log with a time is one
  Json progress_;                             // null: the run writes none
  Json steps_;                                // the last event of this kind
};

}  // namespace bough
