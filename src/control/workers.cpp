#include "control/workers.h"

#include <algorithm>
#include <utility>

namespace bough {

void EventQueue::post(Event event) {
  {
    const MutexLock lock(mutex_);
    events_.push_back(std::move(event));
  }
  posted_.notify_one();
}

std::optional<Event> EventQueue::take(Clock::Duration at_most) {
  MutexLock lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + at_most;
  while (events_.empty() && posted_.wait_until(mutex_, deadline)) {
  }
  if (events_.empty()) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

WorkQueue::WorkQueue(WorkQueueOptions options, const Clock& clock, EventQueue& events, Timeline& timeline)
    : options_(std::move(options)),
      clock_(clock),
      events_(events),
      timeline_(timeline),
      last_progress_(clock.now().time_since_epoch().count()) {
  for (int64_t i = 0; i < options_.threads; ++i) threads_.emplace_back([this] { run(); });
}

WorkQueue::~WorkQueue() {
  join();
}

void WorkQueue::join() {
  {
    const MutexLock lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void WorkQueue::wake() {
  {
    const MutexLock lock(mutex_);
    is_woken_ = true;
  }
  changed_.notify_one();
}

void WorkQueue::post(const char* name, std::function<void()> work) {
  {
    const MutexLock lock(mutex_);
    queue_.push_back({name, std::move(work)});
  }
  changed_.notify_one();
}

bool WorkQueue::do_some() {
  Piece piece{"generate", options_.idle_task};
  bool is_queued = false;
  {
    const MutexLock lock(mutex_);
    is_queued = !queue_.empty();
    if (is_queued) {
      piece = std::move(queue_.front());
      queue_.pop_front();
    }
  }
  if (!piece.work && !options_.idle_task) return false;
  const Clock::Time begin = clock_.now();
  progress();
  current_.store(piece.name);
  bool did = true;
  if (is_queued) piece.work();
  else did = options_.idle_task();
  current_.store(nullptr);
  progress();
  if (did) timeline_.add(options_.name, piece.name, begin, clock_.now());
  return did;
}

void WorkQueue::run() {
  try {
    if (options_.on_start) options_.on_start();
    while (true) {
      {
        const MutexLock lock(mutex_);
        if (is_ending_) return;
      }
      if (do_some()) continue;
      const Clock::Time begin = clock_.now();
      {
        MutexLock lock(mutex_);
        while (!is_ending_ && !is_woken_ && queue_.empty()) changed_.wait(mutex_);
        is_woken_ = false;
      }
      idle_seconds_.fetch_add(seconds_between(begin, clock_.now()));
    }
  } catch (...) {
    current_.store(nullptr);
    events_.post(WorkerFailed{std::current_exception()});
  }
}

std::string WorkQueue::busy_with(Clock::Time now) const {
  const char* current = current_.load();
  if (!current) return "";
  return str(options_.name, " (", current, ", ", static_cast<int64_t>(seconds_between(last_progress(), now)),
             " s)");
}

RunWorkers::RunWorkers(const WorkerParts& parts, WorkerOptions options)
    : parts_(parts),
      timeline_(parts.clock.now()),
      generator_({parts_.engine, &parts_.codec, parts_.environment, parts_.conversations}, tasks_,
                 options.generation),
      engine_({"engine", options.own_threads ? 1 : 0, options.on_engine_thread, [this] { return pass(); }},
              parts_.clock, events_, timeline_),
      trainer_({"trainer", options.own_threads ? 1 : 0, options.on_trainer_thread, {}}, parts_.clock, events_,
               timeline_),
      writer_({"writer", options.own_threads ? 1 : 0, {}, {}}, parts_.clock, events_, timeline_),
      rewards_({"rewards", options.reward_threads, {}, {}}, parts_.clock, events_, timeline_) {
  if (parts_.external) parts_.external->start(*this);
}

RunWorkers::~RunWorkers() {
  join();
}

std::optional<GroupTask> RunWorkers::BegunTasks::next() {
  if (queue.empty()) return std::nullopt;
  GroupTask task = std::move(queue.front());
  queue.pop_front();
  return task;
}

// ---- External groups.

void RunWorkers::finished(FinishedGroup group) {
  events_.post(GroupGenerated{std::make_shared<const FinishedGroup>(std::move(group))});
}

void RunWorkers::failed(uint64_t id, const std::string& reason) {
  events_.post(GroupFailed{id, reason});
}

// If the engine has no thread, the control thread makes its passes, and waits for an event.
void RunWorkers::wake() {
  if (engine_.has_threads()) engine_.wake();
  else events_.post(TimePassed{});
}

// ---- Engine.

bool RunWorkers::take_weights_now() {
  if (!parts_.engine.ready_for_weights()) return false;
  const std::optional<WeightUpdate> update = parts_.weights.take();
  if (!update) return false;  // the weights are being written: try again after the next pass
  const int64_t interrupted =
      parts_.external ? parts_.external->samples_in_flight() : generator_.samples_in_flight();
  parts_.engine.update_weights(*update);
  weights_ = update;
  wants_weights_ = false;
  events_.post(WeightsTaken{update->version, interrupted});
  return true;
}

bool RunWorkers::pass() {
  bool did = wants_weights_ && take_weights_now();
  const bool has_work = weights_ && (parts_.external || !tasks_.queue.empty() || !generator_.idle());
  if (!has_work || (parts_.external && !parts_.external->pass())) {
    if (wants_weights_ && !did) std::this_thread::sleep_for(std::chrono::microseconds(50));
    return did || wants_weights_;
  }
  std::vector<FinishedGroup> groups;
  if (!parts_.external) groups = generator_.step();
  {
    const MutexLock lock(statistics_mutex_);
    statistics_ = parts_.engine.statistics() - of_evaluations_;
  }
  for (FinishedGroup& group : groups) finished(std::move(group));
  return true;
}

void RunWorkers::begin(uint64_t id, std::vector<PartialRollout> partial) {
  if (parts_.external) return parts_.external->offer(parts_.tasks.task(id));
  engine_.post("begin", [this, id, partial = std::move(partial)]() mutable {
    GroupTask task = parts_.tasks.task(id);
    task.partial = std::move(partial);
    tasks_.queue.push_back(std::move(task));
  });
}

void RunWorkers::take_weights() {
  engine_.post("take weights", [this] {
    wants_weights_ = true;
    take_weights_now();
  });
}

void RunWorkers::evaluate(Clock::Time deadline) {
  cancels_evaluation_.store(false);
  engine_.post("evaluate", [this, deadline] {
    const EngineStatistics before = parts_.engine.statistics() - of_evaluations_;
    parts_.engine.park();
    std::optional<MetricValues> metrics;
    try {
      metrics = parts_.evaluator->evaluate(
          [this, deadline] { return cancels_evaluation_.load() || parts_.clock.now() > deadline; });
    } catch (...) {
      parts_.engine.unpark();
      throw;
    }
    parts_.engine.unpark();
    // Evicts the prefixes that the evaluation cached. They would change how passes are composed, and with it
    // the last bits of later samples, which must depend on the weights alone.
    parts_.engine.update_weights(*weights_);
    of_evaluations_ = parts_.engine.statistics() - before;
    events_.post(EvaluationDone{std::move(metrics)});
  });
}

void RunWorkers::save_running() {
  engine_.post("save running samples", [this] {
    // Conversations cannot resume midway, because their environments and agents cannot. They begin again.
    const bool begins_again = parts_.environment || parts_.external;
    events_.post(RunningSaved{begins_again ? std::vector<RunningRequest>() : parts_.engine.running()});
  });
}

// ---- Rewards, training, checkpoints.

void RunWorkers::score(GroupPointer group) {
  rewards_.post("reward", [this, group = std::move(group)]() mutable {
    GroupScored scored{.id = group->id, .rewards = {}, .verdict = {}};
    if (!group->problem) {  // the group comes from a checkpoint
      FinishedGroup own = *group;
      own.problem = parts_.tasks.task(group->id).problem;
      group = std::make_shared<const FinishedGroup>(std::move(own));
    }
    scored.rewards = bough::score({group.get(), 1}, parts_.reward);
    if (parts_.filter && group->problem && !scored.rewards.empty()) {
      std::vector<Trajectory> samples = ScoredGroup{group, scored.rewards}.rows();
      std::erase_if(samples, [](const Trajectory& sample) { return sample.baseline; });
      scored.verdict = parts_.filter->judge(*group->problem, samples);
    }
    events_.post(std::move(scored));
  });
}

void RunWorkers::publish(int64_t version) {
  parts_.weights.publish(static_cast<int32_t>(version));
}

void RunWorkers::train(TrainOrder order) {
  trainer_.post("train", [this, order = std::move(order)] {
    StepRecord record = parts_.trainer.train(order);
    const Clock::Time trained = parts_.clock.now();
    if (order.publish) publish(order.step);
    record.metrics["time/publish"] = seconds_between(trained, parts_.clock.now());
    events_.post(TrainingDone{std::move(record)});
  });
}

void RunWorkers::take_snapshot() {
  trainer_.post("copy weights", [this] {
    parts_.checkpoints.take_snapshot();
    events_.post(SnapshotTaken{});
  });
}

void RunWorkers::write_checkpoint(ControllerState state, bool copied) {
  writer_.post("checkpoint", [this, state = std::move(state), copied] {
    CheckpointWritten written;
    try {
      parts_.checkpoints.write(state, copied);
    } catch (const IoError& error) {
      written.error = error.what();
    }
    events_.post(std::move(written));
  });
}

void RunWorkers::join() {
  cancel_evaluation();
  parts_.reward.cancel();
  if (parts_.filter) parts_.filter->cancel();
  for (WorkQueue* queue : {&engine_, &trainer_, &writer_, &rewards_}) queue->join();
  if (parts_.external) parts_.external->close();
}

EngineStatistics RunWorkers::engine_statistics() const {
  const MutexLock lock(statistics_mutex_);
  return statistics_;
}

Clock::Time RunWorkers::last_progress() const {
  return std::max(
      {engine_.last_progress(), trainer_.last_progress(), writer_.last_progress(), rewards_.last_progress()});
}

std::string RunWorkers::busy_with() const {
  const Clock::Time now = parts_.clock.now();
  std::string text;
  for (const WorkQueue* queue : {&engine_, &trainer_, &writer_, &rewards_}) {
    const std::string busy = queue->busy_with(now);
    if (!busy.empty()) text += (text.empty() ? "" : ", ") + busy;
  }
  text = text.empty() ? "no thread computes" : "busy: " + text;
  const std::string external = waits_for_external();
  return external.empty() ? text : str(text, "; ", external);
}

std::vector<std::pair<std::string, std::string>> RunWorkers::doing() const {
  std::vector<std::pair<std::string, std::string>> out;
  for (const WorkQueue* queue : {&engine_, &trainer_, &rewards_, &writer_}) {
    const char* current = queue->current();
    out.emplace_back(queue->name(), current ? current : "");
  }
  return out;
}

bool RunWorkers::run_some() {
  return trainer_.run_some() || writer_.run_some() || engine_.run_some();
}

void drive(Controller& controller, RunWorkers& workers, const DriveOptions& options) {
  constexpr auto kPoll = std::chrono::milliseconds(50);
  std::string shown;
  // True while the control thread may have something to do: events, or tasks of queues without a thread.
  bool works_here = true;
  while (!controller.is_finished()) {
    if (options.between_events) options.between_events();
    if (options.stop && options.stop() && !controller.is_stopping()) controller.on(StopRequested{});
    if (controller.is_finished()) break;
    std::optional<Event> event =
        workers.events().take(works_here ? Clock::Duration(0) : Clock::Duration(kPoll));
    const bool has_happened = event.has_value();
    if (event) controller.on(std::move(*event));
    else if (!works_here) controller.on(TimePassed{});
    if (options.on_activity) {
      std::string activity = controller.activity();
      if (activity != shown || !has_happened) options.on_activity(shown = std::move(activity));
    }
    works_here = has_happened || workers.run_some();
  }
}

}  // namespace bough
