// Rates of this machine that lower bounds are computed from, measured when asked for.
#pragma once

#include <c10/core/ScalarType.h>

#include "tree/cost_model.h"

namespace bough {

// FLOP/s of x·Wᵀ: the best of the layers' matrices and numbers of rows, each the best of several runs.
double matrix_product_rate(const ModelShape& shape, at::ScalarType dtype);

// Bytes a second of reading so many bytes again and again with all threads: of memory, or of the cache they fit in.
double read_rate(int64_t bytes);

}  // namespace bough
