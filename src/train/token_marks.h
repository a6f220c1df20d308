// Marks that keep tokens of a batch apart in its prefix tree. Plan execution replays records at marked ones.
//
// - A sparse policy computes a sampled token with page selection and all other tokens densely. So equal
//   tokens must not be one tree node if only one was sampled: sampled tokens have kDrawnMark.
// - If generation recorded a token's page selection or its experts, the token also has kReplayMark, and the
//   lower bits hold an index into TrainBatch::replayed. Tokens with equal ids and equal records have the same
//   index, so that they can be one node. Tokens with different records are different nodes.
// The executor removes the marks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/trajectory.h"

namespace bough {

struct TrainBatch;

inline constexpr int32_t kDrawnMark = 1 << 30, kReplayMark = 1 << 29;
inline int32_t token_id(int32_t marked) {
  return marked & ~kDrawnMark;
}

// The trajectories, or TrainBatch::routed_experts, own the data.
struct ReplayedToken {
  int32_t token = 0;
  std::span<const uint16_t> pages;    // PageChoices::of(); empty: not recorded
  std::span<const uint16_t> experts;  // RoutedExperts::row(); empty: not recorded
};

// Token records at equal prefixes of several sequences. A mixture of experts may have routed these tokens
// differently in each sequence.
struct RouteDifferences {
  int64_t rows = 0;       // records, one per token of a sequence
  int64_t different = 0;  // those unlike the most frequent record of their token
};

struct MarkSettings {
  bool sampled = false;  // mark sampled tokens and their block choices
  bool experts = false;  // mark recorded experts
  // Equal prefixes get the most frequent record of each token, and stay one node. false: each sequence keeps
  // its own records, and sequences part where the records differ.
  bool majority = false;
};

// Marks the batch's tokens. `trajectories`: those that the batch was made from, in order; with
// `settings.experts` their routed_experts count, unless batch.routed_experts has records.
RouteDifferences mark_tokens(TrainBatch& batch, const std::vector<const Trajectory*>& trajectories,
                             const MarkSettings& settings);

}  // namespace bough
