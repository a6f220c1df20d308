// What off-policy tokens are worth, by their age: the trainer's version less the version that drew a token,
// in bins 0, 1, 2, 3-4, 5-8 and 9 or more. Of each bin with a token in it, w = pi / mu:
//
//   age_3_to_4/importance_weight_mean  of w
//   age_3_to_4/effective_sample_size   (sum w)^2 / (n sum w^2): 1 where all w are equal
//   age_3_to_4/clip_fraction           where the loss clips
//
// pi is the policy of the training pass and not pi_old: so the numbers of a decoupled and a naive loss
// compare.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#include "algo/metric_reader.h"

namespace bough {

struct AgeBin {
  int64_t first;  // age; the bin ends where the next one begins
  const char* name;
};
inline constexpr std::array<AgeBin, 6> kAgeBins = {
    {{0, "age_0"}, {1, "age_1"}, {2, "age_2"}, {3, "age_3_to_4"}, {5, "age_5_to_8"}, {9, "age_9_up"}}};

// The index of the bin; what is ahead of the trainer has age 0.
int64_t age_bin(int64_t age);

// log_w_R: log(pi / mu), clamped, without gradient; clipped_R: bool, or undefined; versions_R: int32. In
// place of an effective sample size, which has no pieces to add, the mean square of w that it is made of:
// importance_weight_square_mean. Bins without a token have no entry.
void add_metrics_by_age(MetricReader& metrics, const at::Tensor& log_w_R, const at::Tensor& clipped_R,
                        const at::Tensor& versions_R, int64_t version);

}  // namespace bough
