#include "algo/metrics_by_age.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <string>

namespace bough {

int64_t age_bin(int64_t age) {
  int64_t bin = 0;
  while (bin + 1 < std::ssize(kAgeBins) && age >= kAgeBins[static_cast<size_t>(bin) + 1].first) ++bin;
  return bin;
}

namespace {
// columns: [3, num_rows]: version, w = pi / mu, and 1 if the row is clipped, else 0.
WeightedSums by_age(const double* columns, int64_t num_rows, int64_t version, bool has_clipped) {
  struct Sums {
    double rows = 0, weights = 0, squares = 0, clipped = 0;
  };
  std::array<Sums, kAgeBins.size()> bins;
  for (int64_t r = 0; r < num_rows; ++r) {
    const double w = columns[num_rows + r];
    Sums& sums = bins[static_cast<size_t>(age_bin(version - static_cast<int64_t>(columns[r])))];
    sums.rows += 1;
    sums.weights += w;
    sums.squares += w * w;
    sums.clipped += columns[2 * num_rows + r];
  }
  WeightedSums metrics;
  for (size_t b = 0; b < bins.size(); ++b) {
    if (bins[b].rows == 0) continue;
    const auto add = [&](const char* name, double sum) {
      metrics[std::string(kAgeBins[b].name) + "/" + name] = {WeightedSum::Kind::mean, sum, bins[b].rows};
    };
    add("importance_weight_mean", bins[b].weights);
    add("importance_weight_square_mean", bins[b].squares);
    if (has_clipped) add("clip_fraction", bins[b].clipped);
  }
  return metrics;
}
}  // namespace

void add_metrics_by_age(MetricReader& metrics, const at::Tensor& log_w_R, const at::Tensor& clipped_R,
                        const at::Tensor& versions_R, int64_t version) {
  const at::Tensor w_R = log_w_R.to(at::kDouble).exp();
  const at::Tensor clipped_or_0_R = clipped_R.defined() ? clipped_R.to(at::kDouble) : at::zeros_like(w_R);
  metrics.add(at::stack({versions_R.to(at::kDouble), w_R, clipped_or_0_R}),
              [num_rows = versions_R.numel(), version, has_clipped = clipped_R.defined()](
                  const double* values) { return by_age(values, num_rows, version, has_clipped); });
}

}  // namespace bough
