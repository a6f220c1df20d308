// The embedding's gradient: adds the pass's token rows to rows of the weight's gradient. Bound by memory.
//   build/bench/embedding --benchmark_counters_tabular=true
#include "kernels/embedding/embedding.h"

#include "kernel_bench.h"

namespace {

using namespace bough;
using namespace bough::bench;

Kernel backward(const Setting& s) {
  const int64_t width = s.shape.hidden_size;
  // Per row: reads the row's gradient, reads and writes the row of the sum.
  const Work work{.bytes = static_cast<double>(kTokens * width) * (s.element() + 2 * sizeof(float))};
  // The gradient of a small vocabulary fits into a cache, so the benchmark rotates through several.
  const double matrix = static_cast<double>(s.shape.vocab_size * width) * sizeof(float);
  std::vector<Parameter> weights;
  for (double held = 0; held < kRotatedBytes; held += matrix)
    weights.push_back(parameter({s.shape.vocab_size, width}, s.type));
  std::vector<at::Tensor> outputs, seeds;
  for (size_t i = 0; i < work.num_sets(); ++i) {
    const auto tokens = at::randint(s.shape.vocab_size, {kTokens}, at::kLong);
    outputs.push_back(embedding(tokens, weights[i % weights.size()]));
    seeds.push_back(values(outputs.back().sizes(), s.type));
  }
  return {work,
          [weights, outputs, seeds](size_t turn) {
            const size_t i = turn % outputs.size();
            torch::autograd::backward({outputs[i]}, {seeds[i]}, /*retain_graph=*/true);
          },
          work.num_sets()};
}

}  // namespace

int main(int argc, char** argv) {
  Program program;
  program.add("embedding/backward", backward);
  return program.run(argc, argv);
}
