// Metrics of one training step (docs/formats.md), from the sums over its optimizer steps, its trajectories
// and its plans.
#pragma once

#include <cstdint>
#include <vector>

#include "data/trajectory.h"
#include "plan/load_balance.h"
#include "plan/plan.h"
#include "report/metrics.h"
#include "train/parallel_groups.h"
#include "tree/prefix_tree.h"

namespace bough {

// Computes the training step's metrics from those of all optimizer steps. A metric that is a sum (losses) is
// divided by the number of optimizer steps.
MetricValues combine(const WeightedSums& sums, int64_t num_updates);

// The number of repeated token computations: a token that several ranks compute counts once less than the
// number of these ranks.
int64_t tokens_twice(const std::vector<TokenSpan>& sequences, int64_t num_ranks,
                     const BalanceWeights& weights);

// Metrics of the critic's values, as computed when the batch was scored, against the returns.
MetricValues value_metrics(const std::vector<const Trajectory*>& batch);

// Metrics of a batch's prefix tree and its plans: compression, the fraction of tokens that is computed
// (AReaL's tree_token_ratio) and the fraction that is recomputed. With a cost model, also predicted seconds
// divided by the measured `seconds`. With several ranks, the metrics cover the plans of all ranks.
MetricValues tree_metrics(const PrefixTree& tree, const std::vector<const Plan*>& plans,
                          const PassCosts* costs = nullptr, double seconds = 0,
                          const TrainingRanks* ranks = nullptr);

}  // namespace bough
