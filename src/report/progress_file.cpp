#include "report/progress_file.h"

#include <unistd.h>

#include <fstream>
#include <utility>

#include "base/clock.h"
#include "base/file.h"

namespace bough {

namespace {

constexpr double kLeastSeconds = 1;  // between two writes because of an activity

}  // namespace

std::string without_numbers(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool is_digit = c >= '0' && c <= '9';
    if (!is_digit) out += c;
    else if (out.empty() || out.back() != '#') out += '#';
  }
  return out;
}

ProgressFile::ProgressFile(std::filesystem::path path, int64_t total_steps, const Clock& clock)
    : path_(std::move(path)), clock_(clock), last_write_(clock.now()) {
  const double now = seconds_since_1970();
  progress_ = {{"state", "running"}, {"activity", ""},     {"since", now},
               {"step", 0},          {"started", now},     {"total_steps", total_steps},
               {"pid", getpid()},    {"host", host_name()}};
  write();
}

void ProgressFile::set_activity(const std::string& activity) {
  const std::string before = progress_["activity"].get<std::string>();
  if (without_numbers(activity) != without_numbers(before)) progress_["since"] = seconds_since_1970();
  if (activity != before) is_written_ = false;
  progress_["activity"] = activity;
  write_if_due();
}

void ProgressFile::set_step(int64_t step) {
  progress_["step"] = step;
  is_written_ = false;
  write_if_due();
}

void ProgressFile::set_queue(Json queue) {
  if (progress_.value("queue", Json()) == queue) return;
  progress_["queue"] = std::move(queue);
  is_written_ = false;
  write_if_due();
}

void ProgressFile::set_threads(const std::vector<std::pair<std::string, std::string>>& doing) {
  for (const auto& [thread, what] : doing) {
    Json& known = progress_["threads"][thread];
    if (known.is_object() && known["doing"] == what) continue;
    known = {{"doing", what}, {"since", seconds_since_1970()}};
    is_written_ = false;
  }
  write_if_due();
}

void ProgressFile::write_if_due() {
  if (!is_written_ && seconds_between(last_write_, clock_.now()) >= kLeastSeconds) write();
}

void ProgressFile::end(const std::string& state, const std::string& error) {
  progress_["state"] = state;
  progress_["activity"] = "";
  progress_["since"] = seconds_since_1970();
  if (!error.empty()) progress_["error"] = error;
  write();
}

void ProgressFile::write() {
  last_write_ = clock_.now();
  is_written_ = true;
  std::ofstream(path_, std::ios::trunc) << dump_line(progress_) + "\n";
}

}  // namespace bough
