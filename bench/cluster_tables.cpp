// Compares the run simulator (control/run_simulator.h) with the device splits that AReaL-DTA measured on 8
// H800s.
//
//   build/bench/cluster_tables [eta ...]      default: 1 4
//
// Table 2 of AReaL-DTA (arXiv 2602.00482v2, appendix B.1) gives thousands of tokens per second for
// asynchronous runs of two models and two systems, at every split of 8 devices (generating/training). The
// simulator gets three cells of each row, which a user would measure: 1/7 (the generation rate of a device),
// 7/1 (the training rate of a device) and 4/4 (the additional time of each step). The simulator predicts the
// other four cells and the best split. The output also has the paper's own formula (equation 3): the smaller
// of the two sides' rates, from 1/7 and 7/1. docs/asynchrony.md has the table.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "control/run_simulator.h"

namespace {

using namespace bough;

constexpr int64_t kDevices = 8;
using Cells = std::array<double, kDevices - 1>;  // index: number of generating devices, minus 1

struct Row {
  const char *model, *system;
  Cells measured;
};
constexpr Row kTable2[] = {{"1.7B", "AReaL", {40.8, 52.1, 43.8, 42.2, 34.9, 26.1, 13.5}},
                           {"1.7B", "AReaL-DTA", {41.1, 56.8, 58.3, 62.0, 66.7, 49.4, 40.3}},
                           {"8B", "AReaL", {14.5, 22.6, 20.5, 17.2, 13.8, 9.0, 5.1}},
                           {"8B", "AReaL-DTA", {10.9, 27.5, 36.3, 37.0, 51.4, 47.0, 21.5}}};
constexpr size_t kFew = 0, kHalf = 3, kMany = 6;  // the cells given to the simulator

struct Rates {
  double generate, train, step_seconds;  // generate, train: thousands of tokens per second per device
};

// Agents' conversations: a batch of 256 with lengths around 8,000. The lengths of tau2-bench are not
// published.
SimulationOptions workload(int64_t eta) {
  SimulationOptions options;
  options.controller.batch_groups = 32;
  options.controller.group_size = 8;
  options.controller.max_staleness = eta;
  options.controller.total_steps = 30;
  options.lengths = {.mean = 8000, .sigma = 0.5, .longest = 16384, .seen = {}};
  options.prompt_tokens = 0;
  options.rates.max_running = 32;
  options.rates.prefill_tokens_per_s = 1e7;
  options.rates.pass_seconds = 0;
  return options;
}

double simulate(SimulationOptions options, const Rates& rates, int64_t rollout) {
  options.rates.rollout_devices = rollout;
  options.rates.train_devices = kDevices - rollout;
  options.rates.sample_seconds = 1 / (1000 * rates.generate);
  options.rates.train_tokens_per_s = 1000 * rates.train;
  options.rates.step_seconds = rates.step_seconds;
  return RunSimulator(options).run().tokens_per_second() / 1000;
}

// Fits rates with which the simulator reproduces the three given cells as closely as possible.
Rates fit(const SimulationOptions& options, const Cells& measured) {
  const double batch = static_cast<double>(options.controller.batch_groups * options.controller.group_size) *
                       options.lengths.mean / 1000;
  Rates rates{measured[kFew], measured[kMany], 0};
  for (int round = 0; round < 25; ++round) {
    const double few = simulate(options, rates, kFew + 1), many = simulate(options, rates, kMany + 1),
                 half = simulate(options, rates, kHalf + 1);
    rates.generate *= std::sqrt(measured[kFew] / few);
    rates.train *= std::sqrt(measured[kMany] / many);
    rates.step_seconds = std::max(0.0, rates.step_seconds + 0.5 * batch * (1 / measured[kHalf] - 1 / half));
  }
  return rates;
}

size_t best(const Cells& cells) {
  return static_cast<size_t>(std::ranges::max_element(cells) - cells.begin());
}

struct Errors {
  double sum = 0, largest = 0;
  int count = 0, best_found = 0;

  void add(const Cells& measured, const Cells& said) {
    for (size_t i = 0; i < measured.size(); ++i) {
      if (i == kFew || i == kHalf || i == kMany) continue;
      const double error = std::abs(said[i] / measured[i] - 1);
      sum += error;
      largest = std::max(largest, error);
      ++count;
    }
    best_found += best(measured) == best(said);
  }
};

void print(const char* label, const Cells& cells) {
  std::printf("  %-12s", label);
  for (const double cell : cells) std::printf(" %6.1f", cell);
  std::printf("   best %zu/%zu\n", best(cells) + 1, kDevices - best(cells) - 1);
}

void run(int64_t eta) {
  std::printf("eta %lld; thousand tokens a second at 1/7, 2/6 ... 7/1 (generate/train)\n",
              static_cast<long long>(eta));
  Errors ours, formula;
  const SimulationOptions options = workload(eta);
  for (const Row& row : kTable2) {
    const Rates rates = fit(options, row.measured);
    Cells said, by_formula;
    for (size_t i = 0; i < said.size(); ++i) {
      const auto rollout = static_cast<int64_t>(i) + 1;
      said[i] = simulate(options, rates, rollout);
      by_formula[i] = std::min(row.measured[kFew] * static_cast<double>(rollout),
                               row.measured[kMany] * static_cast<double>(kDevices - rollout));
    }
    std::printf("%s, %s: fitted per device: %.1f generated, %.1f trained; fixed time per step %.1f s\n",
                row.model, row.system, rates.generate, rates.train, rates.step_seconds);
    print("measured", row.measured);
    print("simulated", said);
    print("equation 3", by_formula);
    ours.add(row.measured, said);
    formula.add(row.measured, by_formula);
  }
  for (const auto& [name, errors] : {std::pair{"simulated", &ours}, std::pair{"equation 3", &formula}})
    std::printf(
        "%-10s: errors of the four cells per row that were not fitted: mean %.0f%%, largest %.0f%%; "
        "best split found in %d of 4 rows\n",
        name, 100 * errors->sum / errors->count, 100 * errors->largest, errors->best_found);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int64_t> etas;
  for (int i = 1; i < argc; ++i) etas.push_back(std::atoll(argv[i]));
  if (etas.empty()) etas = {1, 4};
  for (const int64_t eta : etas) run(eta);
}
