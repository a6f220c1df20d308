#include "report/run_follower.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <fstream>
#include <iterator>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "report/html_text.h"
#include "report/progress_file.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMostProblems = 200;       // kinds of them
constexpr size_t kMostProblemBytes = 4000;  // of a message
constexpr size_t kReadBytes = size_t{1} << 20;

constexpr std::string_view kRolloutsPrefix = "step_", kDroppedPrefix = "dropped_",
                           kWaitingPrefix = "waiting_", kEvaluationPrefix = "evaluation_",
                           kRolloutsSuffix = ".jsonl.zst";

// Returns 7 for "step_7.jsonl.zst" with the prefix "step_".
std::optional<int64_t> number_of(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix) || !name.ends_with(kRolloutsSuffix)) return {};
  name = name.substr(prefix.size(), name.size() - prefix.size() - kRolloutsSuffix.size());
  int64_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (error != std::errc() || end != name.data() + name.size()) return {};
  return number;
}

Json span_json(const TimelineSpan& span) {
  return Json::array({span.lane, span.what, span.begin, span.end});
}

}  // namespace

fs::path rollouts_of_step(const fs::path& folder, int64_t step) {
  return folder / "rollouts" / str(kRolloutsPrefix, step, kRolloutsSuffix);
}

fs::path dropped_in_step(const fs::path& folder, int64_t step) {
  return folder / "traces" / str(kDroppedPrefix, step, kRolloutsSuffix);
}

fs::path waiting_group(const fs::path& folder, int64_t number) {
  return folder / "traces" / str(kWaitingPrefix, number, kRolloutsSuffix);
}

fs::path evaluation_of_step(const fs::path& folder, int64_t step) {
  return folder / "traces" / str(kEvaluationPrefix, step, kRolloutsSuffix);
}

std::vector<int64_t> list_evaluated_steps(const fs::path& folder) {
  return list_numbers(folder / "traces", kEvaluationPrefix);
}

std::vector<int64_t> list_numbers(const fs::path& folder, std::string_view prefix) {
  std::vector<int64_t> numbers;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (const auto number = number_of(entry.path().filename().string(), prefix)) numbers.push_back(*number);
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

std::vector<int64_t> list_rollout_steps(const fs::path& folder) {
  return list_numbers(folder / "rollouts", kRolloutsPrefix);
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
  std::string text, chunk(kReadBytes, '\0');
  while (file.read(chunk.data(), std::ssize(chunk)), file.gcount() > 0) {
    text.append(chunk.data(), static_cast<size_t>(file.gcount()));
    size_t begin = 0;
    for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
      use(std::string_view(text).substr(begin, end - begin));
    position_ += static_cast<int64_t>(begin);
    text.erase(0, begin);
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

void RunFollower::clear() {
  const fs::path folder = folder_;
  *this = RunFollower(folder);
}

std::vector<Json> RunFollower::poll() {
  std::vector<Json> events;
  Json spans = Json::array();
  const size_t num_problems = problems_.size();
  bool has_log_lines = false;
  const bool is_continued = metrics_file_.read([&](std::string_view line) { take_metrics(line, events); }) &
                            timeline_file_.read([&](std::string_view line) {
                              const auto span = parse_timeline_line(line);
                              if (!span) return;
                              spans.push_back(span_json(*span));
                              busy_[span->lane][span->what] += span->end - span->begin;
                              timeline_end_ = std::max(timeline_end_, span->end);
                              spans_.push_back(*span);
                              if (spans_.size() > kMostSpans) spans_.pop_front();
                            }) &
                            log_file_.read([&](std::string_view line) {
                              take_log_line(line);
                              has_log_lines = has_log_lines || is_problem_;
                            });
  if (!is_continued) {
    clear();
    return {{{"kind", "reload"}}};
  }
  if (!spans.empty())
    events.push_back({{"kind", "timeline"}, {"spans", spans}, {"busy", busy_}, {"end", timeline_end_}});
  if (has_log_lines || problems_.size() != num_problems)
    events.push_back({{"kind", "problems"}, {"problems", problems()}});
  if (read_progress()) events.push_back({{"kind", "progress"}, {"progress", progress_}});
  if (list_steps()) events.push_back({{"kind", "steps"}, {"steps", steps_}, {"open", open_}});
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
    last_values_[name] = value.get<double>();
    values[name] = value;
  }
  events.push_back({{"kind", "metrics"}, {"step", last_step_}, {"values", std::move(values)}});
}

// A line is "2026-11-27 10:06:34.320 warning: text". Lines without a time continue the line before.
void RunFollower::take_log_line(std::string_view line) {
  constexpr size_t kTime = 23;
  const bool has_time = line.size() > kTime + 2 && line[4] == '-' && line[10] == ' ' && line[kTime] == ' ';
  if (!has_time) {
    if (is_problem_ && !problems_.empty() && problems_.back().count == 1 &&
        problems_.back().text.size() + line.size() < kMostProblemBytes)
      problems_.back().text += "\n" + std::string(line);
    return;
  }
  is_problem_ = false;
  const std::string_view rest = line.substr(kTime + 1);
  const size_t colon = rest.find(": ");
  if (colon == std::string_view::npos) return;
  const std::string_view level = rest.substr(0, colon), text = rest.substr(colon + 2);
  if (level != "warning" && level != "error" && level != "critical") return;
  is_problem_ = true;
  const std::string time(line.substr(0, kTime - 4));
  const auto [known, is_new] = problem_of_.try_emplace(without_numbers(text), problems_.size());
  if (!is_new) {
    Problem& problem = problems_[known->second];
    problem.last = time;
    ++problem.count;
  } else if (problems_.size() < kMostProblems) {
    problems_.push_back({std::string(level), cut_text(text, kMostProblemBytes), time, time, 1});
  } else {
    problem_of_.erase(known);
  }
}

// Adds `is_alive`: whether the process that writes the run's files still exists. null if it ran on another
// machine.
bool RunFollower::read_progress() {
  std::ifstream file(folder_ / "progress.json");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  Json progress = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!progress.is_object()) return false;  // none, or it is being written
  progress["is_alive"] = nullptr;
  const Json pid = progress.value("pid", Json());
  if (progress.value("host", Json()) == host_name() && pid.is_number_integer() && pid.get<int64_t>() > 0)
    progress["is_alive"] = ::kill(static_cast<pid_t>(pid.get<int64_t>()), 0) == 0 || errno == EPERM;
  if (progress == progress_) return false;
  progress_ = std::move(progress);
  return true;
}

bool RunFollower::list_steps() {
  std::vector<int64_t> steps = list_rollout_steps(folder_);
  const size_t waiting = list_numbers(folder_ / "traces", kWaitingPrefix).size();
  const int64_t step = steps.empty() ? 1 : steps.back() + 1;
  std::error_code missing;
  const uintmax_t bytes = fs::file_size(dropped_in_step(folder_, step), missing);
  Json open;
  if (waiting > 0 || !missing) open = {{"step", step}, {"waiting", waiting}, {"bytes", missing ? 0 : bytes}};
  std::vector<int64_t> all;
  std::ranges::set_union(steps, list_evaluated_steps(folder_), std::back_inserter(all));
  steps = std::move(all);
  if (steps == steps_ && open == open_) return false;
  steps_ = std::move(steps);
  open_ = std::move(open);
  return true;
}

Json RunFollower::problems() const {
  Json list = Json::array();
  for (const Problem& problem : problems_)
    list.push_back({{"level", problem.level},
                    {"text", problem.text},
                    {"count", problem.count},
                    {"first", problem.first},
                    {"last", problem.last}});
  return list;
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
          {"problems", problems()},
          {"progress", progress_},
          {"steps", steps_},
          {"open", open_}};
}

}  // namespace bough
