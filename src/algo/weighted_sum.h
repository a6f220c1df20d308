// A metric that is gathered in pieces: over the blocks of a walk, micro-batches and ranks. Merging is
// associative and commutative up to rounding, so the pieces may arrive in any order.
#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "base/error.h"

namespace bough {

struct WeightedSum {
  enum class Kind {
    sum,   // adds up: a loss whose denominator is already in its weights
    mean,  // sum / weight
    max,   // `sum` holds the largest value seen
  };

  Kind kind = Kind::mean;
  double sum = 0.0;
  double weight = 0.0;  // rows seen; 0: nothing seen yet, and `sum` means nothing for a maximum

  void merge(const WeightedSum& other) {
    if (other.weight == 0.0) return;
    if (weight == 0.0) {
      *this = other;
      return;
    }
    BOUGH_CHECK(kind == other.kind, "one metric merged as two kinds");
    sum = kind == Kind::max ? std::max(sum, other.sum) : sum + other.sum;
    weight += other.weight;
  }

  // 0 where nothing was seen: a batch without a trained token still writes finite metrics.
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
