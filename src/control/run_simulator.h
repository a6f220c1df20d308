// Simulates a run without computing anything: discrete events over a simulated clock drive the controller
// (controller.h). Idle times, staleness and throughput are those of the same controller with real workers of
// the given rates. Tests run random schedules through it. `bough simulate` compares splits of a cluster.
//
// - Engine: running samples are divided evenly over its devices. A decode pass takes pass_seconds + (samples
//   of a device) · sample_seconds. Prompts and interrupted samples are computed at prefill_tokens_per_s per
//   device, and the device decodes nothing in that time.
// - Trainer: step_seconds + tokens / train_tokens_per_s of the device with the most tokens. A group's prompt
//   counts once on each device that has samples of the group (plan/load_balance.h).
// - Rewards: a reward takes a uniformly distributed time between two bounds, on one of reward_workers
//   workers.
//
// Synchronous runs (eta 0) have all devices for generation and for training, in turns.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <vector>

#include "base/random.h"
#include "control/controller.h"

namespace bough {

struct SimulatedRates {
  int64_t rollout_devices = 1, train_devices = 1;
  int64_t max_running = 256;  // samples that a device generates at once
  double pass_seconds = 0.02, sample_seconds = 1e-4, prefill_tokens_per_s = 1e4;
  double train_tokens_per_s = 1e4, step_seconds = 0;  // per device; fixed part of a step
  double publish_seconds = 0;                         // trainer, at each publication
  double swap_seconds = 0;                            // engine, at each update
  double reward_min_seconds = 0, reward_max_seconds = 0;
  int64_t reward_workers = 1 << 20;
  double evaluation_seconds = 0, checkpoint_seconds = 0, snapshot_seconds = 0;
};

// Lengths of responses in tokens: log-normal, capped at `longest`. `mean` is the mean length before the cap,
// `sigma` the standard deviation of the length's logarithm. If `seen`, the lengths of an earlier run, is not
// empty, lengths are sampled from `seen` instead.
struct LengthDistribution {
  double mean = 256, sigma = 0.8;
  int64_t longest = 1 << 20;
  std::vector<int64_t> seen;

  // Returns the length of a sample of group `id`. It does not depend on other calls.
  int64_t draw(const CounterRandom& random, uint64_t id, int64_t sample) const;
};

struct SimulationOptions {
  ControllerOptions controller;
  std::shared_ptr<ControllerPolicy> policy = std::make_shared<ControllerPolicy>();
  SimulatedRates rates;
  LengthDistribution lengths;
  int64_t prompt_tokens = 128;
  bool shares_prompts = true;      // the trainer computes a prompt once per group, not once per sample
  double reward_failure_rate = 0;  // per sample
  double group_failure_rate = 0;   // per group: it fails when it would be complete
  uint64_t seed = 1;
};

struct SimulationResult {
  int64_t steps = 0;
  double seconds = 0;
  double trained_tokens = 0;                 // generated tokens that were trained on
  double trainer_idle = 0, engine_idle = 0;  // fraction of time: trainer waits; nothing in flight
  double staleness_mean = 0;                 // over groups: versions since the oldest token
  int64_t staleness_max = 0, interrupted_samples = 0;
  std::vector<int64_t> trained_lengths;  // in order of training
  double tokens_per_second() const { return seconds > 0 ? trained_tokens / seconds : 0; }
};

class RunSimulator final : public Workers {
 public:
  explicit RunSimulator(SimulationOptions options);

  // Runs to the end. At `stop_at` seconds the run is asked to stop, as by Ctrl-C. Throws InternalError if no
  // event is left and the run is not finished.
  SimulationResult run(std::optional<double> stop_at = {});
  void restore(ControllerState state) { controller_.restore(std::move(state)); }

  Controller& controller() { return controller_; }
  // Called after each event, if set. For tests.
  std::function<void()> on_event;
  // The last state that was written.
  const std::optional<ControllerState>& checkpoint() const { return checkpoint_; }
  const std::vector<std::vector<uint64_t>>& trained_groups() const { return trained_groups_; }  // per step
  int64_t num_begun() const { return num_begun_; }

  void begin(uint64_t id, std::vector<PartialRollout> partial) override;
  void take_weights() override;
  void evaluate(Clock::Time deadline) override;
  void cancel_evaluation() override;
  void save_running() override;
  void score(GroupPointer group) override;
  void publish(int64_t version) override { published_ = version; }
  void train(TrainOrder order) override;
  void take_snapshot() override;
  void write_checkpoint(ControllerState state, bool copied) override;
  EngineStatistics engine_statistics() const override { return statistics_; }
  double engine_idle_seconds() const override { return engine_idle_; }
  Clock::Time last_progress() const override { return clock_.now(); }
  std::string busy_with() const override { return "simulated"; }

 private:
  struct Sample {
    int64_t length = 0;
    double begins_at = 0;         // progress_ when it started to run
    std::vector<int32_t> labels;  // versions of the tokens that it had at begins_at
    bool has_ended = false;
  };
  struct Group {
    std::vector<Sample> samples;
    int64_t num_left = 0;
  };
  struct Planned {
    double time;
    uint64_t order;
    std::function<void()> act;
    bool operator<(const Planned& other) const {
      return std::pair(time, order) > std::pair(other.time, other.order);
    }
  };
  using Reference = std::pair<uint64_t, size_t>;  // (group id, sample)

  double now() const { return seconds_between(Clock::Time(), clock_.now()); }
  void after(double seconds, std::function<void()> act);
  void post_after(double seconds, Event event);
  double devices() const { return static_cast<double>(options_.rates.rollout_devices); }
  double pass_seconds() const;
  void advance_engine();   // up to now
  void schedule_engine();  // plans the event at which the next sample ends
  void admit();
  void finish_samples();
  // Returns the version of each token of the sample up to now.
  std::vector<int32_t> labels_of(const Sample& sample, bool is_running) const;
  Sample& sample_of(const Reference& reference) {
    return groups_.at(reference.first).samples[reference.second];
  }

  const SimulationOptions options_;
  const CounterRandom random_;
  FakeClock clock_;
  std::priority_queue<Planned> planned_;
  uint64_t num_planned_ = 0;

  std::map<uint64_t, Group> groups_;
  // Passes so far. Every running sample advances by one token per pass. A running sample ends after (its key
  // in running_) - progress_ more passes.
  double progress_ = 0;
  std::vector<std::pair<double, int32_t>> versions_;  // (progress, version that samples from there on)
  std::set<std::pair<double, Reference>> running_;    // by the progress at which they end
  std::deque<Reference> waiting_;
  double engine_time_ = 0;        // time up to which progress_ counts
  double engine_busy_until_ = 0;  // with prompts, recomputation and swaps
  uint64_t engine_plan_ = 0;      // number of the planned engine event that is valid
  bool is_evaluating_ = false;
  int64_t published_ = 0, version_ = -1;
  EngineStatistics statistics_;
  double new_tokens_ = 0, engine_idle_ = 0;
  std::vector<double> reward_free_at_;  // per worker

  std::vector<std::vector<uint64_t>> trained_groups_;
  std::optional<ControllerState> checkpoint_;
  int64_t num_begun_ = 0;
  SimulationResult result_;
  double staleness_total_ = 0, trainer_busy_ = 0;

  ControllerObserver observer_;  // ignores the records
  Controller controller_;        // last member, because it uses the other members
};

// ---- Splits of a cluster.

// Returns the rates of a split into devices that generate and devices that train. If all devices do both in
// turns, each count is the number of all devices. nullopt if the split is not possible.
using RatesOfSplit =
    std::function<std::optional<SimulatedRates>(int64_t rollout_devices, int64_t train_devices)>;

struct SplitResult {
  int64_t rollout_devices = 0, train_devices = 0, max_staleness = 0;
  SimulationResult result;
};
// Simulates splits of `devices` for each eta, in order. If eta is 0, all devices do both in turns. Else the
// number of devices that generate is each multiple of `stride`. Without rates_of, every split has the
// options' rates, with only the numbers of devices replaced.
std::vector<SplitResult> simulate_splits(const SimulationOptions& options, int64_t devices,
                                         const std::vector<int64_t>& max_staleness,
                                         const RatesOfSplit& rates_of = {}, int64_t stride = 1);

}  // namespace bough
