// Denominators of a loss, fixed before any pass: one weight a sequence, the same for all its rows, so that
// loss = sum over rows of weight * per_token and blocks, micro-batches and ranks just add.
//
// n_s: trained tokens of sequence s, counted over the whole global batch of one optimizer step (all ranks and
// micro-batches) and before a correction masks anything: tokens that a correction sets to 0 stay counted.
//   token_mean       1 / sum of n                              DAPO
//   sequence_mean    1 / (S n_s)                               GRPO: mean of token means
//   constant_length  1 / (S constant_length)                   Dr.GRPO: mean of sums over a constant
//   group_mean       1 / (groups * trained tokens of s's group)  DAPO as printed
//   auto             the loss's own (Loss::aggregation); here, where no loss is asked, token_mean
// S and the number of groups count what has a trained token: a sequence that trains nothing dilutes nothing.
//
// A row that is 1/N of a sequence (one of the N rows of a trajectory) counts as 1/N in S, its tokens as 1/N
// each in n, and its weights are 1/N of the above.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/settings.h"

namespace bough {

struct AggregationSettings {
  std::string loss_aggregation = "auto";
  int64_t loss_constant_length = 0;  // tokens; usually gconfig.max_new_tokens

  template <class V>
  void visit(V& v) {
    v("loss_aggregation", loss_aggregation,
      "how the loss of many tokens becomes one number; auto: token_mean, or what the loss was published with",
      one_of({"auto", "token_mean", "sequence_mean", "constant_length", "group_mean"}));
    v("loss_constant_length", loss_constant_length,
      "tokens that constant_length divides by (usually the largest response length)", at_least(0));
  }
};

// Returns a weight for each sequence, [S]; 0 for a sequence without trained tokens. `groups` [S]: any ids;
// only group_mean reads it, others take an empty span. `shares` [S]: what part of a sequence each row is;
// empty: each is a whole one. UserError: an unknown aggregation, or constant_length without a length above 0.
std::vector<double> sequence_weights(const AggregationSettings& settings,
                                     std::span<const int64_t> trained_tokens, std::span<const int64_t> groups,
                                     std::span<const double> shares = {});

// Returns a value for each row, [R] in `dtype` on sequences_R's device, from one value a sequence and each
// row's sequence (int64 [R]): weights_R, and per-sequence advantages. InternalError: an index outside [0, S).
at::Tensor expand_to_rows(std::span<const double> per_sequence, const at::Tensor& sequences_R,
                          at::ScalarType dtype);

}  // namespace bough
