#include "algo/metric_reader.h"

#include <ATen/ops/cat.h>

#include <iterator>
#include <utility>

namespace bough {

void MetricReader::add(const at::Tensor& values, Read read) {
  values_.push_back(values.reshape(-1));
  reads_.push_back(std::move(read));
  num_values_ += values.numel();
}

void MetricReader::add(const std::string& name, WeightedSum::Kind kind, const at::Tensor& values_R,
                       const at::Tensor& value) {
  add(value, [name, kind, weight = static_cast<double>(values_R.numel())](const double* values) {
    return WeightedSums{{name, {kind, *values, weight}}};
  });
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

void MetricReader::append(MetricReader other) {
  std::move(other.values_.begin(), other.values_.end(), std::back_inserter(values_));
  std::move(other.reads_.begin(), other.reads_.end(), std::back_inserter(reads_));
  num_values_ += other.num_values_;
}

WeightedSums MetricReader::read() const {
  WeightedSums metrics;
  if (reads_.empty()) return metrics;
  const at::Tensor all = at::cat(values_).cpu();
  const double* values = all.const_data_ptr<double>();
  for (size_t i = 0; i < reads_.size(); values += values_[i++].numel())
    for (const auto& [name, metric] : reads_[i](values)) {
      const auto [found, is_new] = metrics.try_emplace(name, metric);
      if (!is_new) found->second.merge(metric);
    }
  return metrics;
}

}  // namespace bough
