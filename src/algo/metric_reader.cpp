#include "algo/metric_reader.h"

#include <ATen/ops/stack.h>

namespace bough {

void MetricReader::add(const std::string& name, WeightedSum::Kind kind, const at::Tensor& values_R,
                       at::Tensor value) {
  entries_.push_back({name, kind, static_cast<double>(values_R.numel())});
  values_.push_back(std::move(value));
}

void MetricReader::add_sum(const std::string& name, const at::Tensor& values_R) {
  add(name, WeightedSum::Kind::sum, values_R, values_R.sum(at::kDouble));
}

void MetricReader::add_mean(const std::string& name, const at::Tensor& values_R) {
  add(name, WeightedSum::Kind::mean, values_R, values_R.sum(at::kDouble));
}

void MetricReader::add_max(const std::string& name, const at::Tensor& values_R) {
  add(name, WeightedSum::Kind::max, values_R,
      values_R.numel() == 0 ? values_R.sum(at::kDouble) : values_R.max().to(at::kDouble));
}

WeightedSums MetricReader::read() const {
  WeightedSums metrics;
  if (entries_.empty()) return metrics;
  const at::Tensor values = at::stack(values_).cpu();
  for (size_t i = 0; i < entries_.size(); ++i)
    metrics[entries_[i].name] = {entries_[i].kind, values.const_data_ptr<double>()[i], entries_[i].weight};
  return metrics;
}

}  // namespace bough
