#include "run/run_reporting.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/median.h"
#include "data/rollout_file.h"
#include "train/make_batch.h"

namespace bough {

RunReporting::RunReporting(const RunSettings& settings, const RunFolder& folder, const Clock& clock,
                           int64_t total_steps, DisplayStyle style)
    : folder_(folder),
      clock_(clock),
      total_steps_(total_steps),
      most_rollout_bytes_(settings.saver.rollouts || settings.compare_dense > 0
                              ? std::optional(settings.saver.max_rollouts.count)
                              : std::nullopt),
      display_(total_steps, clock, style) {}

void RunReporting::open() {
  progress_ = std::make_unique<ProgressFile>(folder_.path() / "progress.json", total_steps_, clock_);
  metrics_ = folder_.open_metrics();
  if (most_rollout_bytes_) traces_ = std::make_unique<TraceWriter>(folder_.path(), *most_rollout_bytes_);
  const auto records = read_metrics(folder_.path() / "metrics.jsonl");
  is_evaluated_at_start_ = !records.empty() && records.front().step == 0;
  for (const MetricRecord& record : records)
    if (const auto accuracy = record.values.find("eval/avg_at_k"); accuracy != record.values.end())
      display_.set_accuracy(accuracy->second);
  const auto timeline = folder_.path() / "timeline.jsonl";
  for (const TimelineSpan& span : read_timeline(timeline))
    timeline_begin_ = std::max(timeline_begin_, span.end);
  timeline_file_ = std::make_unique<AppendFile>(timeline);
}

void RunReporting::keep_evaluated(std::vector<Trajectory> samples, const std::string& name) {
  if (!traces_) return;
  const MutexLock lock(mutex_);
  evaluated_samples_[name] = std::move(samples);
}

void RunReporting::write_record(int64_t step, const MetricValues& values) {
  if (values.contains("eval/avg_at_k")) {
    const MutexLock lock(mutex_);
    if (!evaluated_samples_.empty()) traces_->add_evaluation(step, std::exchange(evaluated_samples_, {}));
  }
  metrics_->write(step, values);
  display_.write(step, values);
  progress_->set_step(step);
  log_debug(display_.line(step, values));  // for log.txt; users see the display
}

void RunReporting::write_timeline(Timeline& timeline, bool all) {
  std::string lines;
  for (TimelineSpan& span : timeline.take(all)) {
    span.begin += timeline_begin_;
    span.end += timeline_begin_;
    lines += to_line(span) + "\n";
  }
  timeline_file_->append(lines);
}

void RunReporting::show(const std::string& activity, int64_t num_valid) {
  const int64_t evaluated = evaluated_.load();
  const std::string text =
      evaluated == 0 ? activity : str(activity, " (", evaluated, "/", num_valid, " problems)");
  display_.set_activity(text);
  progress_->set_activity(text);
}

void RunReporting::show_queue(const Controller::Counts& counts,
                              const std::map<std::string, int64_t>& dropped) {
  progress_->set_queue({{"running", counts.running},
                        {"awaiting", counts.awaiting},
                        {"buffered", counts.buffered},
                        {"training", counts.training},
                        {"trained", counts.trained},
                        {"dropped", dropped}});
}

void RunReporting::end(const std::string& state, const std::string& error) {
  if (progress_) progress_->end(state, error);
}

// The first time of each is not counted, because it includes the warming up of caches.
std::optional<Comparison> compare_with_dense(RunComponents& parts, LiveDisplay& display,
                                             const std::function<bool()>& stop) {
  constexpr int kRepeats = 3;
  const RunSettings& settings = parts.settings;
  const RunFolder& folder = *parts.folder;
  const std::vector<int64_t> steps = folder.steps_with_rollouts();
  // If layers are sharded, a gradient needs the other ranks, and they compute only what the Trainer asks for.
  if (settings.compare_dense == 0 || steps.empty() || parts.unsharded) return {};
  Comparison out;
  out.num_batches = std::min(settings.compare_dense, static_cast<int64_t>(steps.size()));
  std::vector<double> shared, dense;
  for (int64_t i = 0; i < out.num_batches; ++i) {
    const std::vector<Trajectory> batch =
        read_rollouts(folder.rollout_file(steps[steps.size() - 1 - static_cast<size_t>(i)]));
    const auto timer = [&](const std::string& strategy) {
      return StepTimer(*parts.model, {parts.reference.get(), parts.teacher.get()}, settings.actor, batch,
                       {.strategy = strategy, .costs = parts.trainer.pass_costs()});
    };
    StepTimer with = timer(settings.actor.tree.strategy()), without = timer("dense");
    for (int repeat = 0; repeat <= kRepeats; ++repeat) {
      if (stop && stop()) return {};
      display.set_activity(str("comparison with dense: batch ", i + 1, "/", out.num_batches, ", run ",
                               repeat + 1, "/", kRepeats + 1));
      with.run(/*counted=*/repeat > 0);
      without.run(/*counted=*/repeat > 0);
    }
    shared.insert(shared.end(), with.seconds().begin(), with.seconds().end());
    dense.insert(dense.end(), without.seconds().begin(), without.seconds().end());
  }
  display.set_activity("");
  out.seconds = median(shared);
  out.dense_seconds = median(dense);
  return out;
}

RunSummary summarise(const RunSettings& settings, const RunFolder& folder, int64_t num_steps) {
  RunSummary summary;
  summary.folder = folder.path().string();
  summary.steps = num_steps;
  double compression = 0;
  int64_t num_compressions = 0;
  for (const MetricRecord& record : read_metrics(folder.path() / "metrics.jsonl")) {
    if (const auto it = record.values.find("tree/compression"); it != record.values.end()) {
      compression += it->second;
      ++num_compressions;
    }
    if (!record.values.contains("eval/avg_at_k")) continue;
    const auto value = [&](const std::string& name, double missing) {
      const auto it = record.values.find(name);
      return it == record.values.end() ? missing : it->second;
    };
    const auto accuracy = [&](const std::string& name) {
      return Accuracy{record.step, value(name + "/avg_at_k", 0), value(name + "/avg_at_k_low", 0),
                      value(name + "/avg_at_k_high", 1)};
    };
    summary.after = accuracy("eval");
    if (!summary.before) summary.before = summary.after;
    if (record.values.contains("eval_sparse/avg_at_k")) summary.after_sparse = accuracy("eval_sparse");
  }
  if (num_compressions > 0) summary.compression = compression / static_cast<double>(num_compressions);
  summary.report = RunFolder::write_report(folder.path()).string();
  if (const auto checkpoint = find_latest_checkpoint(folder.path()))
    summary.model =
        (settings.actor.lora.enabled() ? checkpoint->adapter_directory() : checkpoint->model_directory())
            .string();
  return summary;
}

Json to_json(const RunSummary& summary) {
  Json out = {{"folder", summary.folder},
              {"report", summary.report},
              {"model", summary.model},
              {"steps", summary.steps},
              {"compression", summary.compression}};
  const auto accuracy = [](const std::optional<Accuracy>& value) -> Json {
    if (!value) return nullptr;
    return {{"step", value->step}, {"avg_at_k", value->avg_at_k}, {"interval", {value->low, value->high}}};
  };
  out["before"] = accuracy(summary.before);
  out["after"] = accuracy(summary.after);
  if (summary.after_sparse) out["after_sparse"] = accuracy(summary.after_sparse);
  if (summary.comparison) {
    out["seconds"] = summary.comparison->seconds;
    out["dense_seconds"] = summary.comparison->dense_seconds;
  }
  return out;
}

}  // namespace bough
