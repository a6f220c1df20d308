#include "run/run_loop.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/log.h"
#include "control/evaluation.h"
#include "kernels/common/priority_stream.h"
#include "train/make_batch.h"

namespace bough {

namespace {

// A synchronous run is repeatable, however long tools take: either it takes their answers in rounds (head of
// control/generator.h), or the model is batch-invariant.
bool takes_answers_in_rounds(const RunSettings& settings) {
  return !settings.rollout.is_asynchronous() && !settings.rollout.batch_invariant.value_or(false);
}

// Runs `work` and returns the message of its exception. Empty: it threw none.
std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

int64_t samples_in_flight(const RunSettings& settings, int64_t num_engines) {
  return 2 * settings.rollout.max_concurrent_rollouts * num_engines;
}

}  // namespace

WorkerOptions worker_options(const RunSettings& settings, const ThreadSplit& threads) {
  WorkerOptions options{.generation = {.sampling = settings.gconfig,
                                       .seed = static_cast<uint64_t>(settings.seed),
                                       .in_rounds = takes_answers_in_rounds(settings),
                                       .with_baseline = settings.actor.advantages.needs_baselines()},
                        .own_threads = settings.rollout.is_asynchronous(),
                        .reward_threads = settings.reward_service.workers};
  // One thread per group: as many groups are scored at once as the reward with the most workers can take.
  for (const RewardEntry& entry : settings.reward)
    options.reward_threads = std::max(options.reward_threads, entry.workers.value_or(0));
  // Only asynchronous runs have an engine thread. On the trainer's stream, generation would wait for steps.
  const at::Device device = settings.device == "cuda" ? at::kCUDA : at::kCPU;
  options.on_engine_thread = [threads, device] {
    at::set_num_threads(threads.generating);
    use_priority_stream(device);
  };
  options.on_trainer_thread = [threads] { at::set_num_threads(threads.training); };
  return options;
}

ControllerOptions controller_options(const RunSettings& settings, const RunLoopOptions& options) {
  const RolloutSettings& rollout = settings.rollout;
  return {.batch_groups = settings.train_dataset.batch_size,
          .max_staleness = rollout.max_head_offpolicyness,
          .fixed_staleness = rollout.fixed_staleness,
          .total_steps = options.total_steps,
          .total_groups =
              settings.total_train_steps == 0 ? settings.total_train_epochs * options.num_problems : 0,
          .max_buffered_groups = rollout.max_buffered_groups,
          .group_size = settings.gconfig.n_samples + settings.actor.advantages.needs_baselines(),
          .samples_in_flight = samples_in_flight(settings, options.num_engines),
          .weight_sync_steps = rollout.weight_sync_steps,
          .interruptible = rollout.interruptible,
          .min_group = std::min(rollout.min_group, settings.gconfig.n_samples),
          .max_consecutive_failures = settings.reward_service.max_consecutive_failures,
          .evaluation_seconds = settings.evaluator.timeout_seconds,
          .stall_seconds = settings.stall_seconds,
          .max_generated_batches = settings.actor.filters.max_num_gen_batches};
}

RunLoop::RunLoop(const RunSettings& settings, const WorkerParts& parts, const Dataset& valid,
                 const CheckpointSchedule& schedule, const RunFolder& folder, RunReporting& reporting,
                 RunLoopOptions options)
    : settings_(settings),
      parts_(parts),
      valid_(valid),
      schedule_(schedule),
      folder_(folder),
      reporting_(reporting),
      options_(std::move(options)),
      commands_(folder.path(), parts.clock, controller_, valid.size() > 0),
      workers_(with_evaluator(parts), worker_options(settings, options_.threads)),
      controller_(workers_, parts.clock, controller_options(settings, options_), *this, *this) {}

bool RunLoop::run() {
  reporting_.open();
  controller_.start();
  const int64_t num_valid = static_cast<int64_t>(valid_.size());
  drive(controller_, workers_,
        {.stop = [&] { return stopping(); },
         .between_events = [&] { commands_.follow(); },
         .on_activity =
             [&](const std::string& activity) {
               reporting_.show(activity, num_valid);
               reporting_.show_queue(controller_.counts(), controller_.dropped_by_reason());
               reporting_.show_threads(workers_.doing());
             }});
  commands_.end();
  workers_.join();  // a thread logs its result after it has posted that it is done
  reporting_.write_timeline(workers_.timeline(), /*all=*/true);
  reporting_.display().set_activity("");
  return !controller_.is_stopping();
}

// The trainer's thread may have completed a step after another thread had failed.
void RunLoop::take_last_events() {
  while (std::optional<Event> event = workers_.events().take({}))
    if (!std::holds_alternative<WorkerFailed>(*event)) controller_.on(std::move(*event));
}

void RunLoop::save_last_step() {
  workers_.join();
  const std::string lost = error_of([&] { take_last_events(); });
  if (!lost.empty()) log_debug(str("after the error: ", lost));
  const int64_t before = std::max<int64_t>(0, controller_.checkpointed_step()), last = num_steps();
  int64_t saved = before;
  const auto say = [&] {
    log_warning(
        saved == 0 ? "the run ended by an error and has no checkpoint: the same command begins again"
                   : str("the run ended by an error: the same command continues from the checkpoint of step ",
                         saved, saved > before ? ", which was written after the error" : ""));
  };
  if (last == before) return before > 0 ? say() : void();
  const std::optional<ControllerState> snapshot = controller_.take_unwritten_snapshot();
  const auto write = [&](const ControllerState& state, bool copied) {
    parts_.checkpoints.write(state, copied);
    saved = state.step;
  };
  const std::string failure = error_of([&] {
    const std::optional<ControllerState> state = controller_.take_unsaved_step();
    if (!state) throw IoError("writing it failed");
    const std::string reason = parts_.checkpoints.why_not_at(last);
    if (!reason.empty()) throw IoError(reason);
    write(*state, /*copied=*/false);
  });
  if (!failure.empty()) {
    log_warning(str("step ", last, " has no checkpoint: ", failure));
    if (snapshot) error_of([&] { write(*snapshot, /*copied=*/true); });
  }
  say();
}

std::optional<MetricValues> RunLoop::evaluate(const std::function<bool()>& stop) {
  if (!settings_.generates_with_sparse_policy()) return evaluate_policy("eval", stop);
  parts_.engine.sample_from(settings_.sparse_training.distills() ? SampledPolicy::kDenseWithoutAdapter
                                                                 : SampledPolicy::kDense);
  std::optional<MetricValues> metrics = evaluate_policy("eval", stop);
  parts_.engine.sample_from(SampledPolicy::kGenerating);
  if (!metrics || !settings_.evaluator.sparse) return metrics;
  std::optional<MetricValues> sparse = evaluate_policy("eval_sparse", stop);
  if (!sparse) return std::nullopt;
  metrics->merge(*sparse);
  return metrics;
}

std::optional<MetricValues> RunLoop::evaluate_policy(const std::string& name,
                                                     const std::function<bool()>& stop) {
  EvaluationOptions options;
  options.sampling = settings_.evaluation_sampling();
  options.seed = static_cast<uint64_t>(settings_.seed);
  options.samples_in_flight = samples_in_flight(settings_, options_.num_engines);
  options.collect.stop = [&] { return stopping() || stop(); };
  options.collect.on_progress = [&](int64_t done, int64_t total) {
    reporting_.set_evaluated(done);
    if (!settings_.rollout.is_asynchronous())
      reporting_.display().set_activity(str("evaluation ", done, "/", total));
  };
  options.environment = parts_.environment;
  options.conversations = parts_.conversations;
  options.in_rounds = takes_answers_in_rounds(settings_);
  options.take_samples = [&](std::vector<Trajectory> samples) {
    reporting_.keep_evaluated(std::move(samples), name);
  };
  const auto result = bough::evaluate(parts_.engine, valid_, parts_.codec, parts_.reward, options);
  reporting_.set_evaluated(0);
  if (!result) return std::nullopt;
  return to_metrics(*result, name);
}

bool RunLoop::evaluation_due(int64_t step, bool is_last) {
  if (valid_.size() == 0) return false;
  const EvaluatorSettings& evaluator = settings_.evaluator;
  if (step == 0) return evaluator.at_start && !reporting_.is_evaluated_at_start();
  return (evaluator.freq_steps > 0 && step % evaluator.freq_steps == 0) || (evaluator.at_end && is_last);
}

std::optional<std::string> RunLoop::why_refused(const ScoredGroup& group) {
  if (!settings_.actor.filters.dynamic_sampling) return std::nullopt;
  return why_dropped(group.rows(), settings_.actor, settings_.gconfig.max_new_tokens);
}

void RunLoop::on_record(int64_t step, const MetricValues& values) {
  reporting_.write_record(step, values);
  commands_.on_record(step, values);
  reporting_.write_timeline(workers_.timeline(), /*all=*/false);
  follow_thread_change();
}

// Takes over new thread counts, but not in a synchronous run: its steps must be repeatable, and other numbers
// of threads change the bits.
void RunLoop::follow_thread_change() {
  const ThreadChange wanted = read_thread_change(folder_.path());
  if (wanted == thread_change_) return;
  thread_change_ = wanted;
  if (!settings_.rollout.is_asynchronous()) {
    log_warning(
        "threads.json is ignored, because generation and training take turns "
        "(rollout.max_head_offpolicyness is 0, or rollout.fixed_staleness is true)");
    return;
  }
  const auto set = [](int64_t threads) {
    return [threads] { at::set_num_threads(static_cast<int>(threads)); };
  };
  if (wanted.generating > 0) workers_.on_engine(set(wanted.generating));
  if (wanted.training > 0) workers_.on_trainer(set(wanted.training));
  log_info(str("threads from now on: generation ",
               wanted.generating > 0 ? str(wanted.generating) : "as before", ", training ",
               wanted.training > 0 ? str(wanted.training) : "as before"));
}

}  // namespace bough
