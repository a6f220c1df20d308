#include "report/run_follower.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "base/file.h"
#include "report/html_text.h"
#include "report/progress_file.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMostProblems = 200;       // kinds of them
constexpr size_t kMostProblemBytes = 4000;  // of a message

constexpr std::string_view kSampleSuffix = ".jsonl.zst";

Json span_json(const TimelineSpan& span) {
  return Json::array({span.lane, span.what, span.begin, span.end});
}

}  // namespace

fs::path SampleFiles::path(const fs::path& run, int64_t number) const {
  return run / folder / str(prefix, number, kSampleSuffix);
}

std::vector<int64_t> SampleFiles::numbers(const fs::path& run) const {
  std::vector<int64_t> numbers;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(run / folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix) || !name.ends_with(kSampleSuffix)) continue;
    const size_t begin = std::string_view(prefix).size(), end = name.size() - kSampleSuffix.size();
    const Json number = Json::parse(name.substr(begin, end - begin), nullptr, /*allow_exceptions=*/false);
    if (number.is_number_integer()) numbers.push_back(number.get<int64_t>());
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

int64_t step_in_work(const fs::path& run) {
  const std::vector<int64_t> steps = kTrainedFiles.numbers(run);
  return steps.empty() ? 1 : steps.back() + 1;
}

bool LineTail::read(const std::function<void(std::string_view line)>& use) {
  struct stat status {};
  const bool exists = ::stat(path_.c_str(), &status) == 0;
  if (!exists || (inode_ != 0 && status.st_ino != inode_) || status.st_size < position_) {
    const bool had_lines = position_ > 0;
    inode_ = 0;
    position_ = 0;
    return !had_lines;
  }
  inode_ = status.st_ino;
  if (status.st_size == position_) return true;
  std::ifstream file(path_, std::ios::binary);
  file.seekg(position_);
  for (std::string line; std::getline(file, line) && !file.eof();) {
    use(line);
    position_ += std::ssize(line) + 1;
  }
  return true;
}

RunFollower::RunFollower(fs::path folder)
    : folder_(std::move(folder)),
      metrics_file_(folder_ / "metrics.jsonl"),
      timeline_file_(folder_ / "timeline.jsonl"),
      log_file_(folder_ / "log.txt") {
  poll();
}

std::vector<Json> RunFollower::poll() {
  std::vector<Json> events;
  Json spans = Json::array();
  bool has_problems = false;
  const bool is_continued =
      metrics_file_.read([&](std::string_view line) { take_metrics(line, events); }) &
      timeline_file_.read([&](std::string_view line) { take_span(line, spans); }) &
      log_file_.read([&](std::string_view line) { has_problems |= take_log_line(line); });
  if (!is_continued) {
    *this = RunFollower(fs::path(folder_));
    return {{{"kind", "reload"}}};
  }
  if (!spans.empty())
    events.push_back({{"kind", "timeline"}, {"spans", spans}, {"busy", busy_}, {"end", timeline_end_}});
  if (has_problems) events.push_back({{"kind", "problems"}, {"problems", problems_}});
  if (Json now = read_progress(); !now.is_null() && now != progress_)
    events.push_back({{"kind", "progress"}, {"progress", progress_ = std::move(now)}});
  if (Json now = list_steps(); now != steps_) events.push_back(steps_ = std::move(now));
  return events;
}

void RunFollower::take_metrics(std::string_view line, std::vector<Json>& events) {
  const Json record = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!record.is_object() || !record.contains("step") || !record["step"].is_number_integer()) return;
  last_step_ = record["step"].get<int64_t>();
  Json values = Json::object();
  for (const auto& [name, value] : record.items()) {
    if (name == "step" || !value.is_number()) continue;
    Curve& curve = curves_[name];
    curve.steps.push_back(last_step_);
    curve.values.push_back(value.get<double>());
    values[name] = value;
  }
  events.push_back({{"kind", "metrics"}, {"step", last_step_}, {"values", std::move(values)}});
}

void RunFollower::take_span(std::string_view line, Json& spans) {
  const auto span = parse_timeline_line(line);
  if (!span) return;
  spans.push_back(span_json(*span));
  busy_[span->lane][span->what] += span->end - span->begin;
  timeline_end_ = std::max(timeline_end_, span->end);
  spans_.push_back(*span);
  if (spans_.size() > kMostSpans) spans_.pop_front();
}

// A line is "2026-11-27 10:06:34.320 warning: text". Lines without a time continue the line before.
bool RunFollower::take_log_line(std::string_view line) {
  constexpr size_t kTime = 23;
  const bool has_time = line.size() > kTime + 2 && line[4] == '-' && line[10] == ' ' && line[kTime] == ' ';
  if (!has_time) {
    if (!is_problem_ || problems_.empty() || problems_.back()["count"] != 1) return is_problem_;
    auto& text = problems_.back()["text"].get_ref<std::string&>();
    if (text.size() + line.size() < kMostProblemBytes) text += "\n" + std::string(line);
    return true;
  }
  const std::string_view rest = line.substr(kTime + 1), level = rest.substr(0, rest.find(": "));
  is_problem_ = level != rest && (level == "warning" || level == "error" || level == "critical");
  if (!is_problem_) return false;
  const std::string_view text = rest.substr(level.size() + 2), time = line.substr(0, kTime - 4);
  const auto [known, is_new] = problem_of_.try_emplace(without_numbers(text), problems_.size());
  if (!is_new) {
    Json& problem = problems_[known->second];
    problem["last"] = time;
    problem["count"] = problem["count"].get<int64_t>() + 1;
  } else if (problems_.size() < kMostProblems) {
    problems_.push_back({{"level", level},
                         {"text", cut_text(text, kMostProblemBytes)},
                         {"count", 1},
                         {"first", time},
                         {"last", time}});
  } else {
    problem_of_.erase(known);
  }
  return true;
}

// Adds `is_alive`: whether the process that writes the run's files still exists. null if it ran on another
// machine.
Json RunFollower::read_progress() const {
  std::ifstream file(folder_ / "progress.json");
  Json progress = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!progress.is_object()) return nullptr;
  progress["is_alive"] = nullptr;
  const Json pid = progress.value("pid", Json());
  if (progress.value("host", Json()) == host_name() && pid.is_number_integer() && pid.get<int64_t>() > 0)
    progress["is_alive"] = ::kill(static_cast<pid_t>(pid.get<int64_t>()), 0) == 0 || errno == EPERM;
  return progress;
}

Json RunFollower::list_steps() const {
  const int64_t step = step_in_work(folder_);
  const size_t waiting = kWaitingFiles.numbers(folder_).size();
  std::error_code missing;
  const uintmax_t bytes = fs::file_size(kDroppedFiles.path(folder_, step), missing);
  Json open;
  if (waiting > 0 || !missing) open = {{"step", step}, {"waiting", waiting}, {"bytes", missing ? 0 : bytes}};
  std::vector<int64_t> steps;
  std::ranges::set_union(kTrainedFiles.numbers(folder_), kEvaluationFiles.numbers(folder_),
                         std::back_inserter(steps));
  return {{"kind", "steps"}, {"steps", std::move(steps)}, {"open", std::move(open)}};
}

Json RunFollower::snapshot() const {
  Json curves = Json::object(), spans = Json::array();
  for (const auto& [name, curve] : curves_) {
    const size_t count = curve.steps.size(), stride = (count + kMostPoints - 1) / kMostPoints;
    Json steps = Json::array(), values = Json::array();
    for (size_t i = 0; i < count; ++i) {
      if (i % stride != 0 && i + 1 != count) continue;
      steps.push_back(curve.steps[i]);
      values.push_back(curve.values[i]);
    }
    curves[name] = {{"steps", std::move(steps)}, {"values", std::move(values)}};
  }
  for (const TimelineSpan& span : spans_) spans.push_back(span_json(span));
  std::error_code ignored;
  const fs::path full = fs::weakly_canonical(folder_, ignored);  // "." has no file name
  return {{"title", str(full.parent_path().filename().string(), " / ", full.filename().string())},
          {"folder", full.string()},
          {"curves", std::move(curves)},
          {"spans", std::move(spans)},
          {"busy", busy_},
          {"end", timeline_end_},
          {"problems", problems_},
          {"progress", progress_},
          {"steps", steps_["steps"]},
          {"open", steps_["open"]}};
}

}  // namespace bough
