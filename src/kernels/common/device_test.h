// The devices that tests run on, and helpers for tests of CUDA kernels.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <string>

#include "base/error.h"
#include "kernels/common/cuda_library.h"
#include "kernels/parameter.h"

namespace bough {

// Opens the CUDA library before the first tensor of any test, because libtorch looks for a GPU only once and
// starts its autograd threads only once. reason() says why tests on CUDA are skipped; it is empty if they
// run. If the driver and the library exist but opening fails, this is a test failure, because a skip would
// hide a fault. The main program of tests/cuda_emulation sets BOUGH_EMULATED_CUDA: its device has no driver.
class CudaEnvironment : public ::testing::Environment {
 public:
  void SetUp() override {
    if (!std::filesystem::exists("/dev/nvidiactl") && !std::getenv("BOUGH_EMULATED_CUDA")) return;
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

// Base of tests that run only on CUDA. They are skipped if there is no GPU.
class OnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kCuda->reason().empty()) GTEST_SKIP() << kCuda->reason();
  }
};

// Returns a copy on the device, also if x is there. An undefined tensor stays undefined.
inline at::Tensor copy_to(at::Device device, const at::Tensor& x) {
  return x.defined() ? x.to(device, x.scalar_type(), /*non_blocking=*/false, /*copy=*/true) : x;
}
inline Parameter copy_to(at::Device device, const Parameter& parameter) {
  return {.value = copy_to(device, parameter.value),
          .main_grad = copy_to(device, parameter.main_grad),
          .parts = {}};
}
inline at::Tensor on_gpu(const at::Tensor& x) {
  return copy_to(at::kCUDA, x);
}

// Two runs on the same input must give the same bits, because sums have a fixed order.
#define EXPECT_SAME_BITS(a, b) EXPECT_TRUE((a).equal(b))

// Expects that libbough_cuda.so opens and has kernels of these ops. This needs no GPU: the library opens,
// registers its kernels, and reports the missing GPU. Skips the test if the library was not built.
inline void expect_cuda_kernels(std::initializer_list<const char*> ops) {
  if (find_cuda_library().empty()) GTEST_SKIP() << "libbough_cuda.so was not built";
  try {
    open_cuda_library();
    EXPECT_TRUE(at::hasCUDA());
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("no GPU"), std::string::npos) << error.what();
  }
  for (const char* const name : ops)
    EXPECT_TRUE(c10::Dispatcher::singleton()
                    .findSchemaOrThrow((std::string("bough::") + name).c_str(), "")
                    .hasKernelForDispatchKey(c10::DispatchKey::CUDA))
        << name;
}
#define BOUGH_HAS_CUDA_KERNELS(Op, ...)          \
  TEST(CudaLibrary, Has##Op) {                   \
    ::bough::expect_cuda_kernels({__VA_ARGS__}); \
  }

}  // namespace bough
