#include "cost/product_rate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "kernels/matrix_product/matrix_product.h"

namespace bough {

double matrix_product_rate(const ModelShape& shape, at::ScalarType dtype) {
  const std::pair<int64_t, int64_t> matrices[] = {
      {shape.hidden_size, shape.query_width() + 2 * shape.key_width()},
      {shape.hidden_size, 2 * shape.intermediate_size},
      {shape.intermediate_size, shape.hidden_size}};
  double best = 0;
  for (const auto& [inputs, outputs] : matrices)
    for (const int64_t rows : {256, 1024, 4096}) {
      const auto x = at::empty({rows, inputs}, at::kFloat).uniform_(-1, 1).to(dtype);
      const auto w = at::empty({outputs, inputs}, at::kFloat).uniform_(-1, 1).to(dtype);
      for (int i = 0; i < 8; ++i) {
        const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(inputs * outputs);
        const auto start = std::chrono::steady_clock::now();
        matrix_product(x, w.t());
        best = std::max(best, flops / seconds_since(start));
      }
    }
  return best;
}

}  // namespace bough
