// A run without its work: the controller (controller.h), driven by discrete events over a clock of its own.
// What it says of idle devices, staleness and throughput is what the same controller does with real workers
// that take this long. Tests run random schedules through it; `bough simulate` compares splits of a cluster.
//
// The engine's model: its devices share the running samples evenly; a decode pass takes pass_seconds +
// (samples of a device) · sample_seconds, and a prompt, or a sample that new weights interrupted, is computed
// at prefill_tokens_per_s a device, during which the device decodes nothing. The trainer's: step_seconds +
// tokens / train_tokens_per_s of the device that got the most, a group's prompt counted once on each that has
// some of the group (plan/load_balance.h). A reward takes a uniform time between two bounds, on a worker of
// its own where there are enough. Synchronous runs (eta 0) have all devices for both, in turns.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
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
  int64_t max_running = 256;  // samples of a device that are generated at once
  double pass_seconds = 0.02, sample_seconds = 1e-4, prefill_tokens_per_s = 1e4;
  double train_tokens_per_s = 1e4, step_seconds = 0;  // of a device; of a step, whatever it holds
  double publish_seconds = 0;                         // of the trainer
  double swap_seconds = 0;                            // of the engine, at each update
  double reward_min_seconds = 0, reward_max_seconds = 0;
  int64_t reward_workers = 1 << 20;
  double evaluation_seconds = 0, checkpoint_seconds = 0, snapshot_seconds = 0;
};

// How long responses are: log-normal with this mean and this deviation of the logarithm, at most `longest`;
// or drawn from those that a run has seen.
struct LengthDistribution {
  double mean = 256, sigma = 0.8;
  int64_t longest = 1 << 20;
  std::vector<int64_t> seen;

  // Of a sample of a group: the same whatever else was drawn.
  int64_t draw(const CounterRandom& random, uint64_t id, int64_t sample) const;
};

struct SimulationOptions {
  ControllerOptions controller;
  SimulatedRates rates;
  LengthDistribution lengths;
  int64_t prompt_tokens = 128;
  bool shares_prompts = true;      // in training; else each sample's prompt is computed again
  double reward_failure_rate = 0;  // of samples
  double group_failure_rate = 0;   // of groups, of which nothing comes when they would be complete
  uint64_t seed = 1;
};

struct SimulationResult {
  int64_t steps = 0;
  double seconds = 0;
  double trained_tokens = 0;                 // generated ones that were trained on
  double trainer_idle = 0, engine_idle = 0;  // shares of the time: the trainer waits; nothing is in flight
  double staleness_mean = 0;                 // of groups: versions since their oldest token was drawn
  int64_t staleness_max = 0, interrupted_samples = 0;
  std::vector<int64_t> trained_lengths;  // in order of training
  double tokens_per_second() const { return seconds > 0 ? trained_tokens / seconds : 0; }
};

class RunSimulator final : public Workers {
 public:
  explicit RunSimulator(SimulationOptions options);

  // Runs to the end, or to `stop_at` seconds, when it is asked to stop as by Ctrl-C. InternalError where
  // nothing can happen any more and the run is not finished.
  SimulationResult run(std::optional<double> stop_at = {});
  void restore(ControllerState state) { controller_.restore(std::move(state)); }

  Controller& controller() { return controller_; }
  // After each event, if set: for tests.
  std::function<void()> on_event;
  // The state that was written last.
  const std::optional<ControllerState>& checkpoint() const { return checkpoint_; }
  const std::vector<std::vector<uint64_t>>& trained_groups() const { return trained_groups_; }  // a step each
  int64_t num_begun() const { return num_begun_; }

  void begin(uint64_t id, std::vector<BegunSample> begun) override;
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
    double begins_at = 0;         // progress_ when it began to run
    std::vector<int32_t> labels;  // a version a token, as far as it was before that
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
  using Reference = std::pair<uint64_t, size_t>;  // a group's sample

  double now() const { return seconds_between(Clock::Time(), clock_.now()); }
  void after(double seconds, std::function<void()> act);
  void post_after(double seconds, Event event);
  double devices() const { return static_cast<double>(options_.rates.rollout_devices); }
  double pass_seconds() const;
  void advance_engine();   // to now
  void schedule_engine();  // the next sample that ends
  void admit();
  void finish_samples();
  // The sample's labels up to now.
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
  // Every running sample advances by a token a pass: what one still needs is where it ends, less progress_.
  double progress_ = 0;
  std::vector<std::pair<double, int32_t>> versions_;  // since which progress which version draws
  std::set<std::pair<double, Reference>> running_;    // by the progress at which they end
  std::deque<Reference> waiting_;
  double engine_time_ = 0;        // up to which progress_ counts
  double engine_busy_until_ = 0;  // prompts, recomputation and swaps
  uint64_t engine_plan_ = 0;      // the only one that counts
  bool is_evaluating_ = false;
  int64_t published_ = 0, version_ = -1;
  EngineStatistics statistics_;
  double new_tokens_ = 0, engine_idle_ = 0;
  std::vector<double> reward_free_at_;  // a worker each

  std::vector<std::vector<uint64_t>> trained_groups_;
  std::optional<ControllerState> checkpoint_;
  int64_t num_begun_ = 0;
  SimulationResult result_;
  double staleness_total_ = 0, trainer_busy_ = 0;

  Controller controller_;  // last: it calls the others
};

// ---- Splits of a cluster.

// The rates of a split into devices that generate and devices that train (in turns: all for both); none where
// it cannot be.
using RatesOfSplit =
    std::function<std::optional<SimulatedRates>(int64_t rollout_devices, int64_t train_devices)>;

struct SplitResult {
  int64_t rollout_devices = 0, train_devices = 0, max_staleness = 0;
  SimulationResult result;
};
// Simulates splits of `devices` for each eta, and eta 0 with all of them for both, in turns; in order: every
// split, or those at multiples of `stride`. Without rates_of the options' rates are those of a device.
std::vector<SplitResult> simulate_splits(const SimulationOptions& options, int64_t devices,
                                         const std::vector<int64_t>& max_staleness,
                                         const RatesOfSplit& rates_of = {}, int64_t stride = 1);

}  // namespace bough
