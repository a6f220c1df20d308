// The decoder that all families share (docs/models.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "models/model.h"

namespace bough {

// Returns the rotation angle per position of each rotated pair, in radians: [rotary_dim / 2], on the CPU.
// type: fp32 or fp64.
at::Tensor rope_frequencies(const Rope& rope, int64_t rotary_dim, at::ScalarType type);

}  // namespace bough
