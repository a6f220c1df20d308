#include "base/progress.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/format.h"
#include "base/log.h"

namespace bough {
namespace {
using WallClock = std::chrono::steady_clock;
// Ten updates of a bar per second look smooth and cost little. A piped log gets one line every ten seconds.
constexpr auto kBarInterval = std::chrono::milliseconds(100);
constexpr auto kLineInterval = std::chrono::seconds(10);
constexpr int kBarColumns = 20;

ProgressStyle resolve(ProgressStyle style) {
  if (style != ProgressStyle::kAutomatic) return style;
  return stderr_is_terminal() ? ProgressStyle::kBar : ProgressStyle::kLines;
}
}  // namespace

Progress::Progress(std::string what, int64_t total, std::string unit, ProgressStyle style)
    : what_(std::move(what)),
      total_(total),
      unit_(std::move(unit)),
      style_(resolve(style)),
      start_(WallClock::now()),
      last_shown_(start_) {}

Progress::~Progress() {
  finish();
}

void Progress::advance(int64_t count, const std::string& note) {
  const MutexLock lock(mutex_);
  done_ += count;
  if (!note.empty()) note_ = note;
  show_if_due(false);
}

void Progress::finish() {
  const MutexLock lock(mutex_);
  if (std::exchange(finished_, true)) return;
  show_if_due(true);
}

void Progress::show_if_due(bool force) {
  if (style_ == ProgressStyle::kSilent) return;
  const auto now = WallClock::now();
  const bool bar = style_ == ProgressStyle::kBar;
  if (!force && (finished_ || now - last_shown_ < (bar ? WallClock::duration(kBarInterval) : kLineInterval)))
    return;
  last_shown_ = now;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  if (finished_) {
    if (bar) show_status("");
    std::string text = str(what_, ": ", format_thousands(done_), unit_.empty() ? "" : " ", unit_, " in ",
                           format_duration(elapsed));
    if (!note_.empty()) text += "  " + note_;
    print_line(text);
  } else if (bar) {
    show_status(line_locked(elapsed, terminal_columns() - 1));
  } else {
    print_line(line_locked(elapsed, 200));
  }
}

std::string Progress::line(double elapsed_seconds, int columns) const {
  const MutexLock lock(mutex_);
  return line_locked(elapsed_seconds, columns);
}

std::string Progress::line_locked(double elapsed_seconds, int columns) const {
  const bool known = total_ > 0;
  const double fraction =
      known ? std::clamp(static_cast<double>(done_) / static_cast<double>(total_), 0.0, 1.0) : 0;
  std::string out = what_ + "  ";
  if (known) {
    out += str(static_cast<int>(fraction * 100), "% ");
    if (style_ == ProgressStyle::kBar) {
      const int filled = static_cast<int>(fraction * kBarColumns);
      for (int i = 0; i < kBarColumns; ++i) out += i < filled ? "━" : "─";
      out += " ";
    }
  }
  out += format_thousands(done_) + (known ? "/" + format_thousands(total_) : "");
  if (!unit_.empty()) out += " " + unit_;
  if (elapsed_seconds > 0 && done_ > 0) {
    const double rate = static_cast<double>(done_) / elapsed_seconds;
    out += "  " + format_count(rate) + "/s";
    if (known && done_ < total_)
      out += "  " + format_duration(static_cast<double>(total_ - done_) / rate) + " left";
  }
  if (!note_.empty()) out += "  " + note_;
  return fit(out, columns);
}

}  // namespace bough
