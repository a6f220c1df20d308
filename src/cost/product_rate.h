// How fast matrix products are at a model's shapes: what lower bounds of a step and of its kernels are computed from.
#pragma once

#include <c10/core/ScalarType.h>

#include "cost/cost_model.h"

namespace bough {

// FLOP/s of x·Wᵀ on the CPU: the best of the layers' matrices and numbers of rows, each the best of several runs.
double matrix_product_rate(const ModelShape& shape, at::ScalarType dtype);

}  // namespace bough
