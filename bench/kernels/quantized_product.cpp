// Products with 8-bit weights: the matrices of a layer of `small` and of Qwen3-0.6B, with 1, 8, 32 and 128
// rows as in decoding steps. Few rows are bound by the bytes of the weights, many rows by products.
//   build/bench/quantized_product --benchmark_counters_tabular=true
#include "kernels/quantized_product/quantized_product.h"

#include "kernel_bench.h"

namespace {

using namespace bough;
using namespace bough::bench;

struct Weight {
  at::Tensor quantized, scale;
};

Kernel product(const Setting& s, const LayerMatrix& matrix, int64_t rows) {
  const int64_t inputs = matrix.inputs(s.shape), outputs = matrix.outputs(s.shape);
  const auto weights = static_cast<double>(inputs * outputs), num_rows = static_cast<double>(rows);
  const Work work{.flops = 2 * num_rows * weights,
                  .bytes = weights + sizeof(float) * static_cast<double>(outputs) +
                           num_rows * static_cast<double>(inputs + outputs) * s.element()};
  std::vector<Weight> all(work.num_sets());
  for (auto& weight : all) {
    weight = {at::empty({outputs, inputs}, at::kChar), at::empty({outputs}, at::kFloat)};
    quantize_rows_(weight.quantized, weight.scale, values({outputs, inputs}, s.type));
  }
  const auto x = values({rows, inputs}, s.type);
  return {work, [all, x](size_t turn) {
            const Weight& weight = all[turn % all.size()];
            benchmark::DoNotOptimize(quantized_product(x, weight.quantized, weight.scale));
          }};
}

}  // namespace

int main(int argc, char** argv) {
  Program program;
  for (const auto& matrix : kLayerMatrices)
    for (const int64_t rows : {1, 8, 32, 128})
      program.add(std::string("quantized_product/") + matrix.name + "/" + std::to_string(rows),
                  [&matrix, rows](const Setting& s) { return product(s, matrix, rows); });
  return program.run(argc, argv);
}
