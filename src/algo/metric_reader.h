// Copies many metrics from the device to the host in one transfer. A call of .item() per metric would wait
// for the GPU every time. A metric's tensor may have one entry per loss row or any other number of entries.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "algo/weighted_sum.h"

namespace bough {

class MetricReader {
 public:
  void add_sum(const std::string& name, const at::Tensor& values_R);   // kind sum
  void add_mean(const std::string& name, const at::Tensor& values_R);  // kind mean over the values
  void add_max(const std::string& name, const at::Tensor& values_R);   // kind max; R = 0: weight 0

  // Adds metrics that `read` computes on the host from `values` (fp64, any shape) when read() transfers them.
  using Read = std::function<WeightedSums(const double* values)>;
  void add(const at::Tensor& values, Read read);

  void append(MetricReader other);
  int64_t num_values() const { return num_values_; }  // number of values that read() will transfer

  // Transfers the values and returns all metrics. Metrics with equal names are merged.
  WeightedSums read() const;

 private:
  void add(const std::string& name, WeightedSum::Kind kind, const at::Tensor& values_R,
           const at::Tensor& value);

  std::vector<Read> reads_;
  std::vector<at::Tensor> values_;  // fp64, one dimension
  int64_t num_values_ = 0;
};

}  // namespace bough
