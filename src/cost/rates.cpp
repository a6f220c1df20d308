#include "cost/rates.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
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

double read_rate(int64_t bytes) {
  const int64_t count = std::max<int64_t>(1, bytes / 8);
  const auto values = at::ones({count}, at::kLong);
  const auto* data = values.const_data_ptr<int64_t>();
  double best = 0;
  std::atomic<int64_t> total{0};
  for (int i = 0; i < 8; ++i) {
    const auto start = std::chrono::steady_clock::now();
    at::parallel_for(0, count, 4096, [&](int64_t begin, int64_t end) {
      int64_t sums[8] = {};
      int64_t j = begin;
      for (; j + 8 <= end; j += 8)
        for (int64_t l = 0; l < 8; ++l) sums[l] += data[j + l];
      for (; j < end; ++j) sums[0] += data[j];
      int64_t sum = 0;
      for (const int64_t lane : sums) sum += lane;
      total += sum;
    });
    best = std::max(best, static_cast<double>(8 * count) / seconds_since(start));
  }
  return total > 0 ? best : 0;  // the sum is used: the loop stays
}

}  // namespace bough
