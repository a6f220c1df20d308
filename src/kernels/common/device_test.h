// The devices that tests run on.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "base/error.h"
#include "kernels/common/cuda_library.h"

namespace bough {

// Opens the CUDA library before the first tensor of any test, because libtorch looks for a GPU only once and
// starts its autograd threads only once. reason() says why tests on CUDA are skipped; it is empty if they
// run. If the driver and the library exist but opening fails, this is a test failure, because a skip would
// hide a fault.
class CudaEnvironment : public ::testing::Environment {
 public:
  void SetUp() override {
    if (!std::filesystem::exists("/dev/nvidiactl")) return;
    if (find_cuda_library().empty()) {
      reason_ = "libbough_cuda.so was not built";
      return;
    }
    try {
      open_cuda_library();
      reason_.clear();
    } catch (const UserError& error) {
      reason_ = error.what();
      ADD_FAILURE() << reason_;
    }
  }
  const std::string& reason() const { return reason_; }

 private:
  std::string reason_ = "no GPU";
};
inline CudaEnvironment* const kCuda =
    static_cast<CudaEnvironment*>(::testing::AddGlobalTestEnvironment(new CudaEnvironment));

// Base of tests that run on every device. Tests on CUDA are skipped if there is no GPU.
class OnDevice : public ::testing::TestWithParam<at::DeviceType> {
 protected:
  void SetUp() override {
    if (GetParam() == at::kCUDA && !kCuda->reason().empty()) GTEST_SKIP() << kCuda->reason();
  }
  at::Device device() const { return GetParam(); }
};
#define BOUGH_ON_DEVICES(Suite)                                                    \
  INSTANTIATE_TEST_SUITE_P(Devices, Suite, ::testing::Values(at::kCPU, at::kCUDA), \
                           [](const auto& info) { return c10::DeviceTypeName(info.param, true); })

}  // namespace bough
