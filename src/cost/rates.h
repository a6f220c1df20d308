// Rates of this device, measured by each call at a model's sizes. Used for lower bounds of a training step,
// of its kernels and of a decoding step.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "models/decoder_cost.h"

namespace bough {

// FLOP/s of x·Wᵀ: the maximum over the layers' matrices W, several numbers of rows of x and several runs.
double matrix_product_rate(const ModelShape& shape, at::ScalarType dtype, c10::Device device);

// Bytes per second of repeatedly reading `bytes` bytes with all threads: from memory, or from a cache if the
// bytes fit into it.
double read_rate(int64_t bytes, c10::Device device);

// Bytes per second of copies between pinned host memory and the device, in the slower of the two directions.
double host_copy_rate(int64_t bytes, c10::Device device);

}  // namespace bough
