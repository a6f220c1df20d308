// What sampler.cpp shares with draws from logits on CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "rollout/sampler.h"

namespace bough {

// The log of a row's sum of exp(logit - largest). UserError if either is not finite: the weights have
// diverged.
double log_of_sum(double largest, double sum);

// Draws as draw_tokens() from contiguous logits on the CPU.
void draw_on_cpu(const at::Tensor& logits_RV, std::span<const DrawRequest> requests, std::span<Draw> draws);

// Draws as draw_tokens() from logits on CUDA, where they stay: penalties, excluded tokens and cuts are made
// there by tensor ops, which sort the rows of requests that cut or ask for top_logprobs, and the draw by
// kernels/log_prob's draw_token. Waits once, for the tokens, for every kDrawnTogether requests; holds about
// 60 bytes a logit of these. On any device, for tests.
inline constexpr size_t kDrawnTogether = 64;
void draw_from_device(const at::Tensor& logits_RV, std::span<const DrawRequest> requests,
                      std::span<Draw> draws);

}  // namespace bough
