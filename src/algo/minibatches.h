// ppo_n_minibatches: splits a batch into mini-batches of whole groups. Each mini-batch is one optimizer step.
// pi_old stays the policy at the start of the batch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace bough {

// Returns the mini-batches as ascending lists of sequence indices. Each sequence is in exactly one list. No
// group is split and no list is empty. Deterministic.
//
// Groups are assigned in order of decreasing tokens, each to the mini-batch with the fewest tokens (ties:
// fewest groups, then the first). The largest mini-batch is at most 4/3 of the optimum (Graham 1969). If
// there are fewer groups than num_minibatches, each group is a mini-batch. An empty batch gives none.
// groups, tokens: [S]. Throws UserError if num_minibatches < 1.
std::vector<std::vector<int64_t>> split_minibatches(std::span<const int64_t> groups,
                                                    std::span<const int64_t> tokens, int64_t num_minibatches);

}  // namespace bough
