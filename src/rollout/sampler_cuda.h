// The CPU and the CUDA implementation of sample_tokens() (sampler.h), and what they have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "rollout/sampler.h"

namespace bough {

// Returns log(sum), where `sum` is the sum of exp(logit - largest) over the vocabulary. Throws UserError if
// `sum` or `largest` is not finite: the weights have diverged.
double log_of_sum(double largest, double sum);

// sample_tokens() for contiguous logits on the CPU.
void sample_on_cpu(const at::Tensor& logits_RV, std::span<const SamplingTask> requests,
                   std::span<SampledToken> out);

// sample_tokens() for logits on CUDA, run there. Tensor ops apply penalties, exclusion and truncation, and
// sort the logits of requests with truncation or top_logprobs. draw_token of kernels/log_prob samples. The
// CPU waits for the device once per kSampledTogether requests. Needs about 60 bytes per logit of these
// requests. Works on any device, for tests.
inline constexpr size_t kSampledTogether = 64;
void sample_on_device(const at::Tensor& logits_RV, std::span<const SamplingTask> requests,
                      std::span<SampledToken> out);

}  // namespace bough
