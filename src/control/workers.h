// The threads of a run: those who do what the controller asks (controller.h draws them). No torch.
//
// A WorkQueue has threads that do what is queued and, where nothing is, work of their own (an engine's
// passes). Without threads it is driven by whoever calls run_some(): so a synchronous run is the same code on
// one thread.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "control/controller.h"
#include "control/outside.h"
#include "report/timeline.h"

namespace bough {

// What has happened, from any thread to the control thread.
class EventQueue {
 public:
  void post(Event event);
  // The oldest; waits for it `at_most` so long.
  std::optional<Event> take(Clock::Duration at_most);

 private:
  Mutex mutex_;
  CondVar posted_;
  std::deque<Event> events_ GUARDED_BY(mutex_);
};

struct WorkQueueOptions {
  const char* name = "";           // "engine"
  int64_t threads = 1;             // 0: driven by run_some()
  std::function<void()> on_start;  // on each thread, first of all
  // Where the queue is empty: true if it did something, and may have more to do. For one thread at most.
  std::function<bool()> own_work;
};

class WorkQueue {
 public:
  // What work throws is posted as WorkerFailed, and the thread ends. Clock, queue and timeline must outlive
  // it.
  WorkQueue(WorkQueueOptions options, const Clock& clock, EventQueue& events, Timeline& timeline);
  ~WorkQueue();  // as join() does
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  // `name`, a literal, says what it is, in messages and in the timeline: "train".
  void post(const char* name, std::function<void()> work);
  void wake();  // there may be work of its own again
  bool has_threads() const { return options_.threads > 0; }
  void join();  // its threads end after the pieces of work that are being done; what is queued is not
  // Without threads: one piece of work on the caller's. False: there was none.
  bool run_some() { return options_.threads == 0 && do_some(); }

  Clock::Time last_progress() const { return Clock::Time(Clock::Duration(last_progress_.load())); }
  double idle_seconds() const { return idle_seconds_.load(); }  // of all its threads
  std::string busy_with(Clock::Time now) const;  // "engine (evaluate, 12 s)"; "" where it waits

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
  std::atomic<const char*> current_ = nullptr;  // begun last and not ended
  std::atomic<double> idle_seconds_ = 0;
  std::vector<std::thread> threads_;
};

// What the workers work with. Everything but the engine's parts may be called from threads of its own.
struct WorkerParts {
  Engine& engine;
  WeightChannel& weights;
  const TextCodec& codec;
  RewardFunction& reward;
  GroupFilter* filter = nullptr;  // asked once the rewards are there; null: there is none
  const Clock& clock;
  EventQueue& events;
  Timeline& timeline;
  std::function<GroupTask(uint64_t id)> task_of;  // the group at a position in the order of problems
  // Trainer: weights, their publication left out; metrics and the batch as it was trained.
  std::function<StepRecord(const TrainOrder&)> train;
  std::function<void()> take_snapshot;
  // Writer.
  std::function<void(const ControllerState&, bool copied)> write_checkpoint;
  // Engine's thread, the engine idle; nullopt where `stop` said so.
  std::function<std::optional<MetricValues>(const std::function<bool()>& stop)> evaluate;
  // Of samples that are conversations: both or none.
  Environment* environment = nullptr;
  const ConversationFormat* conversations = nullptr;
  OutsideGroups* outside = nullptr;  // groups are made there, and the engine's passes are its own
};

struct WorkerOptions {
  GeneratorOptions generation;
  bool own_threads = false;  // of engine, trainer and writer
  int64_t reward_threads = 1;
  std::function<void()> on_engine_thread, on_trainer_thread;  // where they have one, first of all
};

class RunWorkers final : public Workers {
 public:
  RunWorkers(WorkerParts parts, WorkerOptions options);
  ~RunWorkers() override;

  void begin(uint64_t id, std::vector<BegunSample> begun) override;
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
  std::string waits_for_outside() const override { return parts_.outside ? parts_.outside->waits_for() : ""; }
  MetricValues outside_metrics() const override {
    return parts_.outside ? parts_.outside->metrics() : MetricValues();
  }

  // Without threads: one piece of work. False: there was none.
  bool run_some();
  void join();  // the threads end; then nothing may be asked for any more
  // Runs something on the engine's or the trainer's thread, between two pieces of work.
  void on_engine(std::function<void()> work) { engine_.post("settings", std::move(work)); }
  void on_trainer(std::function<void()> work) { trainer_.post("settings", std::move(work)); }

 private:
  bool pass();  // of the engine
  void start_outside();
  bool take_weights_now();

  const WorkerParts parts_;
  std::deque<GroupTask> tasks_;  // begun; of the engine's thread, as all until the next blank line
  Generator generator_;
  bool wants_weights_ = false;
  std::optional<WeightUpdate> weights_;  // that the engine holds
  EngineStatistics of_evaluations_;      // which are not the run's

  std::atomic<bool> cancels_evaluation_ = false;
  mutable Mutex statistics_mutex_;
  EngineStatistics statistics_ GUARDED_BY(statistics_mutex_);

  WorkQueue engine_, trainer_, writer_, rewards_;  // last: their threads use the others
};

// Feeds the controller until it is finished: events, and time where none comes; without threads it does the
// work in between. Throws what the controller throws.
struct DriveOptions {
  std::function<bool()> stop;                                    // looked at between events
  std::function<void(const std::string& activity)> on_activity;  // where it changed, and while it waits
};
void drive(Controller& controller, RunWorkers& workers, EventQueue& events, const DriveOptions& options);

}  // namespace bough
