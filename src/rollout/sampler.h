// Draws tokens from logits, and says how likely they were.
//
// The distribution drawn from: logits, without the tokens in `excluded`; divided by the temperature; its
// top_k most likely tokens (0: all); of these, renormalised, the fewest most likely that together have
// probability top_p. Equal logits rank by lower id. The log-probabilities returned are of the whole
// distribution: nothing excluded, no top_k, no top_p.
//
// Which token: inverse of the cumulative distribution at `uniform`, tokens in order of id, or of probability
// where top_k cuts. A draw depends on its own row and numbers only. Sums are taken in fp64 over fp32 (fp64
// for fp64 logits) exponentials. The vocabulary is never sorted: a bound from block maxima (top_k) or from
// the total mass (top_p) excludes most tokens, and a histogram finds where top_p cuts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace bough {

struct DrawRequest {
  int64_t row = 0;           // of the logits
  double temperature = 1.0;  // 0: the most likely token
  int64_t top_k = 0;
  double top_p = 1.0;
  bool greedy = false;                // the most likely token, log-probability at `temperature`
  std::span<const int32_t> excluded;  // sorted, inside the vocabulary; not all of it
  double uniform = 0.5;               // in (0, 1)
};

struct Draw {
  int32_t token = 0;
  double log_prob = 0;      // log softmax(logits / temperature); temperature 0 counts as 1
  double raw_log_prob = 0;  // log softmax(logits)
};

// logits_RV: fp32, bf16 or fp64, any device (copied to the CPU). One draw for each request; several may share
// a row. UserError if a row's logits are not finite (-infinity is allowed) or all -infinity: the weights have
// diverged.
void draw_tokens(const at::Tensor& logits_RV, std::span<const DrawRequest> requests, std::span<Draw> draws);

}  // namespace bough
