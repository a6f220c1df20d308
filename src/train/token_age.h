// Age of a token: the trainer's version minus the version that sampled the token. The staleness limiter
// bounds the age only when a group starts; a group that is sampled slowly still ages afterwards. An AgeLimit
// masks tokens that are too old, or drops their groups. By default there is no limit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/trajectory.h"
#include "report/metrics.h"

namespace bough {

struct AgeLimit {
  int64_t version = 0;          // the trainer's
  int64_t max_age = 0;          // 0: no limit
  std::string action = "keep";  // keep (the loss corrects for age), mask or drop_group

  // Whether position i is a trained token that is older than max_age. False if its version is unknown.
  bool is_too_old(const Trajectory& row, size_t i) const;
  // Whether any token of `row` is too old.
  bool is_too_old(const Trajectory& row) const;
};

// Removes tokens that are too old from the policy term of the loss by setting their advantage to 0. As with
// every correction, these tokens stay in the denominator and in the terms of the current policy alone (KL,
// entropy). Call after the advantages are set. Returns the number of masked tokens.
int64_t mask_old_tokens(std::vector<Trajectory>& batch, const AgeLimit& limit);

// age/mean and age/max over the trained tokens of known version. age_3_to_4/tokens and so on: the number of
// these tokens per bin of add_metrics_by_age. An empty bin has no entry.
MetricValues age_metrics(const std::vector<Trajectory>& batch, int64_t version);

}  // namespace bough
