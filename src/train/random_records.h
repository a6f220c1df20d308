// Random recorded experts, for tests.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "data/trajectory.h"
#include "models/config.h"

namespace bough {

inline std::vector<const Trajectory*> pointers_of(const std::vector<Trajectory>& trajectories) {
  std::vector<const Trajectory*> rows;
  for (const Trajectory& trajectory : trajectories) rows.push_back(&trajectory);
  return rows;
}

// Gives every trajectory random records for all tokens but the last. A token's record depends on the tokens
// up to it and on `variant`, so equal prefixes have equal records.
inline void set_records(std::vector<Trajectory>& trajectories, const ModelConfig& config,
                        uint64_t variant = 0) {
  for (Trajectory& trajectory : trajectories) {
    RoutedExperts& routed = trajectory.routed_experts;
    routed = {
        .num_layers = config.num_sparse_layers(), .num_chosen = config.experts_per_token, .experts = {}};
    uint64_t prefix = 7 + variant;
    for (size_t i = 0; i + 1 < trajectory.input_ids.size(); ++i) {
      prefix = prefix * 6364136223846793005u + static_cast<uint64_t>(trajectory.input_ids[i]) +
               1442695040888963407u;
      std::mt19937_64 random(prefix);
      for (int64_t layer = 0; layer < routed.num_layers; ++layer) {
        std::vector<uint16_t> experts(static_cast<size_t>(config.num_experts));
        std::iota(experts.begin(), experts.end(), uint16_t{0});
        std::shuffle(experts.begin(), experts.end(), random);
        routed.experts.insert(routed.experts.end(), experts.begin(),
                              experts.begin() + config.experts_per_token);
      }
    }
  }
}

inline std::vector<RoutedExperts> records_of(const std::vector<Trajectory>& trajectories) {
  std::vector<RoutedExperts> records;
  for (const Trajectory& trajectory : trajectories)
    if (trajectory.in_loss()) records.push_back(trajectory.routed_experts);
  return records;
}

}  // namespace bough
