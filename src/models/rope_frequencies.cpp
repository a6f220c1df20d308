// Frequencies are computed in the same steps as in transformers 5.17's modeling_rope_utils, so that fp32
// rounding is the same.
#include <ATen/ATen.h>

#include <cmath>

#include "base/error.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary.h"
#include "models/decoder.h"

namespace bough {

namespace {

// Llama 3.1 stretches long waves, keeps short waves, and blends between them.
at::Tensor llama3_frequencies(const Rope& rope, const at::Tensor& plain) {
  const auto length = static_cast<double>(rope.original_positions);
  const double longest = length / rope.low_freq_factor, shortest = length / rope.high_freq_factor;
  const auto wave = 2 * M_PI / plain;
  const auto stretched = at::where(wave > longest, plain / rope.factor, plain);
  const auto smooth = (length / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  const auto between = (1 - smooth) * stretched / rope.factor + smooth * stretched;
  return at::where((wave < shortest).logical_or(wave > longest), stretched, between);
}

// YaRN (Peng et al. 2023, arXiv:2309.00071) stretches waves with few turns over the original length and keeps
// waves with many turns. Between them it blends linearly in the element's index.
at::Tensor yarn_frequencies(const Rope& rope, int64_t rotary_dim, const at::Tensor& plain) {
  const auto dim = static_cast<double>(rotary_dim);
  const auto element_of = [&](double turns) {
    return dim * std::log(static_cast<double>(rope.original_positions) / (turns * 2 * M_PI)) /
           (2 * std::log(rope.theta));
  };
  double low = element_of(rope.beta_fast), high = element_of(rope.beta_slow);
  if (rope.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, dim - 1);
  if (low == high) high += 0.001;  // as in transformers
  const auto ramp = ((at::arange(rotary_dim / 2, plain.options()) - low) / (high - low)).clamp(0, 1);
  const auto kept = 1 - ramp;
  return plain / rope.factor * (1 - kept) + plain * kept;
}

}  // namespace

at::Tensor rope_frequencies(const Rope& rope, int64_t rotary_dim, at::ScalarType type) {
  const auto plain = rotary_frequencies(rotary_dim, rope.theta, at::TensorOptions().dtype(type));
  switch (rope.type) {
    case RopeType::kDefault:
    case RopeType::kDynamic: return plain;  // exact up to the original length
    case RopeType::kLinear: return plain / rope.factor;
    case RopeType::kLlama3: return llama3_frequencies(rope, plain);
    case RopeType::kYarn: return yarn_frequencies(rope, rotary_dim, plain);
    case RopeType::kLongrope: return plain / at::tensor(rope.short_factor, at::kDouble).to(type);
  }
  BOUGH_CHECK(false, "rope type ", static_cast<int>(rope.type));
}

}  // namespace bough
