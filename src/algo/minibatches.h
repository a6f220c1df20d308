// ppo_n_minibatches: splits a batch by whole groups, one optimizer step each, pi_old fixed at the start.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace bough {

// Mini-batches as ascending lists of sequence indices; each sequence in exactly one, a group never split,
// none empty. Groups go, heaviest first, to the mini-batch with the fewest tokens (then the fewest groups,
// then the first): the heaviest mini-batch is at most 4/3 of the best possible (Graham 1969). Deterministic.
// A batch of fewer groups than num_minibatches (filters drop groups) gives one mini-batch a group; an empty
// batch gives none.
// groups, tokens: [S]. UserError: num_minibatches < 1.
std::vector<std::vector<int64_t>> split_minibatches(std::span<const int64_t> groups,
                                                    std::span<const int64_t> tokens, int64_t num_minibatches);

}  // namespace bough
