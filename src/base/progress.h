// Shows the progress of long work: a bar if stderr is a terminal, otherwise a line every 10 seconds. The log
// level does not matter; only ProgressStyle::kSilent shows nothing. Many threads may call advance().
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/mutex.h"

namespace bough {

enum class ProgressStyle { kAutomatic, kBar, kLines, kSilent };

class Progress {
 public:
  // `total`: amount of work in `unit`s; 0 if unknown (then no percentage and no time left is shown).
  Progress(std::string what, int64_t total, std::string unit = "",
           ProgressStyle style = ProgressStyle::kAutomatic);
  ~Progress();  // calls finish()
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `note` is shown after the numbers until the next note ("loss 0.31").
  void advance(int64_t count = 1, const std::string& note = "");
  void finish();  // replaces the bar by one line with the amount of work and the time

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
