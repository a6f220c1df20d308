// Samples tokens from logits, and returns their log-probabilities.
//
// The sampling distribution is made in this order:
// - penalties, then the tokens in `excluded` are removed
// - logits are divided by the temperature
// - top_k: the top_k most likely tokens are kept (0: all)
// - top_p: of the tokens that top_k keeps, renormalised, the fewest most likely tokens that together have
//   probability top_p are kept
// - min_p: of the tokens that top_p keeps, those at least min_p times as likely as the most likely one are
//   kept
// If logits are equal, the lower id ranks first. Log-probabilities are reported of the softmax over the whole
// vocabulary, without penalties, exclusion and truncation, and also of the sampling distribution.
//
// Penalties are the usual ones (CTRL, arXiv 1909.05858, section 4.1; OpenAI's API):
// - repetition_penalty: if a token is in the prompt or the response, a positive logit is divided by the
//   penalty, a negative one multiplied
// - presence_penalty: subtracted once from the logit of a token in the response
// - frequency_penalty: subtracted from the logit of a token as often as the token stands in the response
//
// The sampled token is the inverse of the cumulative distribution at `uniform`. Tokens are in order of id, or
// of probability if top_k applies. A sampled token depends only on its logits and its SamplingTask. Sums are
// in fp64 over fp32 exponentials (fp64 for fp64 logits). On the CPU the vocabulary is never sorted: a bound
// from the maxima of parts of the vocabulary (top_k) or from the total mass (top_p) excludes most tokens. A
// histogram finds the lowest logit that top_p keeps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "engine/settings.h"

namespace bough {

struct SamplingTask : SamplingOptions {
  int64_t row = 0;                            // row of the logits
  std::span<const int32_t> prompt, response;  // ids inside the vocabulary, for penalties
  std::span<const int32_t> excluded;          // sorted ids that must not be sampled; not all
  double uniform = 0.5;                       // uniform random number in (0, 1)
};

struct SampledToken {
  int32_t token = 0;
  double log_prob = 0;           // log softmax(logits / temperature); temperature 0 counts as 1
  double raw_log_prob = 0;       // log softmax(logits)
  double sampling_log_prob = 0;  // of the sampling distribution; 0 if greedy or at temperature 0
  // The request's top_logprobs most likely tokens (at most the vocabulary), most likely first, and their
  // log_prob.
  std::vector<int32_t> top_ids;
  std::vector<double> top_log_probs;
};

// logits_RV: fp32, bf16 or fp64, on the CPU or CUDA. Sampling runs on their device. Devices sum in different
// orders, so their log-probabilities agree up to rounding. `out` has one element per request. Several
// requests may use one row of logits_RV. Throws UserError if such a row has NaN or +infinity, or only
// -infinity: the weights have diverged. Throws UserError if exclusion leaves no token with a probability
// above 0.
void sample_tokens(const at::Tensor& logits_RV, std::span<const SamplingTask> requests,
                   std::span<SampledToken> out);

}  // namespace bough
