// The activity of each thread of a run over time. A lane is one thread, a span is a named
// interval in it. Timeline is thread-safe.
#pragma once

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"

namespace bough {

struct TimelineSpan {
  std::string lane;           // engine, trainer, rewards, writer
  std::string what;           // generate, train, publish, ...
  double begin = 0, end = 0;  // seconds since the run began
};

// Returns a line of timeline.jsonl, without its line break: ["engine","generate",0.5,1.25].
std::string to_line(const TimelineSpan& span);
// Returns nullopt if the line is incomplete or damaged.
std::optional<TimelineSpan> parse_timeline_line(std::string_view line);
// Reads timeline.jsonl. Returns no spans if the file is missing. Incomplete and damaged lines are skipped.
std::vector<TimelineSpan> read_timeline(const std::filesystem::path& path);

// Collects spans. If a span follows one of the same name in its lane within kMergeSeconds, the two become one
// span. An engine has many short passes, and readers look for the times when it did not compute.
class Timeline {
 public:
  static constexpr double kMergeSeconds = 0.02;

  explicit Timeline(Clock::Time start) : start_(start) {}

  void add(const std::string& lane, const std::string& what, Clock::Time begin, Clock::Time end) {
    const TimelineSpan span{lane, what, seconds_between(start_, begin), seconds_between(start_, end)};
    const MutexLock lock(mutex_);
    const auto last = open_.find(lane);
    if (last != open_.end()) {
      if (last->second.what == what && span.begin - last->second.end <= kMergeSeconds) {
        last->second.end = std::max(last->second.end, span.end);
        return;
      }
      done_.push_back(last->second);
    }
    open_[lane] = span;
  }

  // Returns and removes the finished spans, ordered by end time within each lane. A later add() could extend
  // the last span of a lane. It is returned only if `all` is true.
  std::vector<TimelineSpan> take(bool all = false) {
    const MutexLock lock(mutex_);
    std::vector<TimelineSpan> spans = std::move(done_);
    done_.clear();
    if (!all) return spans;
    for (auto& [lane, span] : open_) spans.push_back(std::move(span));
    open_.clear();
    return spans;
  }

 private:
  const Clock::Time start_;
  Mutex mutex_;
  std::map<std::string, TimelineSpan> open_ GUARDED_BY(mutex_);
  std::vector<TimelineSpan> done_ GUARDED_BY(mutex_);
};

}  // namespace bough
