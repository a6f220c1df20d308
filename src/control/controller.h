// The run as a state machine: what has happened comes in as events, what is to be done goes out as commands.
// It owns no thread and no clock, computes nothing and includes no torch: the run (run.h), the tests and the
// simulator (run_simulator.h) drive the same code.
//
//   begin ─▶ engine ── GroupGenerated ─▶ score ─▶ rewards ── GroupScored ─▶ buffer ─▶ train ─▶ trainer ─┐
//     ▲        ▲                                               └─▶ dropped, by reason                   │
//   gate       └── take_weights ◀── between two passes ◀── published by the trainer ◀── TrainingDone ───┘
//
// Threads (workers.h), what they post, and who waits for whom:
//
//   control   on(event), for every event, in the order of the queue; waits for the next, at most kPoll, then
//             looks at deadlines and at whether the user wants to stop
//   engine    passes, weights, evaluations; waits for a command where nothing is in flight
//   rewards   a group each; the reward function has time limits of its own
//   trainer   a batch each, publication, the copy for a checkpoint; waits for a command
//   writer    checkpoint files; waits for a command
//
// A worker waits for its own queue only, and whoever puts something there wakes it. Nobody waits for a worker
// but the control thread, and for that there are deadlines: evaluation_seconds, after which the engine gives
// an evaluation up and the run goes on; stall_seconds, after which the control thread ends a run in which
// nothing has happened, with a message that names who was busy with what. With eta 0 control, engine and
// trainer are one thread: the same code, and nothing computes beside the trainer.
//
// Places of a group, one at a time: running, awaiting its reward, in the buffer, being trained on; at the end
// trained or dropped. check_integrity() counts: drawn = trained + training + buffered + awaiting + running +
// dropped.
//
// The staleness limiter (asynchrony.md; AReaL, eq. 3) is derived from these places: a group may begin while
// B·(steps begun) + buffered + awaiting + running < min(i + eta + 1, steps of the run)·B, with i the version
// that the engine holds. A dropped group gives its slot back; with eta 0 others are drawn for it once all
// that was drawn before is scored, so that what the engine computes together does not depend on how long
// rewards take. Where nothing more can be drawn and nothing runs, what the buffer has is a last, shorter
// batch.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "control/generator.h"
#include "env/group_filter.h"
#include "report/metrics.h"

namespace bough {

using GroupPointer = std::shared_ptr<const FinishedGroup>;

// Nothing happens any more, and no thread can be waited for.
struct StallError : IoError {
  using IoError::IoError;
};

// The version that drew the group's oldest token; none: no policy has drawn any.
std::optional<int64_t> oldest_version(const FinishedGroup& group);

// What a step was; its evaluation may be missing.
struct StepRecord {
  int64_t step = 0;  // 1 is the first
  MetricValues metrics;
  std::vector<Trajectory> batch;  // with prompt, completion and answer
};

// ---- Events.

struct GroupGenerated {
  GroupPointer group;
};
// Nothing came of a group that was begun: agents did not end enough of its samples, say.
struct GroupFailed {
  uint64_t id = 0;
  std::string reason;
};
struct GroupScored {
  uint64_t id = 0;
  std::vector<RewardResult> rewards;     // one a sample; none: the group has no problem
  std::optional<FilterVerdict> verdict;  // of the user's filter, where there is one
};
struct WeightsTaken {
  int64_t version = 0;
  int64_t interrupted_samples = 0;  // that were running
};
struct TrainingDone {
  StepRecord record;
};
struct SnapshotTaken {};  // of weights and optimizer, for a checkpoint
struct EvaluationDone {
  std::optional<MetricValues> metrics;  // none: it was cancelled
};
struct RunningSaved {
  std::vector<RunningRequest> requests;
};
struct CheckpointWritten {
  std::string error;  // why it was not: a full disk, say
};
struct WorkerFailed {
  std::exception_ptr error;
};
struct StopRequested {};
struct TimePassed {};
using Event =
    std::variant<GroupGenerated, GroupFailed, GroupScored, WeightsTaken, TrainingDone, SnapshotTaken,
                 EvaluationDone, RunningSaved, CheckpointWritten, WorkerFailed, StopRequested, TimePassed>;

// ---- Commands.

struct TrainOrder {
  int64_t step = 0;
  std::vector<GroupPointer> groups;  // oldest first
  bool publish = false;              // the weights, as version `step`, when they are trained
};

// What the controller is, at the end of a step: goes into a checkpoint.
struct ControllerState {
  int64_t step = 0;
  int64_t next_position = 0;
  std::map<uint64_t, GroupPointer> buffered, awaiting;
  std::map<uint64_t, std::vector<BegunSample>> running;  // as far as they were generated
  std::set<int64_t> unfinished;  // begun and in none of these: to be generated again from the start
  std::optional<MetricValues> unwritten_metrics;  // of `step`, whose evaluation is missing
};
Json to_json(const ControllerState& state, const ProblemOrder& problems);
// UserError where the state is damaged, or of other problems or another seed (ProblemOrder::restore).
ControllerState controller_state_from_json(const Json& json, ProblemOrder& problems);

// Those who do the work. Each call returns at once; what comes of it is an event.
class Workers {
 public:
  virtual ~Workers() = default;
  // Engine, in this order, between two of its passes.
  virtual void begin(uint64_t id, std::vector<BegunSample> begun) = 0;  // ─▶ GroupGenerated, or GroupFailed
  virtual void take_weights() = 0;  // those published last ─▶ WeightsTaken
  // With the weights that it holds, training samples parked, given up at the deadline ─▶ EvaluationDone
  virtual void evaluate(Clock::Time deadline) = 0;
  virtual void cancel_evaluation() = 0;
  virtual void save_running() = 0;  // ─▶ RunningSaved
  // Rewards.
  virtual void score(GroupPointer group) = 0;  // ─▶ GroupScored
  // Trainer.
  virtual void publish(int64_t version) = 0;  // at once, the trainer idle
  virtual void train(TrainOrder order) = 0;   // ─▶ TrainingDone
  virtual void take_snapshot() = 0;           // ─▶ SnapshotTaken
  // Writer. copied: of the snapshot; else of the model itself, which nothing changes meanwhile.
  virtual void write_checkpoint(ControllerState state, bool copied) = 0;  // ─▶ CheckpointWritten

  // For the controller's eyes.
  virtual EngineStatistics engine_statistics() const = 0;  // evaluations left out
  virtual double engine_idle_seconds() const = 0;
  virtual Clock::Time last_progress() const = 0;  // when a worker last finished or began a piece of work
  virtual std::string busy_with() const = 0;      // "the engine with a pass (12 s), ..."
  // What groups from outside wait for (outside.h), which is no standstill of the run's; "": nothing.
  virtual std::string waits_for_outside() const { return ""; }
  virtual MetricValues outside_metrics() const { return {}; }  // counts, since the process began
};

// Those who look on: called by on(), on the control thread.
struct ControllerObserver {
  std::function<void(const StepRecord&)> on_batch;                   // trained, its metrics not complete
  std::function<void(int64_t step, const MetricValues&)> on_record;  // complete, in order of steps
};

struct ControllerOptions {
  int64_t batch_groups = 1;   // B
  int64_t max_staleness = 0;  // eta
  int64_t total_steps = 1;
  int64_t total_groups = 0;         // that may be drawn; 0: no end
  int64_t max_buffered_groups = 0;  // finished or awaiting a reward; 0: the gate's own bound
  int64_t group_size = 1;           // samples
  int64_t samples_in_flight = std::numeric_limits<int64_t>::max();
  int64_t weight_sync_steps = 1;
  // Running samples go on under new weights. False: they finish on the old ones, and none begins before that.
  bool interruptible = true;
  int64_t min_group = 2;                   // samples with a reward; a group with fewer is dropped
  int64_t max_consecutive_failures = 256;  // of rewards, or of the filter: so many in a row end the run
  double evaluation_seconds = 3600;        // an evaluation that takes longer is cancelled
  double stall_seconds = 0;                // a run in which nothing happens for so long ends; 0: never
  // After this step; 0: before the first. None: never.
  std::function<bool(int64_t step, bool is_last)> evaluation_due;
  std::function<bool(int64_t step)> checkpoint_due;  // after the last one it is, whatever this says
  // Filters refuse groups and others are drawn in their place, at most so many batches for a step in all;
  // then the step is trained on what there is, and the run ends where that is nothing. 0: no bound.
  int64_t max_generated_batches = 0;
  // Of a scored group: why it is not trained on, if it is not. The user's filter is asked besides.
  std::function<std::optional<std::string>(const FinishedGroup&)> refuse;
};

class Controller {
 public:
  // `workers` and `clock` must outlive it. Nothing happens before start().
  Controller(Workers& workers, const Clock& clock, ControllerOptions options, ControllerObserver observer);

  // As of a checkpoint; before start().
  void restore(ControllerState state);
  void start();
  // Throws what a worker threw, IoError where rewards fail one after the other or nothing happens any more.
  void on(Event event);

  bool is_finished() const { return is_finished_; }  // all is done, or stopped and saved
  bool is_stopping() const { return is_stopping_; }
  int64_t num_steps() const { return num_steps_; }  // done, since the run began
  std::string activity() const;                     // "train 12 · ready 3/16 groups, 40 samples running"

  struct Counts {
    int64_t drawn = 0, trained = 0, training = 0, buffered = 0, awaiting = 0, running = 0, dropped = 0;
    int64_t version = -1;  // that the engine holds
    bool operator==(const Counts&) const = default;
  };
  Counts counts() const;  // drawn, trained, dropped: since start(), with what the checkpoint brought
  const std::map<std::string, int64_t>& dropped_by_reason() const { return dropped_; }
  void check_integrity() const;

 private:
  enum class Trainer { kIdle, kTraining, kSnapshotting };
  enum class Evaluation { kNone, kWanted, kRunning };
  struct PendingRecord {
    int64_t step = 0;
    MetricValues metrics;
    bool awaits_evaluation = false;
  };
  // A checkpoint on its way to the disk.
  struct Checkpoint {
    ControllerState state;
    std::set<uint64_t> running;  // of which the engine has not said yet how far they are
    bool copied = false, has_running = false, has_weights = false, is_written = false;
  };

  void handle(GroupGenerated& event);
  void handle(GroupFailed& event);
  void handle(GroupScored& event);
  void handle(WeightsTaken& event);
  void handle(TrainingDone& event);
  void handle(SnapshotTaken& event);
  void handle(EvaluationDone& event);
  void handle(RunningSaved& event);
  void handle(CheckpointWritten& event);
  void handle(WorkerFailed& event);
  void handle(StopRequested& event);
  void handle(TimePassed& event);

  bool computes_beside() const { return options_.max_staleness > 0; }
  bool gate_is_open() const;
  bool can_draw() const;  // now or later
  // Filters have refused so many groups since the last batch that no further one may be drawn for this one.
  bool has_drawn_enough() const;
  bool is_drained() const;
  bool is_over() const;
  bool evaluation_due(int64_t step, bool is_last) const {
    return options_.evaluation_due && options_.evaluation_due(step, is_last);
  }
  void decide();
  void advance_engine();
  void begin_groups();
  void begin_training();
  void write_records();
  void begin_checkpoint();
  void advance_checkpoint();
  void finish_if_done();
  void drop(uint64_t id, const std::string& reason);
  void refuse(uint64_t id, const std::string& reason);
  void count_failures(const std::vector<RewardResult>& rewards);
  void count_filter_failures(const FilterVerdict& verdict);
  void add_own_metrics(StepRecord& record);
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_buffered() const { return static_cast<int64_t>(buffered_.size()); }
  int64_t num_awaiting() const { return static_cast<int64_t>(awaiting_.size()); }

  Workers& workers_;
  const Clock& clock_;
  const ControllerOptions options_;
  const ControllerObserver observer_;

  // Places of groups, by id.
  int64_t next_position_ = 0;
  std::deque<int64_t> again_;  // begun by a process that ended; before any other
  std::map<uint64_t, std::vector<BegunSample>> begun_before_;  // of again_, where something is known
  std::set<uint64_t> running_;
  std::map<uint64_t, GroupPointer> awaiting_, buffered_;
  std::vector<uint64_t> training_;
  bool training_publishes_ = false;
  int64_t num_drawn_ = 0, num_trained_ = 0;
  int64_t round_left_ = 0;           // with eta 0: that may be begun before all of them are scored
  int64_t refused_since_batch_ = 0;  // by filters
  std::map<std::string, int64_t> dropped_;

  // Workers, as far as events have told.
  Trainer trainer_ = Trainer::kIdle;
  int64_t num_steps_ = 0;
  int64_t published_version_ = -1, engine_version_ = -1;
  bool has_asked_for_weights_ = false;
  Evaluation evaluation_ = Evaluation::kNone;
  int64_t evaluation_step_ = 0;
  std::deque<PendingRecord> records_;
  std::optional<MetricValues> unwritten_;  // of a step whose evaluation was cancelled by a stop
  std::optional<Checkpoint> checkpoint_;
  int64_t checkpointed_step_ = -1;
  bool checkpoint_is_overdue_ = false;  // it was due while another was on its way
  bool is_stopping_ = false, is_finished_ = false;
  int64_t consecutive_failures_ = 0, consecutive_filter_failures_ = 0;

  // Of the step that is being collected.
  std::optional<Clock::Time> step_begin_, has_samples_since_;
  Clock::Time train_begin_, trainer_free_since_, last_event_;
  double stall_warned_seconds_ = 0;
  struct Sums {
    EngineStatistics engine;
    double engine_idle = 0;
    int64_t interrupted = 0, reward_failures = 0;
    std::map<std::string, int64_t> dropped;
    MetricValues outside;
  };
  Sums sums_, sums_at_step_;
};

}  // namespace bough
