// Takes the place of torch's header.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

namespace c10::cuda {
using CUDAGuard = c10::DeviceGuard;
using CUDAStreamGuard = c10::StreamGuard;
}  // namespace c10::cuda
