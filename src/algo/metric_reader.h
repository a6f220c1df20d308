// Reads many metrics off the device in one copy: each .item() of its own would wait for a GPU once a metric
// and block. Values are by row, or by anything else that there is a number of.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "algo/weighted_sum.h"

namespace bough {

class MetricReader {
 public:
  void add_sum(const std::string& name, const at::Tensor& values_R);   // kind sum
  void add_mean(const std::string& name, const at::Tensor& values_R);  // kind mean over the values
  void add_max(const std::string& name, const at::Tensor& values_R);   // kind max; R = 0: nothing seen

  WeightedSums read() const;

 private:
  struct Entry {
    std::string name;
    WeightedSum::Kind kind;
    double weight;
  };
  void add(const std::string& name, WeightedSum::Kind kind, const at::Tensor& values_R, at::Tensor value);

  std::vector<Entry> entries_;
  std::vector<at::Tensor> values_;  // [] fp64 each
};

}  // namespace bough
