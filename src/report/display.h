// What a person watches while a run goes on, on stderr: a small table that refreshes itself on a terminal,
// one plain line a step when piped (and one for what is going on where nothing was printed for ten seconds),
// nothing when silent.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/settings.h"
#include "report/metrics.h"

namespace bough {

enum class DisplayStyle { kAutomatic, kTable, kLines, kSilent };

// Columns: step, reward, accuracy (the last evaluation), length, compression, tokens/s (generated), time,
// time left.
class LiveDisplay final : public MetricsSink {
 public:
  // Steps run from first_step to total_steps, both counted; time left is that of the mean of the last steps.
  LiveDisplay(int64_t total_steps, const Clock& clock, DisplayStyle style = DisplayStyle::kAutomatic);
  ~LiveDisplay() override;  // leaves the table on the screen

  // Values that a step does not have are shown as "–". A step of evaluation only (no reward) updates the
  // accuracy.
  void write(int64_t step, const MetricValues& values) override;

  // To be told of a run that goes on: its last evaluation.
  void set_accuracy(double accuracy) { accuracy_ = accuracy; }

  // What is going on between two steps: "rollout 37/128". Piped, it is printed only where the last line is
  // kQuietSeconds old, so that long work never stands silent.
  void set_activity(const std::string& activity);
  static constexpr double kQuietSeconds = 10;

  std::string table(int columns) const;  // the block on a terminal
  static std::string header();
  std::string line(int64_t step, const MetricValues& values) const;  // the line when piped

 private:
  std::vector<std::string> cells(int64_t step, const MetricValues& values) const;
  std::string time_left(int64_t step) const;
  void refresh();
  void print(const std::string& line);

  const int64_t total_steps_;
  const Clock& clock_;
  const DisplayStyle style_;
  const Clock::Time start_;
  Clock::Time last_line_;                           // when a line was printed last, piped
  std::deque<double> step_seconds_;                 // of the last steps, for the time left
  std::deque<std::vector<std::string>> last_rows_;  // of the table
  int64_t last_step_ = 0;
  std::optional<double> accuracy_;
  std::string activity_;
};

// Every setting as a line "key value", those that differ from their defaults marked with "*", long values cut
// to `columns`.
std::string settings_table(const std::vector<SettingRow>& rows, int columns);

}  // namespace bough
