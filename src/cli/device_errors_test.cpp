#include "cli/device_errors.h"

#include <gtest/gtest.h>

namespace bough {
namespace {

TEST(DeviceErrors, HaveARemedy) {
  const auto expect = [](const char* text, const char* part) {
    EXPECT_NE(remedy_for_device_error(text).find(part), std::string::npos)
        << text << ": " << remedy_for_device_error(text);
  };
  // The texts of libtorch 2.11, CUDA 13 and NCCL 2.28.
  expect(
      "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which "
      "1.20 GiB is free.",
      "rollout.kv_memory");
  expect("CUDA error: out of memory", "bough plan --run");
  expect("CUDA error: uncorrectable ECC error encountered", "Xid 48");
  expect("CUDA error: an illegal memory access was encountered", "--parts ops");
  expect("CUDA error: unspecified launch failure", "Xid");
  expect("CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING=1");
  expect("CUDA error: no kernel image is available for execution on the device", "compute capability");
  expect("CUDA error: no CUDA-capable device is detected", "CUDA_VISIBLE_DEVICES");
  expect("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
         "ranks lost each other");
  expect("CUDA error: the launch timed out and was terminated", "Xid");
}

TEST(DeviceErrors, OthersHaveNone) {
  for (const char* text : {"", "DefaultCPUAllocator: can't allocate memory", "shape mismatch"})
    EXPECT_EQ(remedy_for_device_error(text), "");
}

}  // namespace
}  // namespace bough
