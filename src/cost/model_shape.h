// A model as the cost model sees it.
#pragma once

#include <c10/core/ScalarType.h>

#include "models/config.h"
#include "cost/cost_model.h"

namespace bough {

// fp32, bf16 or fp64: as settings, profiles and reports name it. InternalError for another one.
const char* dtype_name(at::ScalarType dtype);

// dtype: fp32, bf16 or fp64, of weights and activations.
ModelShape model_shape(const ModelConfig& config, at::ScalarType dtype);

}  // namespace bough
