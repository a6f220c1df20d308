// Takes the place of torch's header: the properties of the emulated device that the ops read.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace at::cuda {

struct DeviceProperties {
  const char* name = "emulated H100 HBM3";  // a GPU with a built-in profile
  size_t sharedMemPerBlockOptin = 227 << 10;
  int major = 9, minor = 0;
};

inline const DeviceProperties* getDeviceProperties(c10::DeviceIndex /*device*/) {
  static constexpr DeviceProperties properties;
  return &properties;
}

}  // namespace at::cuda
