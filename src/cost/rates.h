// How fast this device is now, at a model's own sizes: what lower bounds of a step, of its kernels and of a
// decoding step are computed from.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "models/decoder_cost.h"

namespace bough {

// FLOP/s of x·Wᵀ: the best of the layers' matrices and numbers of rows, each the best of several runs.
double matrix_product_rate(const ModelShape& shape, at::ScalarType dtype, c10::Device device);

// Bytes a second of reading so many bytes again and again with all threads, measured now: of memory, or of
// the cache they fit in.
double read_rate(int64_t bytes, c10::Device device);

// Bytes a second of copies between pinned memory of the host and the device: of the slower way.
double host_copy_rate(int64_t bytes, c10::Device device);

}  // namespace bough
