// The live display of a run on stderr. On a terminal it is a small table that refreshes itself. When piped,
// it prints one plain line per step, and the current activity if nothing was printed for ten seconds. When
// silent, it prints nothing.
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

// Columns: step, reward, accuracy (last evaluation), length, compression, tokens/s (generated), time, left.
class LiveDisplay final : public MetricsSink {
 public:
  // Time left assumes that the remaining steps up to total_steps take the mean time of the last steps.
  // total_steps 0: unknown. `clock` must outlive the display.
  LiveDisplay(int64_t total_steps, const Clock& clock, DisplayStyle style = DisplayStyle::kAutomatic);
  ~LiveDisplay() override;  // leaves the table on the screen

  // Missing values are shown as "–". A record that has only evaluation metrics still updates the accuracy.
  void write(int64_t step, const MetricValues& values) override;

  // For a resumed run: sets the accuracy of its last evaluation.
  void set_accuracy(double accuracy) { accuracy_ = accuracy; }

  // Sets the activity between two steps, such as "rollout 37/128". When piped, it is printed only if the last
  // line is at least kQuietSeconds old, so that long work is never silent.
  void set_activity(const std::string& activity);
  static constexpr double kQuietSeconds = 10;

  std::string table(int columns) const;  // the text on a terminal, at most `columns` wide
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
  Clock::Time last_line_;                           // when the last line was printed, if piped
  std::deque<double> step_seconds_;                 // times of the last steps, for the time left
  std::deque<std::vector<std::string>> last_rows_;  // rows of the table
  int64_t last_step_ = 0;
  std::optional<double> accuracy_;
  std::string activity_;
};

// Formats every setting as a line "key value". Settings that differ from their defaults are marked with "*".
// Lines are cut to `columns`.
std::string settings_table(const std::vector<SettingRow>& rows, int columns);

}  // namespace bough
