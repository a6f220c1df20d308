// The run as a state machine: events come in, commands to the workers go out. The controller owns no thread
// and no clock, computes nothing and includes no torch. The run (run.h), the tests and the simulator
// (run_simulator.h) drive the same code.
//
//   begin ─▶ engine ── GroupGenerated ─▶ score ─▶ rewards ── GroupScored ─▶ buffer ─▶ train ─▶ trainer ─┐
//     ▲        ▲                                               └─▶ dropped, by reason                   │
//  limiter     └── take_weights ◀── between two passes ◀── published by the trainer ◀── TrainingDone ───┘
//
// Threads (workers.h), what they do, and what they wait for:
//
//   control   on(event), for every event, in the order of the queue. Waits for the next event, at most kPoll,
//             then checks the deadlines and whether the user wants to stop
//   engine    passes, weights, evaluations. Waits for a command if nothing is in flight
//   rewards   one group at a time per thread. The reward function has its own time limits
//   trainer   one batch at a time, publication, the copy for a checkpoint. Waits for a command
//   writer    checkpoint files. Waits for a command
//
// A worker waits only for its own queue, and posting to the queue wakes it. Only the control thread waits for
// workers, and it has two deadlines. After evaluation_seconds the engine gives an evaluation up and the run
// goes on. If nothing has happened for stall_seconds, the control thread ends the run, with a message that
// names the busy threads and their tasks. With eta (max_staleness) 0 or fixed_staleness, control, engine and
// trainer are one thread: the same code. Engine and trainer take turns: training begins when no group runs,
// awaits its reward or can start.
// States of a group, one at a time: running, awaiting its reward, buffered, in training; at the end trained
// or dropped. check_integrity() checks: sampled (all started groups) = trained + training + buffered +
// awaiting + running + dropped.
//
// The staleness limiter (asynchrony.md; AReaL, eq. 3) follows from these states. A group may start while
// B·(steps whose training has begun) + buffered + awaiting + running < min(i + eta + 1, steps of the run)·B.
// B is the number of groups in a batch, and i the version that the engine holds. A dropped group no longer
// counts, so another group may start. If engine and trainer take turns, groups start in place of dropped ones
// only when all groups started before are scored. So which samples the engine computes together does not
// depend on how long rewards take. With fixed_staleness, eta batches are buffered when training begins. Step
// n (from 1) trains on the oldest batch, which version max(0, n - 1 - eta) sampled. If no group can start any
// more and none is running or awaiting its reward, the buffered groups are the last, shorter batch.
#pragma once

#include <deque>
#include <exception>
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

// The generator makes a group's samples once. Nobody changes them afterwards, because the controller, the
// reward threads and a checkpoint that is being written share them.
using GroupPointer = std::shared_ptr<const FinishedGroup>;

// A group with the rewards of its samples, which are stored beside the samples.
struct ScoredGroup {
  GroupPointer group;
  // One per sample. Empty: the samples hold their rewards, because the group comes from a checkpoint.
  std::vector<RewardResult> rewards;

  bool is_valid(size_t i) const { return rewards.empty() ? group->samples[i].valid : rewards[i].valid; }
  // Copies a sample, or all samples, with their rewards.
  Trajectory row(size_t i) const;
  std::vector<Trajectory> rows() const;
};

// Nothing has happened for stall_seconds. The threads may hang, so they must not be joined.
struct StallError : IoError {
  using IoError::IoError;
};

// Returns the version that sampled the group's oldest token; nullopt if no policy sampled a token of it.
std::optional<int64_t> oldest_version(const FinishedGroup& group);

// The result of a training step. Metrics of an evaluation after the step may come later.
struct StepRecord {
  int64_t step = 0;  // 1 is the first
  MetricValues metrics;
  std::vector<Trajectory> batch;  // with prompt, completion and answer
  std::vector<uint64_t> groups;   // ids; set by the controller
};

// ---- Events.

struct GroupGenerated {
  GroupPointer group;
};
// A started group has no result, for example because agents ended too few of its samples.
struct GroupFailed {
  uint64_t id = 0;
  std::string reason;
};
struct GroupScored {
  uint64_t id = 0;
  std::vector<RewardResult> rewards;     // one per entry of `samples`; empty if the group has no problem
  std::optional<FilterVerdict> verdict;  // of the user's filter; nullopt: no filter
};
struct WeightsTaken {
  int64_t version = 0;
  int64_t interrupted_samples = 0;  // samples that were running
};
struct TrainingDone {
  StepRecord record;
};
struct SnapshotTaken {};  // weights and optimizer state have been copied for a checkpoint
struct EvaluationDone {
  std::optional<MetricValues> metrics;  // nullopt: it was cancelled
};
struct RunningSaved {
  std::vector<RunningRequest> requests;
};
struct CheckpointWritten {
  std::string error;  // why it failed, such as a full disk; empty: written
};
struct WorkerFailed {
  std::exception_ptr error;
};
// The user's requests while the run works (run/run_commands.h).
struct StopRequested {};
struct PauseRequested {};  // no new groups and steps; what has begun is finished
struct ResumeRequested {};
struct CheckpointRequested {};  // at the end of the step in work; at once if the run is paused
struct EvaluationRequested {};  // of the step in work
struct TimePassed {};
using Event =
    std::variant<GroupGenerated, GroupFailed, GroupScored, WeightsTaken, TrainingDone, SnapshotTaken,
                 EvaluationDone, RunningSaved, CheckpointWritten, WorkerFailed, StopRequested, PauseRequested,
                 ResumeRequested, CheckpointRequested, EvaluationRequested, TimePassed>;

// ---- Commands.

struct TrainOrder {
  int64_t step = 0;
  std::vector<ScoredGroup> groups;  // oldest first
  bool publish = false;             // publish the weights after training, as version `step`
};

// The controller's state at the end of a step, for a checkpoint.
struct ControllerState {
  int64_t step = 0;
  int64_t next_position = 0;
  std::map<uint64_t, ScoredGroup> buffered;
  std::map<uint64_t, GroupPointer> awaiting;
  std::map<uint64_t, std::vector<PartialRollout>> running;  // partial rollouts
  std::set<int64_t> unfinished;                   // other started groups: generated again from the start
  std::optional<MetricValues> unwritten_metrics;  // of `step`, if its evaluation is missing
};
Json to_json(const ControllerState& state, const ProblemOrder& problems);
// Throws UserError if the state is damaged, or was saved with other problems or another seed
// (ProblemOrder::restore).
ControllerState controller_state_from_json(const Json& json, ProblemOrder& problems);

// Executes the controller's commands. Each call returns at once, and its result is an event.
class Workers {
 public:
  virtual ~Workers() = default;
  // Engine commands, executed in the order of the calls, between two passes of the engine.
  virtual void begin(uint64_t id,
                     std::vector<PartialRollout> partial) = 0;  // ─▶ GroupGenerated, or GroupFailed
  virtual void take_weights() = 0;                              // the last published ones ─▶ WeightsTaken
  // Evaluates the weights that the engine holds. Training samples are parked meanwhile (Engine::park). At the
  // deadline, or by cancel_evaluation(), the evaluation ends without metrics. ─▶ EvaluationDone, also then
  virtual void evaluate(Clock::Time deadline) = 0;
  virtual void cancel_evaluation() = 0;
  virtual void save_running() = 0;  // ─▶ RunningSaved
  // Reward commands.
  virtual void score(GroupPointer group) = 0;  // ─▶ GroupScored
  // Trainer commands.
  virtual void publish(int64_t version) = 0;  // on the caller's thread; the trainer must be idle
  virtual void train(TrainOrder order) = 0;   // ─▶ TrainingDone
  virtual void take_snapshot() = 0;           // ─▶ SnapshotTaken
  // Writer command. copied: writes the last snapshot. Otherwise writes the model itself, and the controller
  // starts no training until CheckpointWritten.
  virtual void write_checkpoint(ControllerState state, bool copied) = 0;  // ─▶ CheckpointWritten

  // State that the controller reads.
  virtual EngineStatistics engine_statistics() const = 0;  // without evaluations
  virtual double engine_idle_seconds() const = 0;
  virtual Clock::Time last_progress() const = 0;  // when a worker last finished or began a task
  virtual std::string busy_with() const = 0;      // "busy: engine (generate, 12 s), ..."
  // Says what external groups wait for (external_rollouts.h). While the text is not empty, the run does not
  // count as stalled.
  virtual std::string waits_for_external() const { return ""; }
  virtual MetricValues external_metrics() const { return {}; }  // counts since the process began
};

// Decisions that the run makes for the controller. Called by on(), on the control thread. By default nothing
// is due and nothing is refused.
class ControllerPolicy {
 public:
  virtual ~ControllerPolicy() = default;
  // Whether the weights are evaluated after this step. Step 0: before the first.
  virtual bool evaluation_due(int64_t /*step*/, bool /*is_last*/) { return false; }
  virtual bool checkpoint_due(int64_t /*step*/) { return false; }  // after the last step it is always due
  // Returns why a scored group is not trained on, or nullopt. The user's filter decides afterwards.
  virtual std::optional<std::string> why_refused(const ScoredGroup&) { return std::nullopt; }
};

// Receives the results of steps. Called by on(), on the control thread.
class ControllerObserver {
 public:
  virtual ~ControllerObserver() = default;
  // A group has its rewards while `step` is in work. `reason`: why it is dropped; empty: it waits for a step.
  virtual void on_group(const ScoredGroup&, int64_t /*step*/, const std::string& /*reason*/) {}
  // The state of a checkpoint of `step` was taken: a resumed run does not generate the groups again that have
  // been dropped so far.
  virtual void on_state(int64_t /*step*/) {}
  virtual void on_batch(const StepRecord&) {}                       // after training; metrics are incomplete
  virtual void on_record(int64_t /*step*/, const MetricValues&) {}  // complete, in order of steps
};

struct ControllerOptions {
  int64_t batch_groups = 1;      // B
  int64_t max_staleness = 0;     // eta
  bool fixed_staleness = false;  // engine and trainer take turns, and each batch is exactly eta versions old
  int64_t total_steps = 1;
  int64_t total_groups = 0;         // that may start; 0: no bound
  int64_t max_buffered_groups = 0;  // started and not yet in training; 0: the limiter's bound only
  int64_t group_size = 1;           // samples of a group
  int64_t samples_in_flight = std::numeric_limits<int64_t>::max();
  int64_t weight_sync_steps = 1;
  // True: running samples continue under new weights. False: they first finish on the old weights, and no
  // group starts until the engine has the new ones.
  bool interruptible = true;
  int64_t min_group = 2;                   // samples with a reward; a group with fewer is dropped
  int64_t max_consecutive_failures = 256;  // of rewards, or of the filter: so many in a row end the run
  double evaluation_seconds = 3600;        // a longer evaluation is cancelled
  double stall_seconds = 0;                // the run ends if nothing happens for so long; 0: never
  // Maximum number of batches of groups that are generated for one training step, groups that filters refuse
  // included. After that the step is trained on the accepted groups. If none was accepted, the run ends with
  // an error. 0: no bound.
  int64_t max_generated_batches = 0;
};

class Controller {
 public:
  // All references must outlive the controller. Nothing happens before start().
  Controller(Workers& workers, const Clock& clock, ControllerOptions options, ControllerPolicy& policy,
             ControllerObserver& observer);

  // Continues from a checkpoint. Call it before start().
  void restore(ControllerState state);
  void start();
  // Throws:
  // - the exception of a worker
  // - IoError if too many rewards or filter calls fail in a row, or filters refuse all groups of a step
  // - IoError if the last checkpoint cannot be written
  // - StallError if nothing has happened for stall_seconds
  void on(Event event);

  bool is_finished() const { return is_finished_; }  // all is done, or stopped and saved
  bool is_stopping() const { return is_stopping_; }
  bool is_pausing() const { return is_pausing_; }
  // Whether a pause has begun: nothing runs until it ends. A synchronous run pauses between two steps, so
  // that its bits do not change.
  bool is_paused() const;
  int64_t num_steps() const { return num_steps_; }                  // trained steps of the run
  int64_t checkpointed_step() const { return checkpointed_step_; }  // -1: no checkpoint
  std::string activity() const;  // "train step 12, rollout 3/16, 2 awaiting rewards"

  // For a run that an exception ended, after its workers have ended. Both return what has no checkpoint yet,
  // or nullopt: the state at the end of the last trained step, and that of a snapshot that was taken and not
  // written. The metrics of the last step are recorded first; without those of an evaluation that was lost.
  std::optional<ControllerState> take_unsaved_step();
  std::optional<ControllerState> take_unwritten_snapshot();

  struct Counts {
    int64_t sampled = 0, trained = 0, training = 0, buffered = 0, awaiting = 0, running = 0, dropped = 0;
    int64_t version = -1;  // held by the engine
    bool operator==(const Counts&) const = default;
  };
  Counts counts() const;  // sampled, trained, dropped: since start(); sampled: with the checkpoint's groups
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
  // A checkpoint that is being taken or written.
  struct Checkpoint {
    ControllerState state;
    std::set<uint64_t> running;  // groups whose progress the engine has not reported yet
    Clock::Time begin;
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
  void handle(PauseRequested& event);
  void handle(ResumeRequested& event);
  void handle(CheckpointRequested& event);
  void handle(EvaluationRequested& event);
  void handle(TimePassed& event);

  bool computes_beside() const { return options_.max_staleness > 0 && !options_.fixed_staleness; }
  bool is_round_over() const { return running_.empty() && awaiting_.empty(); }
  bool staleness_limiter_allows() const;
  bool can_sample() const;  // a group is left to start, now or later
  // Whether filters refused so many groups since the last batch that no more are generated for the next one.
  bool has_sampled_enough() const;
  bool is_drained() const;
  bool is_engine_done() const;
  bool is_over() const;
  // Whether a pause holds back new groups and steps now.
  bool holds() const;
  void decide();
  void advance_engine();
  void begin_groups();
  void begin_training();
  void write_records();
  ControllerState state_at_step() const;
  void begin_checkpoint();
  void warn_of_late_checkpoint();
  void advance_checkpoint();
  void finish_if_done();
  void drop(uint64_t id, const std::string& reason);
  void refuse(uint64_t id, const std::string& reason);
  std::string why_refused(const ScoredGroup& scored, const std::optional<FilterVerdict>& verdict);
  void count_failures(const std::vector<RewardResult>& rewards);
  void count_filter_failures(const FilterVerdict& verdict);
  void add_own_metrics(StepRecord& record);
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_buffered() const { return static_cast<int64_t>(buffered_.size()); }
  int64_t num_awaiting() const { return static_cast<int64_t>(awaiting_.size()); }

  Workers& workers_;
  const Clock& clock_;
  const ControllerOptions options_;
  ControllerPolicy& policy_;
  ControllerObserver& observer_;

  // Groups by id, in their states.
  int64_t next_position_ = 0;
  std::deque<int64_t> again_;  // groups that an earlier process started; started again first
  std::map<uint64_t, std::vector<PartialRollout>> partial_before_;  // partial rollouts of again_
  std::set<uint64_t> running_;
  std::map<uint64_t, GroupPointer> awaiting_;
  std::map<uint64_t, ScoredGroup> buffered_;
  std::vector<uint64_t> training_;
  bool training_publishes_ = false;
  int64_t num_sampled_ = 0, num_trained_ = 0;
  int64_t round_left_ = 0;                   // eta 0: groups that may start before all of them are scored
  int64_t refused_since_batch_ = 0;          // by filters
  int64_t filter_failures_since_batch_ = 0;  // those because the filter raised
  std::string first_filter_error_;           // of these
  std::map<std::string, int64_t> dropped_;

  // State of the workers, by the events so far.
  Trainer trainer_ = Trainer::kIdle;
  int64_t num_steps_ = 0;
  int64_t published_version_ = -1, engine_version_ = -1;
  bool has_asked_for_weights_ = false;
  Evaluation evaluation_ = Evaluation::kNone;
  int64_t evaluation_step_ = 0;
  std::deque<PendingRecord> records_;
  std::optional<MetricValues> unwritten_;  // of a step whose evaluation was cancelled by a stop
  std::optional<Checkpoint> checkpoint_;
  std::optional<ControllerState> last_step_;  // at the end of step num_steps_; nullopt: not trained here
  int64_t checkpointed_step_ = -1;
  bool checkpoint_is_overdue_ = false;          // it was due while another was being written, or failed
  std::optional<int64_t> late_warned_seconds_;  // how late a checkpoint was at the last warning
  bool is_stopping_ = false, is_finished_ = false;
  bool is_pausing_ = false, evaluation_is_requested_ = false;
  std::optional<Clock::Time> paused_since_;
  int64_t consecutive_failures_ = 0, consecutive_filter_failures_ = 0;

  // The step that is being collected.
  std::optional<Clock::Time> step_begin_, has_samples_since_;
  Clock::Time train_begin_, trainer_free_since_, last_event_, last_generated_;
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
