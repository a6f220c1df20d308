// The feed-forward sublayer at the shapes of `small` and of Qwen3-0.6B: forward alone, and forward with
// backward. Backward overwrites the tensors that forward saved, so it cannot be repeated alone. Bound by
// products.
//   build/bench/mlp --benchmark_counters_tabular=true
#include "kernels/linear/linear.h"

#include "kernel_bench.h"

namespace {

using namespace bough;
using namespace bough::bench;

struct Layer {
  Parameter norm, gate_up, down;
  at::Tensor x, d_y;

  at::Tensor forward() const { return mlp(x, {&norm, gate_up, down, 1e-6}); }
};

std::vector<Layer> layers(const Setting& s) {
  const int64_t width = s.shape.hidden_size, inner = s.shape.intermediate_size;
  std::vector<Layer> result(kLayers);
  for (auto& layer : result) {
    layer.norm = parameter({width}, s.type);
    layer.gate_up = parameter({2 * inner, width}, s.type);
    layer.down = parameter({width, inner}, s.type);
    layer.x = values({kTokens, width}, s.type).requires_grad_(true);
    layer.d_y = values({kTokens, width}, s.type);
  }
  return result;
}

// `passes` times: three matrices, x, y, gate and up once each.
Work work(const Setting& s, double passes) {
  const auto width = static_cast<double>(s.shape.hidden_size), inner = double(s.shape.intermediate_size);
  const double tokens = kTokens, weights = 3 * inner * width;
  return {.flops = 2 * passes * tokens * weights,
          .bytes = passes * (tokens * (2 * width + 2 * inner) + weights) * s.element()};
}

Kernel forward(const Setting& s) {
  return forward_of_layers(work(s, 1), layers(s));
}

Kernel forward_backward(const Setting& s) {
  return forward_backward_of_layers(work(s, 3), layers(s));
}

}  // namespace

int main(int argc, char** argv) {
  Program program;
  program.add("mlp/forward", forward);
  program.add("mlp/forward_backward", forward_backward);
  return program.run(argc, argv);
}
