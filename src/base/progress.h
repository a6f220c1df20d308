// Shows the progress of a long task: a bar if stderr is a terminal, otherwise a line every 10 seconds. The
// log level has no influence; only ProgressStyle::kSilent shows nothing. Many threads may call advance().
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/mutex.h"

namespace bough {

enum class ProgressStyle { kAutomatic, kBar, kLines, kSilent };

class Progress {
 public:
  // `total`: number of `unit`s of the task; 0 if unknown (then no percentage and no remaining time is shown).
  Progress(std::string what, int64_t total, std::string unit = "",
           ProgressStyle style = ProgressStyle::kAutomatic);
  ~Progress();  // calls finish()
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Adds `count` units. `note` ("loss 0.31") is shown after the numbers until a call with another note.
  void advance(int64_t count = 1, const std::string& note = "");
  void finish();  // replaces the bar by one line with the number of units and the time

  // The line shown now: "sft  37% ━━━━━━━───── 370/1,000 steps  12.1/s  52 s left  loss 0.31".
  std::string line(double elapsed_seconds, int columns) const EXCLUDES(mutex_);

 private:
  void show_if_due(bool force) REQUIRES(mutex_);
  std::string line_locked(double elapsed_seconds, int columns) const REQUIRES(mutex_);

  const std::string what_;
  const int64_t total_;
  const std::string unit_;
  const ProgressStyle style_;
  const std::chrono::steady_clock::time_point start_;
  mutable Mutex mutex_;
  std::chrono::steady_clock::time_point last_shown_ GUARDED_BY(mutex_);
  int64_t done_ GUARDED_BY(mutex_) = 0;
  std::string note_ GUARDED_BY(mutex_);
  bool finished_ GUARDED_BY(mutex_) = false;
};

}  // namespace bough
