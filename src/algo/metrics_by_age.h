// Importance weights of off-policy tokens by age. The age of a token is the trainer's version minus the
// version that sampled the token. The bins are 0, 1, 2, 3-4, 5-8 and 9 or more. With w = pi / mu, the
// metrics of a bin that has tokens are, for instance:
//
//   age_3_to_4/importance_weight_mean  the mean of w
//   age_3_to_4/effective_sample_size   (sum w)^2 / (n sum w^2), n tokens; 1 if all w are equal
//   age_3_to_4/clip_fraction           only if the loss clips
//
// pi is the policy of the training pass, not pi_old. The metrics are therefore comparable between runs with
// and without use_decoupled_loss.
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

// Returns the bin's index. A negative age (a token newer than the trainer) is in bin 0.
int64_t age_bin(int64_t age);

// Adds the metrics of the loss rows.
//   log_w_R     log(pi / mu), clamped, without gradient
//   clipped_R   bool; undefined if the loss has no clip
//   versions_R  int32
// The effective sample size cannot be merged over plan blocks. Therefore the function adds the mean of w^2
// instead, as importance_weight_square_mean. Bins without tokens get no entry.
void add_metrics_by_age(MetricReader& metrics, const at::Tensor& log_w_R, const at::Tensor& clipped_R,
                        const at::Tensor& versions_R, int64_t version);

}  // namespace bough
