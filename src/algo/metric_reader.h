// Reads many metrics off the device in one copy: each .item() of its own would wait for a GPU once a metric
// and block. Values are by row, or by anything else that there is a number of.
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
  void add_max(const std::string& name, const at::Tensor& values_R);   // kind max; R = 0: nothing seen

  // Metrics that the host makes of these values, fp64.
  using Read = std::function<WeightedSums(const double* values)>;
  void add(const at::Tensor& values, Read read);

  void append(MetricReader other);
  int64_t num_values() const { return num_values_; }  // that wait to be read

  // In the order in which they were added. Metrics of one name are merged.
  WeightedSums read() const;

 private:
  void add(const std::string& name, WeightedSum::Kind kind, const at::Tensor& values_R,
           const at::Tensor& value);

  std::vector<Read> reads_;
  std::vector<at::Tensor> values_;  // fp64, one dimension
  int64_t num_values_ = 0;
};

}  // namespace bough
