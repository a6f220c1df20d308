// Draws from logits on CUDA without bringing them to the host, where nothing is cut, penalised or excluded
// (kernels/draw_token). For sampler.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "rollout/sampler.h"

namespace bough {

// The log of a row's sum of exp(logit - largest). UserError if either is not finite: the weights have diverged.
double log_of_sum(double largest, double sum);

// Whether the request draws from the whole distribution, or takes the most likely of all tokens.
bool draws_from_all(const DrawRequest& request, int64_t vocabulary);

// All requests must draw from all. Waits for the tokens.
void draw_on_cuda(const at::Tensor& logits_RV, std::span<const DrawRequest> requests, std::span<Draw> draws);

}  // namespace bough
