// A model as the cost model sees it.
#pragma once

#include <c10/core/ScalarType.h>

#include "models/config.h"
#include "tree/cost_model.h"

namespace bough {

// dtype: fp32, bf16 or fp64, of weights and activations.
ModelShape model_shape(const ModelConfig& config, at::ScalarType dtype);

}  // namespace bough
