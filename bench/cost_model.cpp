// Checks the cost model's predictions of a gradient step: predicted / measured seconds and peak bytes.
//
//   build/bench/cost_model [fp32|bf16] [random trees, default 50] [rounds, default 3] [ROLLOUTS.jsonl ...]
//
// A round calibrates this machine every 25 trees (cost/calibrate.h; calibration uses other shapes and trees).
// Then the round runs gradient steps of the shape `small` with random weights: on random trees of up to 1,200
// tokens (4,000 flat) and on the rollout files (the sets of bench/workload.py: group, agentic, agentic_leaf,
// flat). The plans are `dense`, `path` and `blocks` with several pass sizes. Peaks come from the allocator.
//
// Prints a line per step and, at the end, quantiles of |predicted / measured - 1|: over single runs, and over
// the steps' medians across rounds. Each round has its own calibrations. A shared machine's speed drifts by
// tenths within a minute, also between calibration and step. The last line shows the effect of this drift
// alone: a step's time in one round / its median over all rounds. Needs an idle machine; use chrt -r 5 on a
// shared one. BOUGH_CALIBRATION=FILE uses a stored profile (calibration.json of a run) instead of
// calibrating.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/json.h"
#include "cost/calibrate.h"
#include "cost/run_costs.h"
#include "data/rollout_file.h"
#include "kernels/common/cpu_allocator.h"
#include "train/executor.h"
#include "tree/random_tree.h"

namespace {

using namespace bough;

struct Case {
  std::string name;
  std::vector<Trajectory> batch;
};

std::vector<Case> random_cases(int64_t count) {
  std::vector<Case> cases;
  for (int64_t i = 0; static_cast<int64_t>(cases.size()) < count; ++i) {
    Case c{"random " + std::to_string(i), {}};
    int64_t tokens = 0;
    for (auto& sequence : random_sequences(1000 + i, 1200, 4096)) {
      tokens += static_cast<int64_t>(sequence.size());
      Trajectory& trajectory = c.batch.emplace_back();
      trajectory.loss_mask.assign(sequence.size(), 1);
      std::fill_n(trajectory.loss_mask.begin(), sequence.size() / 3, 0);  // a prompt
      trajectory.advantage = {1};
      trajectory.input_ids = std::move(sequence);
    }
    if (tokens >= 200 && tokens <= 4000) cases.push_back(std::move(c));
  }
  return cases;
}

Case file_case(const char* path) {
  Case c{path, {}};
  for (auto& rollout : read_rollouts(path)) {
    rollout.logprobs.clear();  // plain policy gradient does not read them
    rollout.advantage = {1};
    c.batch.push_back(std::move(rollout));
  }
  return c;
}

double quantile(std::vector<double> of, double q) {
  std::sort(of.begin(), of.end());
  return of[std::min(of.size() - 1, static_cast<size_t>(q * static_cast<double>(of.size())))];
}

double median(const std::vector<double>& of) {
  return quantile(of, 0.5);
}

void print_errors(const char* what, const std::vector<double>& ratios) {
  std::vector<double> errors;
  for (const double ratio : ratios) errors.push_back(std::abs(ratio - 1));
  std::printf("%-44s %3zu  |error| median %5.1f%%  p90 %5.1f%%  worst %5.1f%%   %.3f to %.3f, median %.3f\n",
              what, ratios.size(), 100 * median(errors), 100 * quantile(errors, 0.9),
              100 * quantile(errors, 1), quantile(ratios, 0), quantile(ratios, 1), median(ratios));
}

// One step's figures, indexed by round.
struct StepRounds {
  std::vector<double> measured, seconds, bytes;  // measured: in seconds. seconds, bytes: predicted / measured
};

void print_summary(const std::map<std::string, StepRounds>& steps) {
  std::vector<double> runs, medians, bytes, again;
  for (const auto& [name, rounds] : steps) {
    runs.insert(runs.end(), rounds.seconds.begin(), rounds.seconds.end());
    bytes.insert(bytes.end(), rounds.bytes.begin(), rounds.bytes.end());
    medians.push_back(median(rounds.seconds));
    for (const double seconds : rounds.measured) again.push_back(seconds / median(rounds.measured));
  }
  print_errors("bytes, predicted over measured", bytes);
  print_errors("seconds, predicted over measured, each run", runs);
  print_errors("seconds, predicted over measured, medians", medians);
  print_errors("the same step over its median", again);
}

class Bench {
 public:
  explicit Bench(at::ScalarType dtype) : model_(make_model(small_config(), dtype)) {
    initialise(*model_, 1);
    model_->allocate_gradients();
    LossSettings settings;
    settings.loss = "pg";
    settings.use_decoupled_loss = settings.recompute_logprob = false;
    loss_ = make_loss(settings);
  }

  void calibrate() {
    const char* saved = std::getenv("BOUGH_CALIBRATION");
    if (saved && costs_) return;
    const auto begin = std::chrono::steady_clock::now();
    auto profile =
        saved ? DeviceProfile::from_json(read_json(saved), saved) : calibrate(at::kCPU, model_->dtype());
    std::printf("calibrated in %.1f s: %s\n", seconds_since(begin), profile.source.c_str());
    costs_.emplace(std::move(profile), model_shape(*model_));
  }

  void step(const Case& c, const char* strategy, int64_t limit) {
    const int64_t before = cpu_allocated_bytes();
    reset_cpu_peak_bytes();
    const TrainBatch batch = make_batch(c.batch, {}, accumulator_type(model_->dtype()));
    auto request = plan_request(batch, limit);
    request.costs = &*costs_;
    const auto plan = make_plan(strategy, request);
    const auto predicted = simulate(plan, &*costs_);
    std::vector<double> times;
    double total = 0;
    Executor executor(*model_);
    executor.execute(plan, batch, *loss_);
    while (times.empty() || (times.size() < 5 && total < 0.5)) {
      const auto begin = std::chrono::steady_clock::now();
      executor.execute(plan, batch, *loss_);
      times.push_back(seconds_since(begin));
      total += times.back();
    }
    const double measured = median(times);
    const double peak = static_cast<double>(cpu_peak_bytes() - before);
    char name[128];
    std::snprintf(name, sizeof name, "%-28s %-6s B %5ld", c.name.c_str(), strategy, limit);
    auto& rounds = steps_[name];
    rounds.measured.push_back(measured);
    rounds.seconds.push_back(predicted.seconds / measured);
    rounds.bytes.push_back(static_cast<double>(predicted.peak_bytes) / peak);
    std::printf("%s  %8.3f s predicted %8.3f  %.3f   %8.1f MB predicted %8.1f  %.3f\n", name, measured,
                predicted.seconds, rounds.seconds.back(), peak / 1e6, double(predicted.peak_bytes) / 1e6,
                rounds.bytes.back());
    std::fflush(stdout);
  }

  const std::map<std::string, StepRounds>& steps() const { return steps_; }

 private:
  static ModelConfig small_config() {
    const auto shape = named_model_shape("small", "fp32");
    ModelConfig config;
    config.num_layers = shape.num_layers;
    config.hidden_size = shape.hidden_size;
    config.intermediate_size = shape.intermediate_size;
    config.num_heads = shape.num_heads;
    config.num_kv_heads = shape.num_kv_heads;
    config.head_dim = shape.head_dim;
    config.vocab_size = shape.vocab_size;
    config.tie_word_embeddings = config.qk_norm = true;
    config.max_position_embeddings = 40960;
    config.rope.theta = 1e6;
    return config;
  }

  std::unique_ptr<Model> model_;
  std::optional<CostModel> costs_;
  std::unique_ptr<Loss> loss_;
  std::map<std::string, StepRounds> steps_;
};

}  // namespace

int main(int argc, char** argv) {
  apply_cpu_workarounds();
  install_cpu_allocator();
  const bool bf16 = argc > 1 && std::strcmp(argv[1], "bf16") == 0;
  const int64_t num_random = argc > 2 ? std::atoll(argv[2]) : 50;
  Bench bench(bf16 ? at::kBFloat16 : at::kFloat);
  const int num_rounds = argc > 3 ? std::atoi(argv[3]) : 3;
  constexpr int64_t kLimits[] = {2048, 1024, 512, 256, 128, 64};
  constexpr const char* kStrategies[] = {"dense", "path", "blocks"};
  const auto cases = random_cases(num_random);
  for (int round = 0; round < num_rounds; ++round) {
    for (size_t i = 0; i < cases.size(); ++i) {
      if (i % 25 == 0) bench.calibrate();
      bench.step(cases[i], kStrategies[i % 3], kLimits[i / 3 % std::size(kLimits)]);
    }
    for (int i = 4; i < argc; ++i) {
      if (i % 2 == 0) bench.calibrate();
      const auto c = file_case(argv[i]);
      int64_t tokens = 0;
      for (const Trajectory& one : c.batch) tokens += static_cast<int64_t>(one.input_ids.size());
      bench.step(c, "blocks", 1024);
      bench.step(c, "blocks", 256);
      bench.step(c, "path", 1024);
      if (tokens < 12000) bench.step(c, "dense", 1024);
    }
  }
  print_summary(bench.steps());
}
