// Matrix products of a layer's matrices and the lm_head, at the shapes of `small` and of Qwen3-0.6B: forward
// x·Wᵀ, input gradient d_y·W, weight gradient += d_yᵀ·x. `ours` is kernels/matrix_product, `aten` is
// libtorch.
//   build/bench/matrix_product --benchmark_filter='small/.*/bf16'
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include "base/cpu.h"
#include "kernels/common/cpu_allocator.h"
#include "kernels/matrix_product/matrix_product.h"

namespace {

using namespace bough;

enum class Form { kForward, kInputGradient, kWeightGradient };

struct Case {
  std::string name;
  int64_t tokens, inputs, outputs;
  Form form;
  at::ScalarType type;
  bool ours;
};

// Rotates through several weights, as a model does, so that no weight is in the nearest cache.
constexpr int kWeights = 8;

void run(benchmark::State& state, const Case& c) {
  const auto values = [&](int64_t rows, int64_t columns, at::ScalarType type) {
    return at::empty({rows, columns}, at::kFloat).uniform_(-1, 1).to(type);
  };
  const auto x = values(c.tokens, c.inputs, c.type), d_y = values(c.tokens, c.outputs, c.type);
  std::vector<at::Tensor> weights, gradients;
  for (int i = 0; i < kWeights; ++i) {
    weights.push_back(values(c.outputs, c.inputs, c.type));
    gradients.push_back(at::zeros({c.outputs, c.inputs}));
  }
  size_t turn = 0;
  for (auto _ : state) {
    const size_t i = turn++ % kWeights;
    switch (c.form) {
      case Form::kForward:
        benchmark::DoNotOptimize(c.ours ? matrix_product_tiles(x, weights[i].t())
                                        : at::mm(x, weights[i].t()));
        break;
      case Form::kInputGradient:
        benchmark::DoNotOptimize(c.ours ? matrix_product_tiles(d_y, weights[i]) : at::mm(d_y, weights[i]));
        break;
      case Form::kWeightGradient:
        c.ours ? add_matrix_product_tiles_(gradients[i], d_y.t(), x)
               : add_matrix_product_reference_(gradients[i], d_y.t(), x);
    }
  }
  const double flops = 2.0 * static_cast<double>(c.tokens * c.inputs * c.outputs);
  state.counters["FLOP/s"] =
      benchmark::Counter(flops * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

}  // namespace

int main(int argc, char** argv) {
  apply_cpu_workarounds();
  install_cpu_allocator();
  struct Matrix {
    const char* name;
    int64_t inputs, outputs;
  };
  const Matrix matrices[] = {{"small/qkv", 512, 1024},       {"small/gate_up", 512, 3072},
                             {"small/down", 1536, 512},      {"small/head", 512, 4096},
                             {"qwen3-0.6b/qkv", 1024, 4096}, {"qwen3-0.6b/down", 3072, 1024}};
  const std::pair<Form, const char*> forms[] = {
      {Form::kForward, "forward"}, {Form::kInputGradient, "d_x"}, {Form::kWeightGradient, "d_w"}};
  for (const auto& matrix : matrices)
    for (const auto& [form, form_name] : forms)
      for (const auto type : {at::kFloat, at::kBFloat16})
        for (const int64_t tokens : {8, 64, 256, 1024, 2048})
          for (const bool ours : {true, false}) {
            if (ours && !has_tiles(type)) continue;
            Case c{std::string(matrix.name) + "/" + form_name + "/" + (type == at::kFloat ? "fp32" : "bf16") +
                       "/" + std::to_string(tokens) + (ours ? "/ours" : "/aten"),
                   tokens,
                   matrix.inputs,
                   matrix.outputs,
                   form,
                   type,
                   ours};
            benchmark::RegisterBenchmark(c.name.c_str(), [c](benchmark::State& state) {
              run(state, c);
            })->UseRealTime();
          }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
