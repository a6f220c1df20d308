// The norm and projection before attention, at the shapes of `small` and of Qwen3-0.6B: forward alone,
// and forward with backward. Bound by products.
//   build/bench/norm_linear --benchmark_counters_tabular=true
#include "kernels/linear/linear.h"

#include "kernel_bench.h"

namespace {

using namespace bough;
using namespace bough::bench;

struct Layer {
  Parameter norm, weight;
  at::Tensor x, d_y;

  at::Tensor forward() const { return norm_linear(x, norm, 1e-6, weight).y_RO; }
};

int64_t outputs(const Setting& s) {
  return s.shape.query_width() + 2 * s.shape.key_width();
}

std::vector<Layer> layers(const Setting& s) {
  const int64_t width = s.shape.hidden_size;
  std::vector<Layer> result(kLayers);
  for (auto& layer : result) {
    layer.norm = parameter({width}, s.type);
    layer.weight = parameter({outputs(s), width}, s.type);
    layer.x = values({kTokens, width}, s.type).requires_grad_(true);
    layer.d_y = values({kTokens, outputs(s)}, s.type);
  }
  return result;
}

Work work(const Setting& s, double passes) {
  const auto width = static_cast<double>(s.shape.hidden_size), out = static_cast<double>(outputs(s));
  const double tokens = kTokens;
  return {.flops = 2 * passes * tokens * width * out,
          .bytes = passes * (tokens * (width + out) + width * out) * s.element()};
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
  program.add("norm_linear/forward", forward);
  program.add("norm_linear/forward_backward", forward_backward);
  return program.run(argc, argv);
}
