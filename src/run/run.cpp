#include "run/run.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include "base/file.h"
#include "base/log.h"
#include "base/median.h"
#include "base/mutex.h"
#include "control/evaluation.h"
#include "control/workers.h"
#include "data/rollout_file.h"
#include "models/checkpoint.h"
#include "rollout/published_weights.h"
#include "run/engine_process.h"
#include "run/ranks_engine.h"
#include "run/run_components.h"
#include "run/train_batch.h"
#include "train/make_batch.h"

namespace bough {

namespace {

// Broadcasts the run's last checkpoint from rank 0, which owns the folder, to the other ranks, which see the
// same files.
void send_checkpoint(const std::optional<RunCheckpoint>& checkpoint, Communicator& ranks) {
  ranks.broadcast(checkpoint
                      ? str(checkpoint->step, " ", std::filesystem::absolute(checkpoint->directory).string())
                      : "");
}

std::optional<RunCheckpoint> receive_checkpoint(Communicator& ranks) {
  const std::string text = ranks.broadcast("");
  if (text.empty()) return {};
  const size_t space = text.find(' ');
  return RunCheckpoint{std::stoll(text.substr(0, space)), text.substr(space + 1)};
}

void check_ranks(const RunSettings& settings, int64_t num_ranks) {
  const int64_t engines = settings.rollout.ranks;
  if (engines > 0 && engines >= num_ranks)
    throw UserError(str("rollout.ranks: got ", engines, " of ", num_ranks,
                        num_ranks == 1 ? " process" : " processes",
                        ", which leaves none to train; expected fewer than --ranks, or 0"));
  const ParallelSizes sizes = settings.actor.sizes_of(num_ranks - engines);
  const bool shares_model = sizes.tensor * sizes.pipeline > 1;
  if (shares_model && !settings.rollout.generates_elsewhere())
    throw UserError(
        str("actor.backend: got ", settings.actor.backend,
            ", whose ranks share the model's layers, so none has the unsharded model for generation; "
            "expected rollout.ranks above 0, or servers (rollout.backend)"));
  if (sizes.all() > sizes.data && settings.rollout.batch_invariant.value_or(false))
    throw UserError(str("rollout.batch_invariant: got true, but the ranks of actor.backend ",
                        settings.actor.backend,
                        " share passes and sum in another order than the engine; expected false, or data "
                        "parallelism only"));
}

// The communicators of a run's processes. With rollout.ranks M the last M ranks only generate, and the others
// only train. The constructor is a collective call of all ranks.
struct RankGroups {
  RankGroups(Communicator* all_ranks, const RunSettings& settings) : all(all_ranks), trainers(all_ranks) {
    const RolloutSettings& rollout = settings.rollout;
    if (!all || all->size() == 1) {
      trainers = nullptr;
      return;
    }
    const bool on_gpus = settings.device == "cuda";
    if (rollout.ranks == 0) {
      if (!rollout.has_servers()) engines = all->split(0);
      if (!on_gpus) return;
      of_side_ = nccl_communicator(all->split(0));
      trainers = of_side_.get();
      return;
    }
    is_engine = only_generates(settings, *all);
    of_side_ = all->split(is_engine ? 1 : 0);
    if (on_gpus && !is_engine && of_side_->size() > 1) of_side_ = nccl_communicator(std::move(of_side_));
    trainers = is_engine || of_side_->size() == 1 ? nullptr : of_side_.get();
    const bool is_served = is_engine || all->rank() == 0;
    engines = all->split(is_served ? 0 : 1);
    publication = std::make_unique<PublicationRanks>(all->split(is_served ? 0 : 1));
  }

  Communicator* const all;  // nullptr: one process
  Communicator* trainers;   // of the ranks that train; nullptr if this process trains alone or does not train
  bool is_engine = false;
  // `engines` (for requests) and `publication` (for weights) connect rank 0 with the ranks that generate for
  // it, and send host memory. A rank that trains without an engine does not use them. engines: nullptr if one
  // process or servers generate. publication: nullptr unless some ranks only generate.
  std::unique_ptr<Communicator> engines;
  std::unique_ptr<PublicationRanks> publication;

 private:
  std::unique_ptr<Communicator> of_side_;  // the ranks that train (NCCL between GPUs), or those that generate
};

// Runs `beside` on a new thread and `here` on the caller's thread. of_beside, of_here: the communicators that
// the two functions use. If one function throws, the abort checks of all these communicators end the other
// function, and the exception is rethrown.
void run_both(const std::function<void()>& beside, const std::vector<Communicator*>& of_beside,
              const std::function<void()>& here, const std::vector<Communicator*>& of_here) {
  Mutex mutex;
  std::exception_ptr failure;
  const auto abort_check = [&] {
    const MutexLock lock(mutex);
    if (failure) std::rethrow_exception(failure);
  };
  const auto guarded = [&](const std::function<void()>& work) {
    try {
      work();
    } catch (...) {
      const MutexLock lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  const auto set_abort_checks = [&](const std::function<void()>& to) {
    for (const auto& groups : {of_beside, of_here})
      for (Communicator* group : groups) group->set_abort_check(to);
  };
  set_abort_checks(abort_check);
  std::thread thread([&] { guarded(beside); });
  guarded(here);
  thread.join();
  set_abort_checks({});
  abort_check();
}

// If every rank has an engine: rank 0 publishes a version, and each engine takes weights from its own
// trainer.
class RanksWeights final : public WeightChannel {
 public:
  RanksWeights(WeightChannel& own, Trainer& trainer) : own_(own), trainer_(trainer) {}
  void publish(int32_t version) override {
    trainer_.publish_ranks(version);
    own_.publish(version);
  }
  std::optional<WeightUpdate> take() override { return own_.take(); }
  bool has_new() const override { return own_.has_new(); }

 private:
  WeightChannel& own_;
  Trainer& trainer_;
};

// If layers are sharded over ranks: before each publication they are gathered in rank 0's unsharded model.
class UnshardedWeights final : public WeightChannel {
 public:
  UnshardedWeights(WeightChannel& published, Trainer& trainer) : published_(published), trainer_(trainer) {}
  void publish(int32_t version) override {
    trainer_.unsharded_model();
    published_.publish(version);
  }
  std::optional<WeightUpdate> take() override { return published_.take(); }
  bool has_new() const override { return published_.has_new(); }

 private:
  WeightChannel& published_;
  Trainer& trainer_;
};

// A rank that only generates: its engine executes rank 0's commands while weights arrive.
void follow_generation(const RunSettings& settings, const std::vector<std::string>& command,
                       RankGroups& groups) {
  EngineProcess engine(command, engine_job(settings), *groups.engines, *groups.publication);
  run_both([&] { engine.receive_weights(); },
           {groups.publication->all.get(), groups.publication->leaders.get()},
           [&] { serve_engine(engine, *groups.engines); }, {groups.engines.get()});
}

// A rank other than 0 that trains: it trains when rank 0 does. In a thread of its own it also generates for
// rank 0's engine, unless servers or ranks that only generate do.
void follow_training(const RunSettings& settings, RankGroups& groups) {
  Communicator& ranks = *groups.trainers;
  RunComponents parts(
      settings, [] { return false; }, &ranks);
  if (const auto checkpoint = receive_checkpoint(ranks)) parts.trainer.load(*checkpoint);
  if (!parts.engine) return parts.trainer.follow();
  run_both(
      [&] {
        at::set_num_threads(parts.threads.generating);
        serve_engine(*parts.engine, *parts.weights, *groups.engines);
      },
      {groups.engines.get()},
      [&] { parts.trainer.follow([&](int32_t version) { parts.weights->publish(version); }); }, {&ranks});
}

// The controller with the parts of a run, its workers, and the files of the run's folder.
class Run {
 public:
  Run(const RunSettings& settings, const RunOptions& options, std::unique_ptr<RankGroups> groups);

  RunSummary work();
  // Call it after work() threw. After that no call waits for other ranks.
  void give_up() {
    if (published_weights_) published_weights_->give_up();
  }

 private:
  bool is_asynchronous() const { return settings_.rollout.max_head_offpolicyness > 0; }
  // A synchronous run is repeatable, however long tools take: either it takes their answers in rounds (head
  // of control/generator.h), or the model is batch-invariant.
  bool in_rounds() const { return !is_asynchronous() && !settings_.rollout.batch_invariant.value_or(false); }
  void resume();
  // RanksEngine if other ranks generate for rank 0. Else rank 0's own engine, which may be a ServerEngine.
  Engine& engine() {
    if (ranks_engine_) return *ranks_engine_;
    return *parts_.engine;
  }
  WeightChannel& weights() {
    if (unsharded_weights_) return *unsharded_weights_;
    if (published_weights_) return *published_weights_;
    if (ranks_weights_) return *ranks_weights_;
    return *parts_.weights;
  }
  void end_ranks() {
    if (num_ranks() == 1) return;
    if (ranks_engine_) ranks_engine_->end();
    if (published_weights_) published_weights_->end();
    trainer_.end_ranks();
    if (options_.on_ranks_ended) options_.on_ranks_ended();
  }
  GroupTask task_of(uint64_t id);
  WorkerParts worker_parts();
  WorkerOptions worker_options();
  ControllerOptions controller_options();
  ControllerObserver observer();
  bool evaluation_due(int64_t step, bool is_last) const;
  std::optional<MetricValues> evaluate_now(const std::function<bool()>& stop);
  void write_checkpoint(const ControllerState& state, bool copied);
  void write_record(int64_t step, const MetricValues& values);
  void write_timeline(bool all);
  void follow_thread_change();
  void show(const std::string& activity);
  Json thread_state() const;
  std::optional<Comparison> compare();
  RunSummary summarise();
  int64_t num_ranks() const { return groups_->all ? groups_->all->size() : 1; }
  int64_t num_engines() const { return settings_.rollout.ranks > 0 ? settings_.rollout.ranks : num_ranks(); }
  StepRecord train(const TrainOrder& order);
  bool stopping() const { return options_.stop && options_.stop(); }

  const RunOptions options_;
  const std::unique_ptr<RankGroups> groups_;
  RunComponents parts_;
  const RunSettings& settings_;
  Trainer& trainer_;
  RunFolder& folder_;
  const int64_t total_steps_;
  LiveDisplay display_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<AppendFile> timeline_file_;
  ThreadChange thread_change_;
  double timeline_begin_ = 0;  // seconds of earlier processes of this run
  bool is_evaluated_at_start_ = false;
  std::atomic<Clock::Time> last_checkpoint_;
  std::atomic<int64_t> evaluated_ = 0;  // problems done in the current evaluation

  Mutex order_mutex_;
  ProblemOrder order_ GUARDED_BY(order_mutex_);  // caches the last requested epoch
  TrainingSnapshot snapshot_;                    // the source of a checkpoint while training continues

  std::unique_ptr<RanksEngine> ranks_engine_;            // nullptr: one rank, or servers generate
  std::unique_ptr<RanksWeights> ranks_weights_;          // if every rank has an engine
  std::unique_ptr<PublishedWeights> published_weights_;  // if some ranks only generate
  std::unique_ptr<UnshardedWeights> unsharded_weights_;  // if the trained model's layers are sharded
  EventQueue events_;
  Timeline timeline_;
  std::unique_ptr<ExternalRollouts> external_;  // nullptr: the run itself holds the conversations
  RunWorkers workers_;                          // its threads use the members above
  Controller controller_;
};

Run::Run(const RunSettings& settings, const RunOptions& options, std::unique_ptr<RankGroups> groups)
    : options_(options),
      groups_(std::move(groups)),
      parts_(settings, options.stop, groups_->trainers),
      settings_(parts_.settings),
      trainer_(parts_.trainer),
      folder_(*parts_.folder),
      total_steps_(parts_.total_steps),
      display_(total_steps_, parts_.clock, options.display),
      last_checkpoint_(parts_.clock.now()),
      order_(parts_.problems, static_cast<uint64_t>(settings_.seed), settings_.train_dataset.shuffle),
      ranks_engine_(groups_->engines
                        ? std::make_unique<RanksEngine>(parts_.engine.get(), parts_.published().config(),
                                                        *groups_->engines)
                        : nullptr),
      ranks_weights_(groups_->engines && !groups_->publication
                         ? std::make_unique<RanksWeights>(*parts_.weights, trainer_)
                         : nullptr),
      published_weights_(groups_->publication ? std::make_unique<PublishedWeights>(
                                                    parts_.published(), *groups_->publication,
                                                    /*waits=*/!is_asynchronous(), what_changes(settings_))
                                              : nullptr),
      unsharded_weights_(
          parts_.unsharded
              ? std::make_unique<UnshardedWeights>(
                    published_weights_ ? static_cast<WeightChannel&>(*published_weights_) : *parts_.weights,
                    trainer_)
              : nullptr),
      timeline_(parts_.clock.now()),
      external_(options.external ? options.external(settings_, engine()) : nullptr),
      workers_(worker_parts(), worker_options()),
      controller_(workers_, parts_.clock, controller_options(), observer()) {
  if (groups_->trainers) send_checkpoint(folder_.checkpoint(), *groups_->trainers);
  resume();
  metrics_ = folder_.open_metrics();
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

std::string engine_ranks_text(int64_t count) {
  return count > 0 ? str(" (", count, " generating)") : "";
}

// The numbers of threads and ranks decide the order of sums, and with it the last bits.
Json Run::thread_state() const {
  Json state = {{"threads", parts_.threads.training}};
  if (num_ranks() > 1) state["ranks"] = num_ranks();
  if (settings_.rollout.ranks > 0) state["engine_ranks"] = settings_.rollout.ranks;
  return state;
}

void Run::resume() {
  if (!folder_.checkpoint()) return;
  const Json saved = trainer_.load(*folder_.checkpoint());
  ControllerState state = [&] {
    const MutexLock lock(order_mutex_);
    return controller_state_from_json(saved.at("controller"), order_);
  }();
  // If a resumed run wrote these metrics and was killed, they are in the file already.
  const auto records = read_metrics(folder_.path() / "metrics.jsonl");
  if (!records.empty() && records.back().step >= state.step) state.unwritten_metrics.reset();
  const int64_t step = state.step;
  controller_.restore(std::move(state));
  if (saved.value("environment", Json()) != thread_state()) {
    const Json before = saved.value("environment", Json());
    log_warning(str(
        "the run was computed with ", before.value("threads", 0), " threads on ", before.value("ranks", 1),
        " ranks", engine_ranks_text(before.value("engine_ranks", 0)), ", and continues with ",
        parts_.threads.training, " on ", num_ranks(), engine_ranks_text(settings_.rollout.ranks),
        ": results stay correct, but not bit for bit the same; to keep the bits, set OMP_NUM_THREADS or "
        "threads, or --ranks, as before"));
  }
  log_info(
      str("resumed from ", folder_.checkpoint()->directory.string(), ": step ", step, " of ", total_steps_));
}

// ---- Callbacks of the workers and the controller.

StepRecord Run::train(const TrainOrder& order) {
  StepRecord record = train_batch(order, settings_, trainer_);
  if (!published_weights_) return record;
  const PublishedWeights::Report report = published_weights_->take_report();
  if (report.publications > 0) {
    record.metrics["publication/bytes"] = report.bytes;
    record.metrics["publication/seconds"] = report.seconds;
    record.metrics["publication/stall_seconds"] = ranks_engine_->take_longest_exchange();
  }
  record.metrics["rollout/engine_restarts"] = static_cast<double>(ranks_engine_->num_restarts());
  return record;
}

GroupTask Run::task_of(uint64_t id) {
  const MutexLock lock(order_mutex_);
  const Problem& problem = parts_.problems[order_.index_at(static_cast<int64_t>(id))];
  return {.id = id, .name = problem.id, .problem = &problem};
}

WorkerParts Run::worker_parts() {
  return {.engine = engine(),
          .weights = weights(),
          .codec = parts_.encoder,
          .reward = *parts_.reward,
          .filter = parts_.filter.get(),
          .clock = parts_.clock,
          .events = events_,
          .timeline = timeline_,
          .task_of = [this](uint64_t id) { return task_of(id); },
          .train = [this](const TrainOrder& order) { return train(order); },
          .take_snapshot = [this] { snapshot_ = trainer_.snapshot(/*copies=*/true); },
          .write_checkpoint = [this](const ControllerState& state,
                                     bool copied) { write_checkpoint(state, copied); },
          .evaluate = [this](const std::function<bool()>& stop) { return evaluate_now(stop); },
          .environment = parts_.environment.get(),
          .conversations = parts_.conversations ? &*parts_.conversations : nullptr,
          .external = external_.get()};
}

WorkerOptions Run::worker_options() {
  WorkerOptions options{.generation = {.sampling = settings_.gconfig,
                                       .seed = static_cast<uint64_t>(settings_.seed),
                                       .in_rounds = in_rounds(),
                                       .with_baseline = settings_.actor.advantages.needs_baselines()},
                        .own_threads = is_asynchronous(),
                        .reward_threads = settings_.reward_service.workers};
  // One thread per group: as many groups are scored at once as the reward with the most workers can take.
  for (const RewardEntry& entry : settings_.reward)
    options.reward_threads = std::max(options.reward_threads, entry.workers.value_or(0));
  options.on_engine_thread = [this] { at::set_num_threads(parts_.threads.generating); };
  options.on_trainer_thread = [this] { at::set_num_threads(parts_.threads.training); };
  return options;
}

ControllerOptions Run::controller_options() {
  const RolloutSettings& rollout = settings_.rollout;
  ControllerOptions options{
      .batch_groups = settings_.train_dataset.batch_size,
      .max_staleness = rollout.max_head_offpolicyness,
      .total_steps = total_steps_,
      .max_buffered_groups = rollout.max_buffered_groups,
      .group_size = settings_.gconfig.n_samples + settings_.actor.advantages.needs_baselines(),
      .samples_in_flight = 2 * rollout.max_concurrent_rollouts * num_engines(),
      .weight_sync_steps = rollout.weight_sync_steps,
      .interruptible = rollout.interruptible,
      .min_group = std::min(rollout.min_group, settings_.gconfig.n_samples),
      .max_consecutive_failures = settings_.reward_service.max_consecutive_failures,
      .evaluation_seconds = settings_.evaluator.timeout_seconds,
      .stall_seconds = settings_.stall_seconds,
      .max_generated_batches = settings_.actor.filters.max_num_gen_batches};
  if (settings_.actor.filters.dynamic_sampling)
    options.refuse = [this](const FinishedGroup& group) {
      return why_dropped(group.samples, settings_.actor, settings_.gconfig.max_new_tokens);
    };
  if (settings_.total_train_steps == 0)
    options.total_groups = settings_.total_train_epochs * static_cast<int64_t>(parts_.problems.size());
  options.evaluation_due = [this](int64_t step, bool is_last) { return evaluation_due(step, is_last); };
  options.checkpoint_due = [this](int64_t step) {
    const SaverSettings& saver = settings_.saver;
    const double minutes = seconds_between(last_checkpoint_, parts_.clock.now()) / 60;
    return (saver.freq_steps > 0 && step % saver.freq_steps == 0) ||
           (saver.freq_minutes > 0 && minutes >= saver.freq_minutes);
  };
  return options;
}

ControllerObserver Run::observer() {
  ControllerObserver observer;
  observer.on_batch = [this](const StepRecord& record) {
    if (settings_.saver.rollouts || settings_.compare_dense > 0)
      write_rollouts(folder_.rollout_file(record.step), record.batch);
  };
  observer.on_record = [this](int64_t step, const MetricValues& values) { write_record(step, values); };
  return observer;
}

bool Run::evaluation_due(int64_t step, bool is_last) const {
  if (parts_.valid.size() == 0) return false;
  const EvaluatorSettings& evaluator = settings_.evaluator;
  if (step == 0) return evaluator.at_start && !is_evaluated_at_start_;
  return (evaluator.freq_steps > 0 && step % evaluator.freq_steps == 0) || (evaluator.at_end && is_last);
}

// Runs on the engine's thread.
std::optional<MetricValues> Run::evaluate_now(const std::function<bool()>& stop) {
  EvaluationOptions options;
  options.sampling = settings_.evaluation_sampling();
  options.seed = static_cast<uint64_t>(settings_.seed);
  options.samples_in_flight = 2 * settings_.rollout.max_concurrent_rollouts * num_engines();
  options.collect.stop = [&] { return stopping() || stop(); };
  options.collect.on_progress = [&](int64_t done, int64_t total) {
    evaluated_.store(done);
    if (!is_asynchronous()) display_.set_activity(str("evaluation ", done, "/", total));
  };
  options.environment = parts_.environment.get();
  options.conversations = parts_.conversations ? &*parts_.conversations : nullptr;
  options.in_rounds = in_rounds();
  const auto result = evaluate(engine(), parts_.valid, parts_.encoder, *parts_.reward, options);
  evaluated_.store(0);
  if (!result) return std::nullopt;
  return to_metrics(*result);
}

// Runs on the writer's thread.
void Run::write_checkpoint(const ControllerState& state, bool copied) {
  if (!copied) snapshot_ = trainer_.snapshot(/*copies=*/false);
  Json json = {{"environment", thread_state()}, {"coefficients", snapshot_.coefficients}};
  {
    const MutexLock lock(order_mutex_);
    json["controller"] = to_json(state, order_);
  }
  save_run_checkpoint(folder_.path(), state.step, *snapshot_.model, snapshot_.optimizer, json,
                      {.source_model = settings_.model.path,
                       .keep_last = settings_.saver.keep,
                       .write_more = [this](const auto& directory) {
                         snapshot_.save_more(directory, settings_.model.path);
                       }});
  snapshot_ = {};
  last_checkpoint_ = parts_.clock.now();
  RunFolder::write_report(folder_.path());
}

void Run::write_record(int64_t step, const MetricValues& values) {
  metrics_->write(step, values);
  display_.write(step, values);
  log_debug(display_.line(step, values));  // for log.txt; users see the display
  write_timeline(/*all=*/false);
  follow_thread_change();
}

void Run::write_timeline(bool all) {
  std::string lines;
  for (TimelineSpan& span : timeline_.take(all)) {
    span.begin += timeline_begin_;
    span.end += timeline_begin_;
    lines += to_line(span) + "\n";
  }
  timeline_file_->append(lines);
}

// Takes over new thread counts, but not in a synchronous run: its steps must be repeatable, and other numbers
// of threads change the bits.
void Run::follow_thread_change() {
  const ThreadChange wanted = read_thread_change(folder_.path());
  if (wanted == thread_change_) return;
  thread_change_ = wanted;
  if (!is_asynchronous()) {
    log_warning("threads.json is ignored, because rollout.max_head_offpolicyness is 0");
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

void Run::show(const std::string& activity) {
  const int64_t evaluated = evaluated_.load();
  display_.set_activity(
      evaluated == 0 ? activity : str(activity, " (", evaluated, "/", parts_.valid.size(), " problems)"));
}

RunSummary Run::work() {
  controller_.start();
  drive(controller_, workers_, events_,
        {.stop = options_.stop, .on_activity = [this](const std::string& activity) { show(activity); }});
  workers_.join();  // a thread logs its result after it has posted that it is done
  write_timeline(/*all=*/true);
  display_.set_activity("");
  if (controller_.is_stopping()) {
    end_ranks();
    throw Interrupted(str("stopped after step ", controller_.num_steps(), " of ", total_steps_,
                          "; checkpoint in ", folder_.path().string(),
                          ". The same command continues from there"));
  }
  RunSummary summary = summarise();
  end_ranks();
  return summary;
}

// Times gradients of the last batches, alternately with and without the prefix tree. The first time of each
// is not counted, because it includes the warming up of caches.
std::optional<Comparison> Run::compare() {
  constexpr int kRepeats = 3;
  const std::vector<int64_t> steps = folder_.steps_with_rollouts();
  // If layers are sharded, a gradient needs the other ranks, and they compute only what the Trainer asks for.
  if (settings_.compare_dense == 0 || steps.empty() || parts_.unsharded) return {};
  Comparison out;
  out.num_batches = std::min(settings_.compare_dense, static_cast<int64_t>(steps.size()));
  std::vector<double> shared, dense;
  for (int64_t i = 0; i < out.num_batches; ++i) {
    const std::vector<Trajectory> batch =
        read_rollouts(folder_.rollout_file(steps[steps.size() - 1 - static_cast<size_t>(i)]));
    const auto timer = [&](const std::string& strategy) {
      return StepTimer(*parts_.model, {parts_.reference.get(), parts_.teacher.get()}, settings_.actor, batch,
                       {.strategy = strategy, .costs = trainer_.pass_costs()});
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
    summary.model =
        (settings_.actor.lora.enabled() ? checkpoint->adapter_directory() : checkpoint->model_directory())
            .string();
  return summary;
}

}  // namespace

RunSummary run_training(const RunSettings& settings, const RunOptions& options) {
  if (settings.threads > 0) at::set_num_threads(static_cast<int>(settings.threads));
  check_ranks(settings, options.ranks ? options.ranks->size() : 1);
  auto groups = std::make_unique<RankGroups>(options.ranks, settings);
  if (options.ranks && options.ranks->rank() > 0) {
    if (groups->is_engine) follow_generation(settings, options.engine_command, *groups);
    else follow_training(settings, *groups);
    return {};
  }
  auto run = std::make_unique<Run>(settings, options, std::move(groups));
  try {
    return run->work();
  } catch (const std::exception& error) {
    log_debug(str("the run ended: ", error.what()));  // for log.txt; the caller shows it to the user
    run->give_up();
    // A thread that hangs for ever cannot be joined, and everything that it uses must stay alive.
    if (dynamic_cast<const StallError*>(&error)) (void)run.release();
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
