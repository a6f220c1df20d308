// How far the policy that drew the samples (mu, the engine's) and the one that is trained (pi, dense) are
// apart, by a token's place in its response: 0 to 255, 1,023, 4,095, and beyond (DistillSparse, figures 2 and
// 4).
//
// Acceptance of a position is the sum over the vocabulary of min(mu, pi): the share of mu's draws that a
// rejection sampler of pi would keep. Two estimates:
//   min(1, pi / mu) of the token drawn: without bias, and as noisy as one draw is;
//   overlap: over the engine's most likely tokens one by one and all others as one token. It is at least the
//   acceptance, by no more than what mu or pi hold outside of these tokens, and has no noise.
#pragma once

#include <vector>

#include "data/trajectory.h"
#include "report/metrics.h"
#include "train/make_batch.h"

namespace bough {

// Below this mean the samples are those of another policy than the one that is trained.
inline constexpr double kLeastAcceptance = 0.86;

// min(1, pi / mu) of each row, [R], double.
at::Tensor sampled_acceptance(const at::Tensor& behaviour_log_probs_R, const at::Tensor& log_probs_R);

// [R], double: sum of min(mu, pi) over K tokens and the rest. Log-probabilities of the same tokens under
// both; a place without a token has -infinity under mu.
at::Tensor overlap_of(const at::Tensor& behaviour_given_RK, const at::Tensor& given_log_probs_RK);

// What a walk of the dense policy said of a batch's rows, before any update.
struct DenseValues {
  at::Tensor log_probs_R;
  at::Tensor overlap_R;  // undefined where the engine's most likely tokens are not known
  int64_t version = -1;  // of the weights; tokens of another version are stale ones
};

// Metrics of docs/formats.md: sparse/acceptance, sparse/overlap, sparse/ratio by place, sparse/kl_drawn and
// staleness/kl. Warns where the acceptance is below kLeastAcceptance. `rows`: what the batch was made of.
MetricValues acceptance_metrics(const std::vector<const Trajectory*>& rows, const TrainBatch& batch,
                                const DenseValues& dense);

}  // namespace bough
