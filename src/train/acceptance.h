// Distance between the policy that sampled the tokens (mu, the engine's) and the trained policy (pi, with
// dense attention), by position in the response: 0 to 255, to 1,023, to 4,095, and beyond (DistillSparse,
// figures 2 and 4).
//
// Acceptance at a position is the sum over the vocabulary of min(mu, pi): the fraction of mu's samples that a
// rejection sampler for pi would keep. Two estimates:
//   min(1, pi / mu) of the sampled token: unbiased, with the noise of one sample;
//   overlap: the sum over the engine's top-k tokens, with all other tokens merged into one. It has no
//   sampling noise. It is an upper bound: the excess is at most mu's or pi's probability outside the top k.
#pragma once

#include <vector>

#include "data/trajectory.h"
#include "report/metrics.h"
#include "train/make_batch.h"

namespace bough {

// If the mean acceptance is below this, acceptance_metrics() warns: mu is a different policy than pi.
inline constexpr double kLeastAcceptance = 0.86;

// min(1, pi / mu) of each loss row, [R], double.
at::Tensor sampled_acceptance(const at::Tensor& behaviour_log_probs_R, const at::Tensor& log_probs_R);

// [R], double: sum of min(mu, pi) over K tokens and all other tokens as one. Both arguments, [R, K], are
// log-probabilities of the same tokens. Padding has -infinity under mu.
at::Tensor overlap_of(const at::Tensor& behaviour_top_k_RK, const at::Tensor& top_k_log_probs_RK);

// Results for a batch's loss rows under the policy with dense attention, before any update of the batch.
struct DenseValues {
  at::Tensor log_probs_R;
  at::Tensor overlap_R;  // undefined if the engine's top-k tokens are not known
  int64_t version = -1;  // of the weights; tokens of an older version are stale; -1: not known
};

// Metrics of docs/formats.md: sparse/acceptance, sparse/overlap and sparse/ratio by position in the response,
// sparse/kl_drawn and staleness/kl. `rows`: the trajectories that `batch` was made from, in order.
MetricValues acceptance_metrics(const std::vector<const Trajectory*>& rows, const TrainBatch& batch,
                                const DenseValues& dense);

}  // namespace bough
