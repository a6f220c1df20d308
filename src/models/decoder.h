// The decoder that all families share (docs/models.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "models/model.h"

namespace bough {

std::unique_ptr<Model> make_decoder(const ModelConfig& config, const at::TensorOptions& options,
                                    const ModelRanks& ranks);

// Returns the radians that each pair that is turned gains a position, [rotary_dim / 2], on the CPU. type: an
// accumulator type.
at::Tensor rope_frequencies(const Rope& rope, int64_t rotary_dim, at::ScalarType type);

}  // namespace bough
