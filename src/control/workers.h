// The threads of a run, which do what the controller asks (controller.h has a picture). No torch.
//
// A WorkQueue has threads that run the queued tasks. If the queue is empty, they run the idle task
// (idle_task), such as an engine's passes. Without threads, the caller of run_some() runs the tasks. So a
// synchronous run is the same code on one thread.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "control/worker_parts.h"
#include "report/timeline.h"

namespace bough {

// Events from any thread to the control thread.
class EventQueue {
 public:
  void post(Event event);
  // Returns the oldest event. Waits for one, at most `at_most`.
  std::optional<Event> take(Clock::Duration at_most);

 private:
  Mutex mutex_;
  CondVar posted_;
  std::deque<Event> events_ GUARDED_BY(mutex_);
};

struct WorkQueueOptions {
  const char* name = "";           // "engine"
  int64_t threads = 1;             // 0: run_some() runs the tasks
  std::function<void()> on_start;  // called first on each thread
  // Idle task, called if the queue is empty. Returns true if it did something and may have more to do. Needs
  // `threads` to be at most 1.
  std::function<bool()> idle_task;
};

class WorkQueue {
 public:
  // If a task throws, the exception is posted as WorkerFailed and the thread ends. Clock, queue and timeline
  // must outlive this object.
  WorkQueue(WorkQueueOptions options, const Clock& clock, EventQueue& events, Timeline& timeline);
  ~WorkQueue();  // calls join()
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // Queues a task. `name`, a literal, names the task in messages and in the timeline: "train".
  void post(const char* name, std::function<void()> work);
  void wake();  // calls the idle task again, because it may have something to do
  bool has_threads() const { return options_.threads > 0; }
  void join();  // the threads end after their current task; queued tasks do not run
  // Without threads: runs one task on the caller's thread. Returns false if there was none.
  bool run_some() { return options_.threads == 0 && do_some(); }

  Clock::Time last_progress() const { return Clock::Time(Clock::Duration(last_progress_.load())); }
  double idle_seconds() const { return idle_seconds_.load(); }  // sum over its threads
  std::string busy_with(Clock::Time now) const;                 // "engine (evaluate, 12 s)"; "" if it waits
  const char* name() const { return options_.name; }
  const char* current() const { return current_.load(); }  // the task's name; nullptr: it waits

 private:
  struct Piece {
    const char* name;
    std::function<void()> work;
  };
  void run();
  bool do_some();
  void progress() { last_progress_.store(clock_.now().time_since_epoch().count()); }

  const WorkQueueOptions options_;
  const Clock& clock_;
  EventQueue& events_;
  Timeline& timeline_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Piece> queue_ GUARDED_BY(mutex_);
  bool is_ending_ GUARDED_BY(mutex_) = false;
  bool is_woken_ GUARDED_BY(mutex_) = false;
  std::atomic<Clock::Duration::rep> last_progress_;
  std::atomic<const char*> current_ = nullptr;  // name of the task that began last and has not ended
  std::atomic<double> idle_seconds_ = 0;
  std::vector<std::thread> threads_;
};

struct WorkerOptions {
  GeneratorOptions generation;
  bool own_threads = false;  // for engine, trainer and writer
  int64_t reward_threads = 1;
  std::function<void()> on_engine_thread, on_trainer_thread;  // called first on these threads, if they exist
};

class RunWorkers final : public Workers, private ExternalRolloutSink {
 public:
  RunWorkers(const WorkerParts& parts, WorkerOptions options);
  ~RunWorkers() override;

  void begin(uint64_t id, std::vector<PartialRollout> partial) override;
  void take_weights() override;
  void evaluate(Clock::Time deadline) override;
  void cancel_evaluation() override { cancels_evaluation_.store(true); }
  void save_running() override;
  void score(GroupPointer group) override;
  void publish(int64_t version) override;
  void train(TrainOrder order) override;
  void take_snapshot() override;
  void write_checkpoint(ControllerState state, bool copied) override;

  EngineStatistics engine_statistics() const override;
  double engine_idle_seconds() const override { return engine_.idle_seconds(); }
  Clock::Time last_progress() const override;
  std::string busy_with() const override;
  std::string waits_for_external() const override {
    return parts_.external ? parts_.external->waits_for() : "";
  }
  MetricValues external_metrics() const override {
    return parts_.external ? parts_.external->metrics() : MetricValues();
  }

  // By thread, the name of its task as in the timeline: {"engine", "generate"}; {"trainer", ""}: it waits.
  std::vector<std::pair<std::string, std::string>> doing() const;

  EventQueue& events() { return events_; }
  Timeline& timeline() { return timeline_; }  // of all workers, from the construction of this object on
  // Without threads: runs one task of one queue. Returns false if there was none.
  bool run_some();
  void join();  // ends the threads; no further calls are allowed
  // Queues `work` for the engine's or the trainer's thread, which runs it between two tasks.
  void on_engine(std::function<void()> work) { engine_.post("settings", std::move(work)); }
  void on_trainer(std::function<void()> work) { trainer_.post("settings", std::move(work)); }

 private:
  struct BegunTasks final : TaskSource {
    std::optional<GroupTask> next() override;
    std::deque<GroupTask> queue;
  };
  // Outcomes of external groups.
  void finished(FinishedGroup group) override;
  void failed(uint64_t id, const std::string& reason) override;
  void wake() override;

  bool pass();  // the engine's idle task: takes new weights or runs a pass
  bool take_weights_now();

  const WorkerParts parts_;
  EventQueue events_;
  Timeline timeline_;
  BegunTasks tasks_;  // used on the engine's thread only, like all up to the blank line
  Generator generator_;
  bool wants_weights_ = false;
  std::optional<WeightUpdate> weights_;  // that the engine holds
  EngineStatistics of_evaluations_;      // not counted for the run

  std::atomic<bool> cancels_evaluation_ = false;
  mutable Mutex statistics_mutex_;
  EngineStatistics statistics_ GUARDED_BY(statistics_mutex_);

  WorkQueue engine_, trainer_, writer_, rewards_;  // last members: their threads use the other members
};

// drive() passes events to the controller until it is finished, and TimePassed if none comes. Without threads
// it also runs the workers' tasks. Throws what the controller throws.
struct DriveOptions {
  std::function<bool()> stop;                                    // checked between events
  std::function<void()> between_events;                          // may call Controller::on()
  std::function<void(const std::string& activity)> on_activity;  // when it changed, and while waiting
};
void drive(Controller& controller, RunWorkers& workers, const DriveOptions& options);

}  // namespace bough
