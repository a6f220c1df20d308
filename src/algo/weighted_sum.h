// A metric that is merged over the blocks of a plan execution, micro-batches and ranks. Merging is
// associative and commutative up to rounding, so the parts may arrive in any order.
#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "base/error.h"

namespace bough {

struct WeightedSum {
  enum class Kind {
    sum,   // the sum, for instance of a loss whose weights include the denominator
    mean,  // sum / weight
    max,   // `sum` is the largest value
  };

  Kind kind = Kind::mean;
  double sum = 0.0;
  double weight = 0.0;  // number of merged values; if 0, `sum` of kind max has no meaning

  void merge(const WeightedSum& other) {
    if (other.weight == 0.0) return;
    if (weight == 0.0) {
      *this = other;
      return;
    }
    BOUGH_CHECK(kind == other.kind, "a metric is merged with one of another kind");
    sum = kind == Kind::max ? std::max(sum, other.sum) : sum + other.sum;
    weight += other.weight;
  }

  // 0 if there are no values, so that a batch without trained tokens still has finite metrics.
  double value() const {
    if (weight == 0.0) return 0.0;
    return kind == Kind::mean ? sum / weight : sum;
  }
};

using WeightedSums = std::map<std::string, WeightedSum>;

inline void merge(WeightedSums& into, const WeightedSums& from) {
  for (const auto& [name, metric] : from) into[name].merge(metric);
}

}  // namespace bough
