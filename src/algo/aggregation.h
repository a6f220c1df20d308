// Denominators of a loss. They are computed before any pass, as one weight per sequence, which all loss rows
// of the sequence get. Then loss = sum over loss rows of weight * per_token, and the losses of plan blocks,
// micro-batches and ranks just add.
//
// n_s is the number of trained tokens of sequence s. Sums run over the global batch of one optimizer step
// (all ranks and micro-batches). Tokens that a correction sets to 0 are counted too.
//   token_mean       1 / sum of n                              DAPO
//   sequence_mean    1 / (S n_s)                               GRPO: mean of token means
//   constant_length  1 / (S constant_length)                   Dr.GRPO: mean of sums over a constant
//   group_mean       1 / (groups * trained tokens of s's group)  the equation in the DAPO paper
//   auto             the loss's default (Loss::aggregation); the functions here use token_mean
// S and the number of groups count only sequences and groups that have a trained token.
//
// An agent's conversation may be stored as N rows of the batch. Each of them then counts as 1/N sequence in S
// and each of its tokens as 1/N token in n. The weight of such a row is 1/N of the above.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "algo/loss_settings.h"

namespace bough {

// Returns a weight for each sequence, [S]; 0 for a sequence without trained tokens.
//   trained_tokens  [S]
//   groups          [S], any ids; may be empty if the aggregation is not group_mean
//   shares          [S], 1/N for a sequence of a conversation with N rows of the batch; empty: 1 each
// Throws UserError if the aggregation is unknown, or if constant_length has no length above 0.
std::vector<double> sequence_weights(const AggregationSettings& settings,
                                     std::span<const int64_t> trained_tokens, std::span<const int64_t> groups,
                                     std::span<const double> shares = {});

// Expands one number per sequence (a weight or an advantage) to one per loss row. sequences_R is int64 [R],
// the sequence of each loss row. Returns [R] in `dtype` on sequences_R's device. Throws InternalError if an
// index is outside [0, S).
at::Tensor expand_to_rows(std::span<const double> per_sequence, const at::Tensor& sequences_R,
                          at::ScalarType dtype);

}  // namespace bough
