// Does the cost model predict what a gradient step takes? Predicted over measured seconds and peak bytes.
//
//   build/bench/cost_model [fp32|bf16] [random trees, default 50] [ROLLOUTS.jsonl ...]
//
// Calibrates this machine (train/calibrate.h: other shapes, other trees), then runs gradient steps of the shape
// `small`, random weights, on random trees of up to 1,200 tokens (4,000 flat) and on the rollout files (the yardstick's
// sets: group, agentic, agentic_leaf, flat; workload.py makes them), with plans `dense`, `path` and `blocks` of several
// pass sizes. A step is repeated and its median taken; peaks are the allocator's. Prints a line a step and, at last,
// quantiles of |predicted / measured - 1|. Needs a machine that does nothing else: chrt -r 5 where others work on it.
// It calibrates again every twelve trees, since a shared machine's speed drifts by tenths within a minute. What it drifted
// since the calibration a probe tells, one step that is always the same, run around each calibration and each step:
// "at the calibration's speed" is predicted over measured with the measured seconds scaled by the probe's.
// BOUGH_CALIBRATION=FILE takes a profile (calibration.json of a run) instead.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/json.h"
#include "kernels/common/cpu_allocator.h"
#include "models/model_shape.h"
#include "train/calibrate.h"
#include "train/executor.h"
#include "tree/random_tree.h"
#include "tree/rollout_file.h"

namespace {

using namespace bough;

struct Case {
  std::string name;
  std::vector<std::vector<int32_t>> sequences;
  std::vector<std::vector<uint8_t>> masks;
};

std::vector<Case> random_cases(int64_t count) {
  std::vector<Case> cases;
  for (int64_t i = 0; static_cast<int64_t>(cases.size()) < count; ++i) {
    Case c{"random " + std::to_string(i), random_sequences(1000 + i, 1200, 4096), {}};
    int64_t tokens = 0;
    for (const auto& sequence : c.sequences) {
      tokens += static_cast<int64_t>(sequence.size());
      c.masks.emplace_back(sequence.size(), 1);
      for (size_t t = 0; t < sequence.size() / 3; ++t) c.masks.back()[t] = 0;  // a prompt
    }
    if (tokens >= 200 && tokens <= 4000) cases.push_back(std::move(c));
  }
  return cases;
}

Case file_case(const char* path) {
  Case c{path, {}, {}};
  for (auto& rollout : read_rollouts(path)) {
    c.sequences.push_back(rollout.input_ids);
    c.masks.push_back(rollout.loss_mask);
  }
  return c;
}

struct Errors {
  std::vector<double> ratios;
  double worst_over = 0;
  void print(const char* what) {
    if (ratios.empty()) return;
    std::sort(ratios.begin(), ratios.end());
    std::vector<double> errors;
    for (const double ratio : ratios) errors.push_back(std::abs(ratio - 1));
    std::sort(errors.begin(), errors.end());
    const auto at = [&](const std::vector<double>& of, double q) {
      return of[std::min(of.size() - 1, static_cast<size_t>(q * static_cast<double>(of.size())))];
    };
    std::printf(
        "%-44s %3zu steps  |error| median %5.1f%%  p90 %5.1f%%  worst %5.1f%%   predicted/measured %.3f to "
        "%.3f, "
        "median %.3f\n",
        what, ratios.size(), 100 * at(errors, 0.5), 100 * at(errors, 0.9), 100 * errors.back(),
        ratios.front(), ratios.back(), at(ratios, 0.5));
  }
};

struct StepErrors {
  Errors seconds, steady_seconds, bytes;
  void print(const std::string& what) {
    seconds.print((what + ", seconds").c_str());
    steady_seconds.print((what + ", at the calibration's speed").c_str());
    bytes.print((what + ", bytes").c_str());
  }
};

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
    const double probe_before = probe_seconds();
    const auto begin = std::chrono::steady_clock::now();
    auto profile = saved ? DeviceProfile::from_json(read_json(saved), saved) : calibrate_cpu(model_->dtype());
    std::printf("calibrated in %.1f s: %s\n", seconds_since(begin), profile.source.c_str());
    costs_.emplace(std::move(profile), model_shape(small_config(), model_->dtype()));
    calibrated_probe_ = (probe_before + probe_seconds()) / 2;
  }

  void step(const Case& c, const char* strategy, int64_t limit, StepErrors& errors) {
    const double probe_before = probe_seconds();
    const int64_t before = cpu_allocated_bytes();
    reset_cpu_peak_bytes();
    const auto batch = constant_batch(c);
    auto request = plan_request(batch, limit);
    request.costs = &*costs_;
    const auto plan = make_plan(strategy, request);
    const auto predicted = simulate(plan, &*costs_);
    std::vector<double> times;
    double total = 0;
    Executor executor(*model_);
    while (times.size() < 3 || (times.size() < 7 && total < 1)) {
      if (times.size() > 1 && total > 2.5) break;
      const auto begin = std::chrono::steady_clock::now();
      executor.forward_backward(plan, batch, *loss_);
      times.push_back(seconds_since(begin));
      total += times.back();
    }
    std::sort(times.begin(), times.end());
    const double measured = times[(times.size() - 1) / 2];
    const int64_t peak = cpu_peak_bytes() - before;
    const double slowdown = (probe_before + probe_seconds()) / 2 / calibrated_probe_;
    errors.seconds.ratios.push_back(predicted.seconds / measured);
    errors.steady_seconds.ratios.push_back(predicted.seconds / measured * slowdown);
    errors.bytes.ratios.push_back(static_cast<double>(predicted.peak_bytes) / static_cast<double>(peak));
    std::printf(
        "%-28s %-6s B %5ld  %8.3f s predicted %8.3f  %.3f  steady %.3f   %8.1f MB predicted %8.1f  %.3f\n",
        c.name.c_str(), strategy, limit, measured, predicted.seconds, errors.seconds.ratios.back(),
        errors.steady_seconds.ratios.back(), double(peak) / 1e6, double(predicted.peak_bytes) / 1e6,
        errors.bytes.ratios.back());
    std::fflush(stdout);
  }

 private:
  // Of a step of three blocks of 200 tokens.
  double probe_seconds() {
    Case c{"probe", std::vector<std::vector<int32_t>>(3), {3, std::vector<uint8_t>(200, 1)}};
    for (int i = 0; i < 600; ++i) c.sequences[i / 200].push_back(i * 7919 % 4096);
    const auto batch = constant_batch(c);
    const auto plan = make_plan("dense", plan_request(batch, 200));
    Executor executor(*model_);
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      executor.forward_backward(plan, batch, *loss_);
      times.push_back(seconds_since(begin));
    }
    std::sort(times.begin(), times.end());
    return times[2];
  }

  // Refers to the case's sequences.
  static TrainBatch constant_batch(const Case& c) {
    const std::vector<TokenSpan> spans(c.sequences.begin(), c.sequences.end());
    auto batch = make_batch(spans, {c.masks.begin(), c.masks.end()}, 1.0);
    batch.fields.advantages_R = at::ones({batch.num_rows()});
    batch.fields.weights_R = at::full({batch.num_rows()}, 1e-3);
    return batch;
  }

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
    config.rope_theta = 1e6;
    return config;
  }

  std::unique_ptr<Model> model_;
  std::optional<CostModel> costs_;
  double calibrated_probe_ = 1;
  std::unique_ptr<Loss> loss_;
};

}  // namespace

int main(int argc, char** argv) {
  apply_cpu_workarounds();
  install_cpu_allocator();
  const bool bf16 = argc > 1 && std::strcmp(argv[1], "bf16") == 0;
  const int64_t num_random = argc > 2 ? std::atoll(argv[2]) : 50;
  Bench bench(bf16 ? at::kBFloat16 : at::kFloat);
  constexpr int64_t kLimits[] = {2048, 1024, 512, 256, 128, 64};
  StepErrors errors;
  constexpr const char* kStrategies[] = {"dense", "path", "blocks"};
  size_t turn = 0;
  for (const auto& c : random_cases(num_random)) {
    if (turn % 12 == 0) bench.calibrate();
    for (const size_t i : {turn, turn + 1})  // two of the three
      bench.step(c, kStrategies[i % 3], kLimits[turn / 3 % std::size(kLimits)], errors);
    ++turn;
  }
  StepErrors set_errors;
  for (int i = 3; i < argc; ++i) {
    const auto c = file_case(argv[i]);
    bench.calibrate();
    int64_t tokens = 0;
    for (const auto& sequence : c.sequences) tokens += static_cast<int64_t>(sequence.size());
    for (const char* strategy : kStrategies)
      for (const int64_t limit : {1024, 256})
        if (std::strcmp(strategy, "dense") != 0 || tokens < 12000) bench.step(c, strategy, limit, set_errors);
  }
  errors.print("random trees");
  set_errors.print("files");
}
