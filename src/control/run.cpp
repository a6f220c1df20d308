#include "control/run.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/median.h"
#include "control/evaluation.h"
#include "control/run_parts.h"
#include "data/rollout_file.h"

namespace bough {

namespace {

// The schedule over the parts of a run: steps, evaluations, checkpoints, and where it may be interrupted.
class Run {
 public:
  Run(const RunSettings& settings, const RunOptions& options);

  RunSummary work();

 private:
  void resume();
  void evaluate_at_start();
  void finish_interrupted_step();
  bool evaluation_due(int64_t step) const;
  std::optional<EvaluationResult> evaluate_now();
  void publish_metrics(int64_t step, const MetricValues& values);
  void finish_step(StepRecord record);
  bool checkpoint_due(int64_t step) const;
  void checkpoint();
  Json thread_state() const;
  [[noreturn]] void interrupt();
  std::optional<Comparison> compare();
  RunSummary summarise();
  bool stopping() const { return options_.stop && options_.stop(); }

  const RunOptions options_;
  RunParts parts_;
  const RunSettings& settings_;
  Trainer& trainer_;
  Controller& controller_;
  RunFolder& folder_;
  const int64_t total_steps_;
  LiveDisplay display_;
  std::unique_ptr<Metrics> metrics_;
  Clock::Time last_checkpoint_;
  int64_t checkpointed_step_ = -1;
  // Of the last step, where its evaluation was interrupted: written with the evaluation, after the run has
  // resumed.
  std::optional<MetricValues> unwritten_;
};

Run::Run(const RunSettings& settings, const RunOptions& options)
    : options_(options),
      parts_(settings, options.stop),
      settings_(parts_.settings),
      trainer_(parts_.trainer),
      controller_(parts_.controller),
      folder_(parts_.folder),
      total_steps_(parts_.total_steps),
      display_(total_steps_, parts_.clock, options.display),
      last_checkpoint_(parts_.clock.now()) {
  resume();
  metrics_ = folder_.open_metrics();
  if (!folder_.checkpoint()) return;
  for (const MetricRecord& record : read_metrics(folder_.path() / "metrics.jsonl"))
    if (const auto accuracy = record.values.find("eval/avg_at_k"); accuracy != record.values.end())
      display_.set_accuracy(accuracy->second);
}

// Threads decide the order in which sums are taken, and with it the last bits.
Json Run::thread_state() const {
  return {{"threads", at::get_num_threads()}};
}

void Run::resume() {
  if (!folder_.checkpoint()) return;
  const Json state = load_run_checkpoint(*folder_.checkpoint(), *parts_.model, trainer_.optimizer());
  controller_.restore(state.at("controller"));
  checkpointed_step_ = controller_.num_steps();
  if (state.contains("unwritten_metrics")) {
    unwritten_.emplace();
    for (const auto& [name, value] : state.at("unwritten_metrics").items())
      (*unwritten_)[name] = value.is_number() ? value.get<double>() : NAN;
  }
  if (state.value("environment", Json()) != thread_state()) {
    log_warning(
        str("the run was computed with ", state.value("environment", Json()).value("threads", 0),
            " threads, this process has ", at::get_num_threads(),
            ": it goes on correctly, but not bit for bit; set OMP_NUM_THREADS or threads to change that"));
  }
  log_info(str("resumed from ", folder_.checkpoint()->directory.string(), ": step ", controller_.num_steps(),
               " of ", total_steps_));
}

bool Run::evaluation_due(int64_t step) const {
  if (parts_.valid.size() == 0) return false;
  const EvaluatorSettings& evaluator = settings_.evaluator;
  return (evaluator.freq_steps > 0 && step % evaluator.freq_steps == 0) ||
         (evaluator.at_end && step == total_steps_);
}

std::optional<EvaluationResult> Run::evaluate_now() {
  EvaluationOptions options;
  options.sampling = settings_.evaluation_sampling();
  options.seed = static_cast<uint64_t>(settings_.seed);
  options.samples_in_flight = 2 * settings_.rollout.max_concurrent_rollouts;
  options.collect.stop = options_.stop;
  options.collect.on_progress = [&](int64_t done, int64_t total) {
    display_.set_activity(str("evaluation ", done, "/", total));
  };
  std::optional<EvaluationResult> result;
  controller_.while_suspended(
      [&] { result = evaluate(*parts_.engine, parts_.valid, parts_.encoder, *parts_.reward, options); });
  return result;
}

void Run::evaluate_at_start() {
  const auto records = read_metrics(folder_.path() / "metrics.jsonl");
  const bool done = !records.empty() && records.front().step == 0;
  if (controller_.num_steps() > 0 || done || !settings_.evaluator.at_start || parts_.valid.size() == 0)
    return;
  const auto result = evaluate_now();
  if (!result) interrupt();
  const MetricValues values = to_metrics(*result);
  publish_metrics(0, values);
}

void Run::finish_interrupted_step() {
  if (!unwritten_) return;
  const auto records = read_metrics(folder_.path() / "metrics.jsonl");
  const int64_t step = controller_.num_steps();
  if (records.empty() ||
      records.back().step < step) {  // else a run that resumed and was killed has written them
    const auto result = evaluate_now();
    if (!result) interrupt();
    unwritten_->merge(to_metrics(*result));
    publish_metrics(step, *unwritten_);
  }
  unwritten_.reset();
}

bool Run::checkpoint_due(int64_t step) const {
  const SaverSettings& saver = settings_.saver;
  if (step == total_steps_ || (saver.freq_steps > 0 && step % saver.freq_steps == 0)) return true;
  const double minutes = std::chrono::duration<double>(parts_.clock.now() - last_checkpoint_).count() / 60;
  return saver.freq_minutes > 0 && minutes >= saver.freq_minutes;
}

void Run::checkpoint() {
  if (checkpointed_step_ == controller_.num_steps()) return;
  Json state = {{"controller", controller_.save()}, {"environment", thread_state()}};
  if (unwritten_) state["unwritten_metrics"] = *unwritten_;
  save_run_checkpoint(folder_.path(), controller_.num_steps(), *parts_.model, trainer_.optimizer(), state,
                      {.source_model = settings_.model.path, .keep_last = settings_.saver.keep});
  checkpointed_step_ = controller_.num_steps();
  last_checkpoint_ = parts_.clock.now();
  RunFolder::write_report(folder_.path());
}

void Run::interrupt() {
  checkpoint();
  throw Interrupted(str("stopped after step ", controller_.num_steps(), " of ", total_steps_,
                        "; checkpoint in ", folder_.path().string(),
                        ". The same command goes on from there"));
}

void Run::publish_metrics(int64_t step, const MetricValues& values) {
  metrics_->write(step, values);
  display_.write(step, values);
  log_debug(display_.line(step, values));  // for log.txt; people see the display
}

// Metrics and rollouts first, the checkpoint last: what a checkpoint covers is complete.
void Run::finish_step(StepRecord record) {
  if (settings_.saver.rollouts || settings_.compare_dense > 0)
    write_rollouts(folder_.rollout_file(record.step), record.batch);
  if (evaluation_due(record.step)) {
    const auto result = evaluate_now();
    if (!result) {
      unwritten_ = std::move(record.metrics);
      interrupt();
    }
    record.metrics.merge(to_metrics(*result));
  }
  publish_metrics(record.step, record.metrics);
  if (checkpoint_due(record.step)) {
    display_.set_activity("checkpoint");
    checkpoint();
  }
}

RunSummary Run::work() {
  evaluate_at_start();
  finish_interrupted_step();
  while (controller_.num_steps() < total_steps_) {
    auto record =
        controller_.step(options_.stop, [&](const std::string& what) { display_.set_activity(what); });
    if (record) finish_step(std::move(*record));
    if (stopping()) interrupt();
  }
  checkpoint();
  display_.set_activity("");
  return summarise();
}

// Gradients of the last batches with and without sharing, in turns; the first of each is not counted, because
// it also warms caches up.
std::optional<Comparison> Run::compare() {
  constexpr int kRepeats = 3;
  const std::vector<int64_t> steps = folder_.steps_with_rollouts();
  if (settings_.compare_dense == 0 || steps.empty()) return {};
  Comparison out;
  out.num_batches = std::min(settings_.compare_dense, static_cast<int64_t>(steps.size()));
  std::vector<double> shared, dense;
  for (int64_t i = 0; i < out.num_batches; ++i) {
    const std::vector<Trajectory> batch =
        read_rollouts(folder_.rollout_file(steps[steps.size() - 1 - static_cast<size_t>(i)]));
    const auto timer = [&](const std::string& strategy) {
      return StepTimer(*parts_.model, parts_.reference.get(), settings_.actor, trainer_.pass_costs(), batch,
                       strategy);
    };
    StepTimer with = timer(settings_.actor.tree.strategy()), without = timer("dense");
    for (int repeat = 0; repeat <= kRepeats; ++repeat) {
      if (stopping()) return {};
      display_.set_activity(str("comparison with dense: batch ", i + 1, "/", out.num_batches, ", run ",
                                repeat + 1, "/", kRepeats + 1));
      with.run(/*counted=*/repeat > 0);
      without.run(/*counted=*/repeat > 0);
    }
    shared.insert(shared.end(), with.seconds().begin(), with.seconds().end());
    dense.insert(dense.end(), without.seconds().begin(), without.seconds().end());
  }
  display_.set_activity("");
  out.seconds = median(shared);
  out.dense_seconds = median(dense);
  return out;
}

RunSummary Run::summarise() {
  RunSummary summary;
  summary.folder = folder_.path().string();
  summary.steps = controller_.num_steps();
  double compression = 0;
  int64_t num_compressions = 0;
  for (const MetricRecord& record : read_metrics(folder_.path() / "metrics.jsonl")) {
    if (const auto it = record.values.find("tree/compression"); it != record.values.end()) {
      compression += it->second;
      ++num_compressions;
    }
    if (!record.values.contains("eval/avg_at_k")) continue;
    const auto value = [&](const char* name, double missing) {
      const auto it = record.values.find(name);
      return it == record.values.end() ? missing : it->second;
    };
    const Accuracy accuracy{record.step, value("eval/avg_at_k", 0), value("eval/avg_at_k_low", 0),
                            value("eval/avg_at_k_high", 1)};
    if (!summary.before) summary.before = accuracy;
    summary.after = accuracy;
  }
  if (num_compressions > 0) summary.compression = compression / static_cast<double>(num_compressions);
  summary.comparison = compare();
  summary.report = RunFolder::write_report(folder_.path()).string();
  if (const auto checkpoint = find_latest_checkpoint(folder_.path()))
    summary.model = checkpoint->model_directory().string();
  return summary;
}

}  // namespace

RunSummary run_training(const RunSettings& settings, const RunOptions& options) {
  if (settings.threads > 0) at::set_num_threads(static_cast<int>(settings.threads));
  Run run(settings, options);
  try {
    return run.work();
  } catch (const std::exception& error) {
    log_debug(str("the run ended: ", error.what()));  // for log.txt; the caller tells people
    throw;
  }
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
  if (summary.comparison) {
    out["seconds"] = summary.comparison->seconds;
    out["dense_seconds"] = summary.comparison->dense_seconds;
  }
  return out;
}

}  // namespace bough
