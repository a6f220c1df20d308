#include "train/token_age.h"

#include <algorithm>

#include "algo/metrics_by_age.h"
#include "base/error.h"

namespace bough {

namespace {
// Whether the loss trains position i and the token's version is known.
bool has_age(const Trajectory& row, size_t i) {
  return row.trains(i) && i < row.versions.size() && row.versions[i] >= 0;
}
}  // namespace

bool AgeLimit::is_too_old(const Trajectory& row, size_t i) const {
  return max_age > 0 && has_age(row, i) && version - row.versions[i] > max_age;
}

bool AgeLimit::is_too_old(const Trajectory& row) const {
  for (size_t i = 0; i < row.loss_mask.size(); ++i)
    if (is_too_old(row, i)) return true;
  return false;
}

int64_t mask_old_tokens(std::vector<Trajectory>& batch, const AgeLimit& limit) {
  int64_t num_masked = 0;
  for (Trajectory& row : batch) {
    if (!row.in_loss() || !limit.is_too_old(row)) continue;
    if (row.advantage.size() == 1) row.advantage.assign(row.input_ids.size(), row.advantage[0]);
    for (size_t i = 0; i < row.advantage.size(); ++i) {
      if (!limit.is_too_old(row, i)) continue;
      row.advantage[i] = 0;
      ++num_masked;
    }
  }
  return num_masked;
}

MetricValues age_metrics(const std::vector<Trajectory>& batch, int64_t version) {
  MetricValues metrics;
  double total = 0;
  int64_t count = 0, largest = 0;
  for (const Trajectory& row : batch) {
    if (!row.in_loss()) continue;
    for (size_t i = 0; i < row.loss_mask.size(); ++i) {
      if (!has_age(row, i)) continue;
      const int64_t age = version - row.versions[i];
      total += static_cast<double>(age);
      largest = std::max(largest, age);
      ++count;
      metrics[str(kAgeBins[static_cast<size_t>(age_bin(age))].name, "/tokens")] += 1;
    }
  }
  metrics["age/mean"] = total / static_cast<double>(std::max<int64_t>(1, count));
  metrics["age/max"] = static_cast<double>(largest);
  return metrics;
}

}  // namespace bough
