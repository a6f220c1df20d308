#include "report/run_watch.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "base/clock.h"
#include "base/error.h"
#include "base/format.h"
#include "report/html_text.h"

namespace bough {

namespace {

constexpr size_t kNumBlocks = 40;  // of a curve
constexpr size_t kStepsForTimeLeft = 20;
constexpr size_t kMostFailures = 4;

struct WatchedCurve {
  const char *metric, *label;
};
constexpr std::array<WatchedCurve, 12> kWatched = {{{"reward/mean", "reward"},
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

// One block for each of at most kNumBlocks means of equally many values.
std::string blocks(const std::vector<double>& values) {
  constexpr std::array<const char*, 8> kBlocks = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const size_t count = std::min(kNumBlocks, values.size());
  std::vector<double> means;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = i * values.size() / count, end = (i + 1) * values.size() / count;
    means.push_back(std::accumulate(values.begin() + static_cast<std::ptrdiff_t>(begin),
                                    values.begin() + static_cast<std::ptrdiff_t>(end), 0.0) /
                    static_cast<double>(end - begin));
  }
  const auto [low, high] = std::minmax_element(means.begin(), means.end());
  std::string out;
  for (const double value : means) {
    const double height = *high > *low ? (value - *low) / (*high - *low) : 0.5;
    out += kBlocks[static_cast<size_t>(height * (kBlocks.size() - 1) + 0.5)];
  }
  return out;
}

std::string state_text(const RunFollower& run) {
  const Json& progress = run.progress();
  if (!progress.is_object()) return "no progress.json: the run has not started, or an older version wrote it";
  const std::string state = progress.value("state", "");
  if (state == "failed") return "failed: " + progress.value("error", "");
  if (state != "running") return state;
  if (progress.value("is_alive", Json()) == false) return "gone: the process ended without saying why";
  const double now = seconds_since_1970();
  return str(progress.value("activity", ""), ", for ",
             format_duration(std::max(0.0, now - progress.value("since", now))));
}

}  // namespace

bool has_ended(const RunFollower& run) {
  const Json& progress = run.progress();
  return progress.is_object() &&
         (progress.value("state", "") != "running" || progress.value("is_alive", Json()) == false);
}

std::string watch_text(const RunFollower& run, int columns) {
  const Json& progress = run.progress();
  const int64_t total = progress.is_object() ? progress.value("total_steps", int64_t{0}) : 0;
  std::string out = run.folder().string() + "\n" + state_text(run) + "\n";
  std::string steps = str("step ", std::max<int64_t>(0, run.last_step()));
  if (total > 0) steps += str(" of ", total);
  const auto& curves = run.curves();
  if (const auto times = curves.find("time/step"); times != curves.end() && total > run.last_step()) {
    const std::vector<double>& all = times->second.values;
    const auto count = static_cast<std::ptrdiff_t>(std::min(kStepsForTimeLeft, all.size()));
    const double mean = std::accumulate(all.end() - count, all.end(), 0.0) / static_cast<double>(count);
    steps += ", " + format_duration(mean * static_cast<double>(total - run.last_step())) + " left";
  }
  out += steps + "\n";
  const Json queue = progress.is_object() ? progress.value("queue", Json()) : Json();
  const Json threads = progress.is_object() ? progress.value("threads", Json()) : Json();
  if (threads.is_object() && !has_ended(run)) {
    std::string line;
    for (const auto& [thread, state] : threads.items()) {
      const std::string what = state.value("doing", "");
      line += str(line.empty() ? "" : ", ", thread, ": ", what.empty() ? "waits" : what, " ",
                  format_duration(std::max(0.0, seconds_since_1970() - state.value("since", 0.0))));
    }
    out += line + "\n";
  }
  if (queue.is_object() && !has_ended(run)) {
    const auto number = [&](const char* name) { return queue.value(name, int64_t{0}); };
    out += str("groups: ", number("running"), " in generation, ", number("awaiting"),
               " waiting for rewards, ", number("buffered"), " scored\n");
  }
  for (const WatchedCurve& watched : kWatched) {
    const auto found = curves.find(watched.metric);
    if (found == curves.end()) continue;
    std::string label = watched.label, value = format_significant(found->second.values.back(), 3);
    label.resize(16, ' ');
    value.insert(0, std::max<size_t>(10, value.size()) - value.size(), ' ');
    out += label + value + "  " + blocks(found->second.values) + "\n";
  }
  const Json problems = run.problems();
  for (size_t i = problems.size() - std::min(problems.size(), kMostFailures); i < problems.size(); ++i)
    out += str(problems[i]["level"].get<std::string>(), " (", problems[i]["count"].get<int64_t>(),
               "): ", problems[i]["text"].get<std::string>(), "\n");
  out = without_controls(std::move(out), "\n");
  std::string cut;
  size_t begin = 0;
  for (size_t end; (end = out.find('\n', begin)) != std::string::npos; begin = end + 1)
    cut += fit(std::string_view(out).substr(begin, end - begin), columns) + "\n";
  cut.pop_back();
  return cut;
}

}  // namespace bough
