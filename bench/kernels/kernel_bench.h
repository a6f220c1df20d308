// Code that the programs of bench/kernels share: shapes, measured rates of this machine, operands larger than
// the caches, and the report.
//
// A kernel's bound is the longer of two times:
//   - its FLOPs / the rate of a matrix product at the model's shapes
//   - its bytes, each operand read or written once, / the memory bandwidth
// The speed of a shared machine changes by a factor of two within seconds. Both rates are therefore measured
// again after each run, with all threads. `of_bound` is the median over runs of bound / time. `best` is the
// bound at the best rates / the fastest run.
//
// Times are CPU times of the calling thread. Other programs on the cores therefore count only through cache
// misses. Time in which the thread spins for other threads counts, as in a training step.
//
// Operands and results rotate through sets of kRotatedBytes in total, more than the caches of our machines
// hold. Their bytes therefore come from memory. In a training step, many would still be in a cache. If
// of_bound is above 1, this machine's cache is larger than the sets.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <benchmark/benchmark.h>
#include <time.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/cpu.h"
#include "kernels/common/cpu_allocator.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/parameter.h"
#include "models/decoder_cost.h"

namespace bough::bench {

constexpr double kRotatedBytes = 640 << 20;
constexpr int64_t kTokens = 1024;  // tokens of a pass

inline at::Tensor values(at::IntArrayRef sizes, at::ScalarType type) {
  return at::empty(sizes, at::kFloat).uniform_(-1, 1).to(type);
}
inline Parameter parameter(at::IntArrayRef sizes, at::ScalarType type) {
  return {values(sizes, type), at::zeros(sizes, at::kFloat), {}};
}

inline double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}
inline double cpu_seconds_of(const std::function<void()>& work) {
  const double before = cpu_seconds();
  work();
  return cpu_seconds() - before;
}

struct Setting {
  ModelShape shape;
  at::ScalarType type;
  double element() const { return static_cast<double>(shape.element_bytes); }
};

struct LayerMatrix {
  const char* name;
  int64_t (*inputs)(const ModelShape&);
  int64_t (*outputs)(const ModelShape&);
};
inline constexpr LayerMatrix kLayerMatrices[] = {
    {"qkv", [](const ModelShape& m) { return m.hidden_size; },
     [](const ModelShape& m) { return m.query_width() + 2 * m.key_width(); }},
    {"output", [](const ModelShape& m) { return m.query_width(); },
     [](const ModelShape& m) { return m.hidden_size; }},
    {"gate_up", [](const ModelShape& m) { return m.hidden_size; },
     [](const ModelShape& m) { return 2 * m.intermediate_size; }},
    {"down", [](const ModelShape& m) { return m.intermediate_size; },
     [](const ModelShape& m) { return m.hidden_size; }}};

// The FLOPs and bytes of one run. num_sets() is the number of copies of the operands that together exceed the
// caches.
struct Work {
  double flops = 0, bytes = 0;
  bool in_place = false;  // most written bytes were read before: `bytes` counts them twice
  size_t num_sets() const {
    const double held = in_place ? bytes / 2 : bytes;
    return static_cast<size_t>(std::clamp(kRotatedBytes / std::max(held, 1.0) + 1, 2.0, 1024.0));
  }
};

struct Kernel {
  Work work;
  std::function<void(size_t turn)> run;
  size_t num_sets = 8;  // untimed first runs, one for each set: they cause page faults
};

// Keeps the results of the last runs, so that the allocator does not reuse a block that is still in a cache.
template <class Result>
class Ring {
 public:
  explicit Ring(size_t size) : results_(size) {}
  void put(Result result) { results_[next_++ % results_.size()] = std::move(result); }

 private:
  std::vector<Result> results_;
  size_t next_ = 0;
};

// A kernel that calls `run` on inputs that are made once.
template <class Run>
Kernel forward_of(const Work& work, const std::function<at::Tensor()>& make, Run run) {
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < work.num_sets(); ++i) inputs.push_back(make());
  using Result = decltype(run(inputs.front()));
  return {work,
          [inputs, run, ring = Ring<Result>(inputs.size())](size_t turn) mutable {
            ring.put(run(inputs[turn % inputs.size()]));
          },
          work.num_sets()};
}

constexpr int kLayers = 8;  // layers take turns, as in a model, so that no weights are in the nearest cache

// Layer has x, which requires a gradient, d_y and forward().
template <class Layer>
Kernel forward_of_layers(const Work& work, const std::vector<Layer>& layers) {
  return {work, [layers, results = Ring<at::Tensor>(layers.size())](size_t turn) mutable {
            const at::NoGradGuard no_grad;
            results.put(layers[turn % layers.size()].forward());
          }};
}
template <class Layer>
Kernel forward_backward_of_layers(const Work& work, const std::vector<Layer>& layers) {
  return {work, [layers, results = Ring<at::Tensor>(layers.size())](size_t turn) mutable {
            const auto& layer = layers[turn % layers.size()];
            results.put(torch::autograd::grad({layer.forward()}, {layer.x}, {layer.d_y}).front());
          }};
}

struct Graph {
  at::Tensor input;  // requires a gradient
  std::vector<at::Tensor> outputs;
};

// A kernel that runs backward on graphs that are made once and kept.
inline Kernel backward_of(const Work& work, const std::function<Graph()>& make) {
  std::vector<Graph> graphs;
  std::vector<std::vector<at::Tensor>> seeds;
  for (size_t i = 0; i < work.num_sets(); ++i) {
    graphs.push_back(make());
    seeds.emplace_back();
    for (const auto& y : graphs.back().outputs) seeds.back().push_back(values(y.sizes(), y.scalar_type()));
  }
  return {work,
          [graphs, seeds, ring = Ring<at::Tensor>(graphs.size())](size_t turn) mutable {
            const size_t i = turn % graphs.size();
            ring.put(torch::autograd::grad(graphs[i].outputs, {graphs[i].input}, seeds[i],
                                           /*retain_graph=*/true)
                         .front());
          },
          work.num_sets()};
}

class Rates {
 public:
  // Measures the FLOP/s of the product [kTokens, D] x [D, kTokens]. Takes the better of two runs, because the
  // first run finds other data in the caches.
  double products(const Setting& setting) {
    auto& rate = products_[{setting.shape.name, setting.type}];
    if (rate.best == 0) {
      rate.x = values({kTokens, setting.shape.hidden_size}, setting.type);
      rate.w = values({kTokens, setting.shape.hidden_size}, setting.type);
    }
    const double flops = 2.0 * static_cast<double>(kTokens * rate.w.numel());
    const auto once = [&] { return flops / cpu_seconds_of([&] { matrix_product(rate.x, rate.w.t()); }); };
    const double now = std::max(once(), once());
    rate.best = std::max(rate.best, now);
    return now;
  }
  double best_products(const Setting& setting) { return products_[{setting.shape.name, setting.type}].best; }

  // Measures bytes/s: of a += s if in_place, else of a = b + s·c. The latter also fetches the overwritten
  // bytes, which are not counted. Each call uses the next part of the arrays. A part is long enough that
  // starting the threads does not matter.
  double bandwidth(bool in_place) {
    if (!a_.defined()) {
      a_ = at::zeros({static_cast<int64_t>(kRotatedBytes) / 12}, at::kFloat);
      b_ = at::zeros_like(a_);
      c_ = at::zeros_like(a_);
    }
    const int64_t first = part_++ % (a_.size(0) / kPart) * kPart;
    auto a = a_.narrow(0, first, kPart);
    const auto b = b_.narrow(0, first, kPart), c = c_.narrow(0, first, kPart);
    const double seconds = cpu_seconds_of([&] {
      if (in_place) {
        a.add_(1.0);
      } else {
        at::add_out(a, b, c, 0.5);
      }
    });
    const double rate = (in_place ? 2 : 3) * static_cast<double>(a.nbytes()) / seconds;
    auto& best = in_place ? in_place_ : copied_;
    best = std::max(best, rate);
    return rate;
  }
  double best_bandwidth(bool in_place) const { return in_place ? in_place_ : copied_; }

  void print() const {
    for (const auto& [setting, rate] : products_)
      std::printf("products, %s %s: %.0f GFLOP/s\n", setting.first.c_str(), c10::toString(setting.second),
                  rate.best * 1e-9);
    if (copied_ > 0) std::printf("memory: %.1f GB/s\n", copied_ * 1e-9);
    if (in_place_ > 0) std::printf("memory, in place: %.1f GB/s\n", in_place_ * 1e-9);
    std::printf("%d threads\n", at::get_num_threads());
  }

 private:
  static constexpr int64_t kPart = 2 << 20;  // elements
  struct ProductRate {
    double best = 0;
    at::Tensor x, w;
  };
  std::map<std::pair<std::string, at::ScalarType>, ProductRate> products_;
  at::Tensor a_, b_, c_;
  int64_t part_ = 0;
  double copied_ = 0, in_place_ = 0;
};

// A benchmark program. Kernels are added by name. Each kernel is made when its turn comes; one exists at a
// time.
class Program {
 public:
  Program() {
    apply_cpu_workarounds();
    install_cpu_allocator();
    for (const char* name : {"small", "qwen3-0.6b"})
      for (const auto type : {at::kFloat, at::kBFloat16})
        settings_.push_back({named_model_shape(name, type == at::kFloat ? "fp32" : "bf16"), type});
  }

  // make(setting) returns the kernel. Its name becomes small/NAME/fp32 and so on.
  void add(const std::string& name, std::function<Kernel(const Setting&)> make) {
    for (const auto& setting : settings_) {
      const auto full =
          setting.shape.name + "/" + name + "/" + (setting.type == at::kFloat ? "fp32" : "bf16");
      benchmark::RegisterBenchmark(full.c_str(),
                                   [this, full, make, setting](benchmark::State& state) {
                                     if (current_name_ != full) {
                                       current_ = {};
                                       release_freed_cpu_memory();
                                       current_ = make(setting);
                                       current_name_ = full;
                                       for (turn_ = 0; turn_ < current_.num_sets; ++turn_)
                                         current_.run(turn_);
                                     }
                                     measure(state, setting);
                                   })
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }

  int run(int argc, char** argv) {
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
    benchmark::RunSpecifiedBenchmarks();
    rates_.print();
    return 0;
  }

 private:
  void measure(benchmark::State& state, const Setting& setting) {
    const auto& [flops, bytes, in_place] = current_.work;
    std::vector<double> parts;
    double fastest = std::numeric_limits<double>::infinity();
    bool by_products = true;
    for (auto _ : state) {
      const double seconds = cpu_seconds_of([&] { current_.run(turn_); });
      ++turn_;
      state.SetIterationTime(seconds);
      fastest = std::min(fastest, seconds);
      const double products = flops > 0 ? flops / rates_.products(setting) : 0;
      const double memory = bytes / rates_.bandwidth(in_place);
      by_products = products >= memory;
      parts.push_back(std::max(products, memory) / seconds);
    }
    const auto middle = parts.begin() + std::ssize(parts) / 2;
    std::nth_element(parts.begin(), middle, parts.end());
    state.counters["of_bound"] = *middle;
    const double products = flops > 0 ? flops / rates_.best_products(setting) : 0;
    state.counters["best"] = std::max(products, bytes / rates_.best_bandwidth(in_place)) / fastest;
    state.SetLabel(by_products ? "bound by products" : "bound by memory");
  }

  std::vector<Setting> settings_;
  Rates rates_;
  std::string current_name_;
  Kernel current_;
  size_t turn_ = 0;
};

}  // namespace bough::bench
