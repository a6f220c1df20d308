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

// Draws as draw_tokens() from logits on CUDA. Draws without cuts, penalties and excluded tokens are made
// there (kernels/draw_token); the rows of others are brought to the CPU. Waits for the tokens.
void draw_from_device(const at::Tensor& logits_RV, std::span<const DrawRequest> requests,
                      std::span<Draw> draws);

}  // namespace bough
