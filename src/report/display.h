// The live display of a run on stderr. If stderr is a terminal, it is a small table that is redrawn. If
// stderr is piped, it prints one plain line per training step, and the current activity if nothing was
// printed for ten seconds. With DisplayStyle::kSilent it prints nothing.
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

// Columns: step, reward, accuracy (of the last evaluation), length, compression, generated tokens/s, time,
// time left.
class LiveDisplay final : public MetricsSink {
 public:
  // The time left is the number of remaining steps up to total_steps, times the mean time of the last steps.
  // total_steps 0: unknown. `clock` must outlive the display.
  LiveDisplay(int64_t total_steps, const Clock& clock, DisplayStyle style = DisplayStyle::kAutomatic);
  ~LiveDisplay() override;  // leaves the table on the screen

  // Metrics that are missing are shown as "–". A record that has only evaluation metrics still updates the
  // accuracy.
  void write(int64_t step, const MetricValues& values) override;

  // For a resumed run: sets the accuracy of the last evaluation before the run was stopped.
  void set_accuracy(double accuracy) { accuracy_ = accuracy; }

  // Sets the activity between two training steps, such as "rollout 37/128". If stderr is piped, it is printed
  // only if the last line is at least kQuietSeconds old. So a long activity is not silent.
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
  Clock::Time last_line_;                           // if piped: when the last line was printed
  std::deque<double> step_seconds_;                 // times of the last steps, for the time left
  std::deque<std::vector<std::string>> last_rows_;  // rows of the table
  int64_t last_step_ = 0;
  std::optional<double> accuracy_;
  std::string activity_;
};

// Formats the settings that differ from their defaults as lines "  key: value" below `title`. These lines are
// cut to `columns`. The last line has no line end.
std::string changed_settings(const std::string& title, const std::vector<SettingRow>& rows, int columns);
// Prints changed_settings() to stderr. `all` says what has all settings. Lines are cut on a terminal only.
void print_changed_settings(const std::vector<SettingRow>& rows, const std::string& all);

}  // namespace bough
