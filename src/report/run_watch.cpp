#include "report/run_watch.h"

#include <algorithm>
#include <array>
#include <iomanip>
#include <numeric>
#include <span>
#include <sstream>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/format.h"
#include "report/html_text.h"

namespace bough {

namespace {

constexpr size_t kNumBlocks = 40;  // of a curve
constexpr size_t kStepsForTimeLeft = 20;
constexpr size_t kMostFailures = 4;

constexpr std::array<std::pair<const char*, const char*>, 12> kWatched = {
    {{"reward/mean", "reward"},
     {"eval/avg_at_k", "accuracy"},
     {"rollout/length_mean", "length"},
     {"rollout/truncated_fraction", "truncated"},
     {"loss/entropy", "entropy"},
     {"loss/kl", "KL"},
     {"policy/clip_fraction", "clipped"},
     {"mismatch/logprob_abs_diff", "mismatch"},
     {"staleness/mean", "staleness"},
     {"optim/grad_norm", "gradient norm"},
     {"time/step", "seconds a step"},
     {"perf/generated_tokens_per_s", "tokens/s"}}};

double mean(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// One block for each of at most kNumBlocks means of equally many values.
std::string blocks(std::span<const double> values) {
  constexpr std::array<const char*, 8> kBlocks = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const size_t count = std::min(kNumBlocks, values.size());
  std::vector<double> means;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = i * values.size() / count, end = (i + 1) * values.size() / count;
    means.push_back(mean(values.subspan(begin, end - begin)));
  }
  const auto [low, high] = std::ranges::minmax(means);
  std::string out;
  for (const double value : means) {
    const double height = high > low ? (value - low) / (high - low) : 0.5;
    out += kBlocks[static_cast<size_t>(height * (kBlocks.size() - 1) + 0.5)];
  }
  return out;
}

// `progress` is an object, and empty if the run writes none.
Json progress_of(const RunFollower& run) {
  return run.progress().is_object() ? run.progress() : Json::object();
}

std::string time_since(const Json& one) {
  const double now = seconds_since_1970();
  return format_duration(std::max(0.0, now - one.value("since", now)));
}

std::string state_text(const Json& progress) {
  const std::string state = progress.value("state", "");
  if (state.empty()) return "no progress.json: the run has not started, or an older version wrote it";
  if (state == "failed") return "failed: " + progress.value("error", "");
  if (state != "running") return state;
  if (progress.value("is_alive", Json()) == false) return "gone: the process ended without saying why";
  return progress.value("activity", "") + ", for " + time_since(progress);
}

}  // namespace

bool has_ended(const RunFollower& run) {
  const Json progress = progress_of(run);
  const std::string state = progress.value("state", "");
  return !state.empty() && (state != "running" || progress.value("is_alive", Json()) == false);
}

std::string watch_text(const RunFollower& run, int columns) {
  const Json progress = progress_of(run);
  const auto& curves = run.curves();
  const int64_t total = progress.value("total_steps", int64_t{0}), left = total - run.last_step();
  std::string out = str(run.folder().string(), "\n", state_text(progress), "\nstep ",
                        std::max<int64_t>(0, run.last_step()));
  if (total > 0) out += str(" of ", total);
  if (const auto times = curves.find("time/step"); times != curves.end() && left > 0) {
    const std::span all(times->second.values);
    const double seconds = mean(all.last(std::min(kStepsForTimeLeft, all.size())));
    out += ", " + format_duration(seconds * static_cast<double>(left)) + " left";
  }
  out += "\n";
  const Json threads = progress.value("threads", Json()), queue = progress.value("queue", Json());
  if (threads.is_object() && !has_ended(run)) {
    const char* separator = "";
    for (const auto& [thread, state] : threads.items()) {
      const std::string doing = state.value("doing", "");
      out += str(std::exchange(separator, ", "), thread, ": ", doing.empty() ? "waits" : doing, " ",
                 time_since(state));
    }
    out += "\n";
  }
  if (queue.is_object() && !has_ended(run)) {
    const auto number = [&](const char* name) { return queue.value(name, int64_t{0}); };
    out += str("groups: ", number("running"), " in generation, ", number("awaiting"),
               " waiting for rewards, ", number("buffered"), " scored\n");
  }
  for (const auto& [metric, label] : kWatched) {
    const auto found = curves.find(metric);
    if (found == curves.end()) continue;
    const std::vector<double>& values = found->second.values;
    std::ostringstream line;
    line << std::left << std::setw(16) << label << std::right << std::setw(10)
         << format_significant(values.back(), 3) << "  " << blocks(values) << "\n";
    out += line.str();
  }
  const Json& problems = run.problems();
  for (size_t i = problems.size() - std::min(problems.size(), kMostFailures); i < problems.size(); ++i)
    out += str(problems[i]["level"].get<std::string>(), " (", problems[i]["count"],
               "): ", problems[i]["text"].get<std::string>(), "\n");
  std::istringstream lines(without_controls(std::move(out), "\n"));
  std::string cut;
  for (std::string line; std::getline(lines, line);) cut += (cut.empty() ? "" : "\n") + fit(line, columns);
  return cut;
}

}  // namespace bough
