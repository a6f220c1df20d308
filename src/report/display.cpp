#include "report/display.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/format.h"
#include "base/log.h"

namespace bough {
namespace {

constexpr size_t kNumRows = 8;  // table rows; the table must not fill a small terminal
// the estimate uses the last training steps only, because completions grow during a run
constexpr size_t kStepsForEstimate = 20;
constexpr int kBarColumns = 24;
constexpr std::array<const char*, 8> kHeads = {"step",        "reward",   "accuracy", "length",
                                               "compression", "tokens/s", "time",     "left"};
constexpr std::array<int, 8> kWidths = {11, 8, 9, 8, 12, 9, 9, 10};

std::optional<double> find(const MetricValues& values, const char* name) {
  const auto it = values.find(name);
  if (it == values.end() || !std::isfinite(it->second)) return {};
  return it->second;
}

std::string fixed(double value, int decimals) {
  std::array<char, 64> buffer;
  if (std::abs(value) >= 1e9) return format_significant(value);
  std::snprintf(buffer.data(), buffer.size(), "%.*f", decimals, value);
  return buffer.data();
}

std::string right_aligned(const std::string& text, int width) {
  return std::string(static_cast<size_t>(std::max(0, width - display_width(text))), ' ') + text;
}

std::string row_of(const auto& cells) {
  std::string out;
  for (size_t i = 0; i < kHeads.size(); ++i) out += right_aligned(cells[i], kWidths[i]);
  return out;
}

DisplayStyle resolve(DisplayStyle style) {
  if (style != DisplayStyle::kAutomatic) return style;
  return stderr_is_terminal() ? DisplayStyle::kTable : DisplayStyle::kLines;
}
}  // namespace

LiveDisplay::LiveDisplay(int64_t total_steps, const Clock& clock, DisplayStyle style)
    : total_steps_(total_steps),
      clock_(clock),
      style_(resolve(style)),
      start_(clock.now()),
      last_line_(start_) {}

LiveDisplay::~LiveDisplay() {
  if (style_ != DisplayStyle::kTable) return;
  show_status("");
  if (last_rows_.empty()) return;
  print_line(header());
  for (const auto& row : last_rows_) print_line(row_of(row));
}

std::string LiveDisplay::header() {
  return row_of(kHeads);
}

std::string LiveDisplay::time_left(int64_t step) const {
  if (step_seconds_.empty() || total_steps_ <= 0) return "–";
  double sum = 0;
  for (const double seconds : step_seconds_) sum += seconds;
  const int64_t remaining = std::max<int64_t>(0, total_steps_ - step);
  return format_duration(sum / static_cast<double>(step_seconds_.size()) * static_cast<double>(remaining));
}

std::vector<std::string> LiveDisplay::cells(int64_t step, const MetricValues& values) const {
  const auto number = [&](const char* name, int decimals, const char* unit = "") {
    const auto value = find(values, name);
    return value ? fixed(*value, decimals) + unit : std::string("–");
  };
  const auto speed = find(values, "perf/generated_tokens_per_s"), seconds = find(values, "time/step");
  return {total_steps_ > 0 ? str(step, "/", total_steps_) : str(step),
          number("reward/mean", 3),
          accuracy_ ? fixed(*accuracy_, 3) : "–",
          number("rollout/length_mean", 1),
          number("tree/compression", 2, "x"),
          speed ? format_count(*speed) : "–",
          seconds ? format_duration(*seconds) : "–",
          time_left(step)};
}

void LiveDisplay::write(int64_t step, const MetricValues& values) {
  if (const auto accuracy = find(values, "eval/avg_at_k")) accuracy_ = accuracy;
  if (const auto seconds = find(values, "time/step")) {
    step_seconds_.push_back(*seconds);
    if (step_seconds_.size() > kStepsForEstimate) step_seconds_.pop_front();
  }
  last_step_ = step;
  if (style_ == DisplayStyle::kLines) print(line(step, values));
  if (style_ != DisplayStyle::kTable) return;
  last_rows_.push_back(cells(step, values));
  if (last_rows_.size() > kNumRows) last_rows_.pop_front();
  refresh();
}

void LiveDisplay::set_activity(const std::string& activity) {
  activity_ = activity;
  if (style_ == DisplayStyle::kTable) refresh();
  const double quiet_seconds = std::chrono::duration<double>(clock_.now() - last_line_).count();
  if (style_ == DisplayStyle::kLines && !activity.empty() && quiet_seconds >= kQuietSeconds) print(activity);
}

void LiveDisplay::print(const std::string& line) {
  last_line_ = clock_.now();
  print_line(line);
}

void LiveDisplay::refresh() {
  show_status(table(terminal_columns() - 1));
}

std::string LiveDisplay::table(int columns) const {
  std::string out = fit(header(), columns) + "\n";
  for (const auto& row : last_rows_) out += fit(row_of(row), columns) + "\n";
  std::string bar;
  if (total_steps_ > 0) {
    const double fraction =
        std::clamp(static_cast<double>(last_step_) / static_cast<double>(total_steps_), 0.0, 1.0);
    for (int i = 0; i < kBarColumns; ++i) bar += i < static_cast<int>(fraction * kBarColumns) ? "━" : "─";
    bar += str("  ", static_cast<int>(fraction * 100), "%  ");
  }
  const double elapsed = std::chrono::duration<double>(clock_.now() - start_).count();
  bar += format_duration(elapsed) + " elapsed";
  if (!activity_.empty()) bar += "  " + activity_;
  return out + fit(bar, columns);
}

std::string LiveDisplay::line(int64_t step, const MetricValues& values) const {
  const auto texts = cells(step, values);
  std::string out = "step " + texts[0];
  for (size_t i = 1; i < texts.size(); ++i)
    if (texts[i] != "–") out += str("  ", kHeads[i], " ", texts[i]);
  if (const auto sparse = find(values, "eval_sparse/avg_at_k"))
    out += str("  accuracy with sparse attention ", fixed(*sparse, 3));
  return out;
}

std::string changed_settings(const std::string& title, const std::vector<SettingRow>& rows, int columns) {
  std::string out = title;
  for (const SettingRow& row : rows)
    if (!row.is_default) out += "\n" + fit(str("  ", row.key, ": ", row.value), columns);
  return out;
}

void print_changed_settings(const std::vector<SettingRow>& rows, const std::string& all) {
  const int columns = stderr_is_terminal() ? terminal_columns() : std::numeric_limits<int>::max();
  print_line(
      changed_settings(str("settings that differ from their defaults (all: ", all, "):"), rows, columns));
}

}  // namespace bough
