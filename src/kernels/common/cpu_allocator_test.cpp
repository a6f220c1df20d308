#include "kernels/common/cpu_allocator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace bough {
namespace {

TEST(CpuAllocator, CountsHeldBytesAndTheirPeakAndReusesBlocks) {
  install_cpu_allocator();
  const int64_t before = cpu_allocated_bytes();
  reset_cpu_peak_bytes();
  void* address = nullptr;
  {
    const auto a = at::zeros({100000}, at::kFloat);
    const auto b = at::zeros({10}, at::kDouble);
    EXPECT_EQ(cpu_allocated_bytes() - before, 400080);
    address = a.data_ptr();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(address) % 64, 0u);
  }
  EXPECT_EQ(cpu_allocated_bytes(), before);
  EXPECT_EQ(cpu_peak_bytes() - before, 400080);
  reset_cpu_peak_bytes();
  EXPECT_EQ(cpu_peak_bytes(), before);
  const auto again = at::empty({99999}, at::kFloat);  // reuses the memory of a
  EXPECT_EQ(again.data_ptr(), address);
  release_freed_cpu_memory();
  EXPECT_EQ(at::empty({0}).numel(), 0);
}

TEST(CpuAllocator, EverySizeFitsItsBlock) {
  install_cpu_allocator();
  for (int64_t bytes = 1; bytes < (int64_t{1} << 27); bytes = bytes * 5 / 3 + 1) {
    auto x = at::empty({bytes}, at::kByte);
    x.fill_(7);
    EXPECT_EQ(x[bytes - 1].item<int>(), 7);
  }
  release_freed_cpu_memory();
}

}  // namespace
}  // namespace bough
