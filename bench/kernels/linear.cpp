// Linear layers with the matrices of `small` and of Qwen3-0.6B: forward, and backward with accumulation into
// the weight's gradient. Bound by products.
//   build/bench/linear --benchmark_counters_tabular=true
#include "kernels/linear/linear.h"

#include "kernel_bench.h"

namespace {

using namespace bough;
using namespace bough::bench;

struct Layer {
  Parameter weight;
  at::Tensor x, y, d_y;
};

std::vector<Layer> layers(const Setting& s, const LayerMatrix& matrix) {
  const int64_t inputs = matrix.inputs(s.shape), outputs = matrix.outputs(s.shape);
  std::vector<Layer> result(kLayers);
  for (auto& layer : result) {
    layer.weight = parameter({outputs, inputs}, s.type);
    layer.x = values({kTokens, inputs}, s.type).requires_grad_(true);
    layer.y = linear(layer.x, layer.weight);
    layer.d_y = values({kTokens, outputs}, s.type);
  }
  return result;
}

// One product and its operands.
Kernel forward(const Setting& s, const LayerMatrix& matrix) {
  const auto inputs = static_cast<double>(matrix.inputs(s.shape)), outputs = double(matrix.outputs(s.shape));
  const double tokens = kTokens;
  return {{.flops = 2 * tokens * inputs * outputs,
           .bytes = (tokens * (inputs + outputs) + inputs * outputs) * s.element()},
          [all = layers(s, matrix)](size_t turn) mutable {
            auto& layer = all[turn % kLayers];
            layer.y = linear(layer.x, layer.weight);
          }};
}

// Two products. Reads the weight, reads and writes its gradient in fp32.
Kernel backward(const Setting& s, const LayerMatrix& matrix) {
  const auto inputs = static_cast<double>(matrix.inputs(s.shape)), outputs = double(matrix.outputs(s.shape));
  const double tokens = kTokens;
  return {{.flops = 4 * tokens * inputs * outputs,
           .bytes = (tokens * (2 * inputs + outputs) + inputs * outputs) * s.element() +
                    inputs * outputs * 2 * sizeof(float)},
          [all = layers(s, matrix), ring = Ring<at::Tensor>(kLayers)](size_t turn) mutable {
            const auto& layer = all[turn % kLayers];
            ring.put(torch::autograd::grad({layer.y}, {layer.x}, {layer.d_y}, /*retain_graph=*/true).front());
          }};
}

}  // namespace

int main(int argc, char** argv) {
  Program program;
  for (const auto& matrix : kLayerMatrices) {
    program.add(std::string("linear/") + matrix.name + "/forward",
                [&](const Setting& s) { return forward(s, matrix); });
    program.add(std::string("linear/") + matrix.name + "/backward",
                [&](const Setting& s) { return backward(s, matrix); });
  }
  return program.run(argc, argv);
}
