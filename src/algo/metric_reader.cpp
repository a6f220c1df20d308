#include "algo/metric_reader.h"

#include <ATen/ops/stack.h>

namespace bough {

void MetricReader::add_sum(const std::string& name, const at::Tensor& values_R) {
  entries_.push_back({name, WeightedSum::Kind::sum});
  values_.push_back(values_R.sum(at::kDouble));
}

void MetricReader::add_mean(const std::string& name, const at::Tensor& values_R) {
  entries_.push_back({name, WeightedSum::Kind::mean});
  values_.push_back(values_R.sum(at::kDouble));
}

void MetricReader::add_max(const std::string& name, const at::Tensor& values_R) {
  entries_.push_back({name, WeightedSum::Kind::max});
  values_.push_back(num_rows_ == 0 ? values_R.sum(at::kDouble) : values_R.max().to(at::kDouble));
}

WeightedSums MetricReader::read() const {
  WeightedSums metrics;
  if (entries_.empty()) return metrics;
  const at::Tensor values = at::stack(values_).cpu();
  for (size_t i = 0; i < entries_.size(); ++i)
    metrics[entries_[i].name] = {entries_[i].kind, values.const_data_ptr<double>()[i],
                                 static_cast<double>(num_rows_)};
  return metrics;
}

}  // namespace bough
