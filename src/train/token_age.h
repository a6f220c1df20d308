// Age of a token: the trainer's version less the version that drew it. What a batch's tokens are, and what is
// done about those that are too old. The staleness gate bounds when a group begins; a group that takes long
// grows old all the same, so that a bound drops or masks the slow ones first. None by default.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/trajectory.h"
#include "report/metrics.h"

namespace bough {

struct AgeLimit {
  int64_t version = 0;          // the trainer's
  int64_t max_age = 0;          // 0: no bound
  std::string action = "keep";  // keep: the loss corrects for it; mask; drop_group

  // Whether position i is a token that the policy drew, under a version that is too far behind. A token whose
  // version is not known is not too old.
  bool is_too_old(const Trajectory& row, size_t i) const;
  // Whether any token of the row is.
  bool is_too_old(const Trajectory& row) const;
};

// Takes tokens that are too old out of the policy term of the loss: their advantage is 0. They stay in its
// denominator, and in the terms that are about the current policy alone (KL, entropy), as with every
// correction. Rows must have their advantages. Returns how many tokens of the loss that were.
int64_t mask_old_tokens(std::vector<Trajectory>& batch, const AgeLimit& limit);

// age/mean, age/max: over the tokens of the loss whose version is known. age_3_to_4/tokens: how many of them
// are of that age; the bins are those of add_metrics_by_age, where one is empty it has no entry.
MetricValues age_metrics(const std::vector<Trajectory>& batch, int64_t version);

}  // namespace bough
