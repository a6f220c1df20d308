#include "cost/rates.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>

#include "base/clock.h"
#include "kernels/common/device.h"
#include "kernels/matrix_product/matrix_product.h"

namespace bough {

namespace {

// The seconds of the fastest of several runs of `work`. Waits until the device is done.
template <class Work>
double least_seconds(at::Device device, const Work& work) {
  double least = INFINITY;
  for (int i = 0; i < 8; ++i) {
    synchronize(device);
    const auto start = std::chrono::steady_clock::now();
    work();
    synchronize(device);
    least = std::min(least, seconds_since(start));
  }
  return least;
}

}  // namespace

double matrix_product_rate(const ModelShape& shape, at::ScalarType dtype, at::Device device) {
  const std::pair<int64_t, int64_t> matrices[] = {
      {shape.hidden_size, shape.query_width() + 2 * shape.key_width()},
      {shape.hidden_size, 2 * shape.intermediate_size},
      {shape.intermediate_size, shape.hidden_size}};
  double best = 0;
  for (const auto& [inputs, outputs] : matrices)
    for (const int64_t rows : {256, 1024, 4096, 16384}) {
      if (rows > 4096 && device.is_cpu()) continue;
      const auto options = at::TensorOptions(device).dtype(at::kFloat);
      const auto x = at::empty({rows, inputs}, options).uniform_(-1, 1).to(dtype);
      const auto w = at::empty({outputs, inputs}, options).uniform_(-1, 1).to(dtype);
      const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(inputs * outputs);
      best = std::max(best, flops / least_seconds(device, [&] { matrix_product(x, w.t()); }));
    }
  return best;
}

double read_rate(int64_t bytes, at::Device device) {
  const int64_t count = std::max<int64_t>(1, bytes / 8);
  const auto values = at::ones({count}, at::TensorOptions(device).dtype(at::kLong));
  if (!device.is_cpu()) return static_cast<double>(8 * count) / least_seconds(device, [&] { values.sum(); });
  const auto* data = values.const_data_ptr<int64_t>();
  std::atomic<int64_t> total{0};
  const double seconds = least_seconds(device, [&] {
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
  });
  // uses the sum, so the compiler keeps the loop
  return total > 0 ? static_cast<double>(8 * count) / seconds : 0;
}

double host_copy_rate(int64_t bytes, at::Device device) {
  const auto type = at::TensorOptions().dtype(at::kByte);
  const at::Tensor here = at::zeros({bytes}, type.pinned_memory(!device.is_cpu()));
  const at::Tensor there = at::zeros({bytes}, type.device(device));
  const double to_device = least_seconds(device, [&] { there.copy_(here, /*non_blocking=*/true); });
  const double to_host = least_seconds(device, [&] { here.copy_(there, /*non_blocking=*/true); });
  return static_cast<double>(bytes) / std::max(to_device, to_host);
}

}  // namespace bough
