// Draws tokens from logits, and says how likely they were.
//
// The distribution drawn from: logits, penalised, without the tokens in `excluded`; divided by the
// temperature; its top_k most likely tokens (0: all); of these, renormalised, the fewest most likely that
// together have probability top_p; of these, those at least min_p times as likely as the most likely one.
// Equal logits rank by lower id. Log-probabilities are of the whole distribution, nothing excluded, penalised
// or cut, and beside them of the distribution drawn from.
//
// Penalties as elsewhere (CTRL, arXiv 1909.05858, section 4.1; OpenAI's API): the logit of a token that
// stands in the prompt or the response is divided by repetition_penalty if positive, else multiplied by it;
// from that of a token that stands in the response presence_penalty is subtracted, and frequency_penalty as
// often as it stands there.
//
// The token drawn is the inverse of the cumulative distribution at `uniform`, tokens in order of id, or of
// probability where top_k cuts. A draw depends on its own row and numbers only. Sums are taken in fp64 over
// fp32 (fp64 for fp64 logits) exponentials. The vocabulary is never sorted: a bound from block maxima (top_k)
// or from the total mass (top_p) excludes most tokens, and a histogram finds where top_p cuts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "engine/settings.h"

namespace bough {

struct DrawRequest : DrawParameters {
  int64_t row = 0;                            // of the logits
  std::span<const int32_t> prompt, response;  // inside the vocabulary; what penalties look at
  std::span<const int32_t> excluded;          // sorted, inside the vocabulary; not all of it
  double uniform = 0.5;                       // in (0, 1)
};

struct Draw {
  int32_t token = 0;
  double log_prob = 0;            // log softmax(logits / temperature); temperature 0 counts as 1
  double raw_log_prob = 0;        // log softmax(logits)
  double truncated_log_prob = 0;  // under the distribution drawn from; 0 where the most likely token is taken
  // The request's top_logprobs most likely tokens, or all there are, the most likely first, and their
  // log_prob.
  std::vector<int32_t> top_ids;
  std::vector<double> top_log_probs;
};

// logits_RV: fp32, bf16 or fp64, on the CPU or CUDA, where they stay: draws are made on the device, from sums
// in another order, so that log-probabilities agree to rounding. One draw for each request; several may share
// a row. UserError if a row's logits are not finite (-infinity is allowed) or all -infinity: the weights have
// diverged.
void draw_tokens(const at::Tensor& logits_RV, std::span<const DrawRequest> requests, std::span<Draw> draws);

}  // namespace bough
