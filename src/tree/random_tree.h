// Random batches with shared prefixes, for tests.
#pragma once

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "tree/prefix_tree.h"

namespace bough {

inline std::vector<TokenSpan> as_spans(const std::vector<std::vector<int32_t>>& sequences) {
  return {sequences.begin(), sequences.end()};
}

inline int64_t longest_sequence(const std::vector<std::vector<int32_t>>& sequences) {
  size_t result = 0;
  for (const auto& s : sequences) result = std::max(result, s.size());
  return static_cast<int64_t>(result);
}

// Returns sequences whose prefix tree has at most `max_tokens` tokens. Token ids are in [0, vocab). Most
// sequences branch off an earlier one at a random position. Some are empty, equal to another one, a prefix of
// another one, or have no common prefix with any.
inline std::vector<std::vector<int32_t>> random_sequences(uint64_t seed, int64_t max_tokens,
                                                          int32_t vocab = 50) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  const int64_t longest_piece = 1 + below(std::max<int64_t>(1, max_tokens / 3));
  std::vector<std::vector<int32_t>> sequences;
  const int64_t count = 1 + below(24);
  int64_t budget = max_tokens;
  for (int64_t s = 0; s < count; ++s) {
    std::vector<int32_t> sequence;
    if (!sequences.empty() && below(8) != 0) {
      const auto& base = sequences[below(static_cast<int64_t>(sequences.size()))];
      sequence.assign(base.begin(), base.begin() + below(static_cast<int64_t>(base.size()) + 1));
    }
    int64_t extra = below(6) == 0 ? 0 : 1 + below(longest_piece);
    extra = std::min(extra, budget);
    budget -= extra;
    for (int64_t i = 0; i < extra; ++i) sequence.push_back(static_cast<int32_t>(below(vocab)));
    sequences.push_back(std::move(sequence));
  }
  return sequences;
}

}  // namespace bough
