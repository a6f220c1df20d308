// Reads many metrics off the device in one copy: each .item() of its own would wait for a GPU once a metric
// and block.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "algo/weighted_sum.h"

namespace bough {

class MetricReader {
 public:
  explicit MetricReader(int64_t num_rows) : num_rows_(num_rows) {}

  void add_sum(const std::string& name, const at::Tensor& values_R);   // kind sum
  void add_mean(const std::string& name, const at::Tensor& values_R);  // kind mean over rows
  void add_max(const std::string& name, const at::Tensor& values_R);   // kind max; R = 0: nothing seen

  WeightedSums read() const;

 private:
  struct Entry {
    std::string name;
    WeightedSum::Kind kind;
  };
  int64_t num_rows_;
  std::vector<Entry> entries_;
  std::vector<at::Tensor> values_;  // [] fp64 each
};

}  // namespace bough
