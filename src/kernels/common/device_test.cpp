#include "kernels/common/device.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "kernels/common/cpu_allocator.h"
#include "kernels/common/device_test.h"

namespace bough {
namespace {

class Device : public OnDevice {};
BOUGH_ON_DEVICES(Device);

TEST_P(Device, PeakCountsBytesHeldAtOnceBeyondThoseAtTheStart) {
  install_cpu_allocator();
  const auto options = at::TensorOptions(device()).dtype(at::kFloat);
  const at::Tensor before = at::zeros({1 << 20}, options);
  const PeakBytes peak(device());
  EXPECT_EQ(peak.bytes(), 0);
  { const at::Tensor a = at::zeros({1 << 20}, options), b = at::zeros({1 << 20}, options); }
  const at::Tensor c = at::zeros({1 << 18}, options);
  EXPECT_EQ(peak.bytes(), int64_t{2} << 22);
  const PeakBytes next(device());
  EXPECT_EQ(next.bytes(), 0);
}

TEST_P(Device, HasAPeakOfMemory) {
  const PeakBytes since(device());  // other tests may have had a higher peak
  const int64_t before = peak_memory_bytes(device());
  at::Tensor large = at::ones({int64_t{1} << 24}, at::TensorOptions(device()).dtype(at::kFloat));
  EXPECT_GE(peak_memory_bytes(device()), int64_t{1} << 26);
  EXPECT_GE(peak_memory_bytes(device()), before);
  if (device().is_cuda()) {
    EXPECT_GE(peak_memory_bytes(device()), before + (int64_t{1} << 26));
  }
}

TEST(DeviceClock, WaitsForTheDeviceBeforeItReadsTheTime) {
  FakeClock inner;
  const DeviceClock clock(inner, at::kCPU, [&] { inner.advance(std::chrono::seconds(3)); });
  const Clock::Time start = inner.now();
  EXPECT_EQ(seconds_between(start, clock.now()), 3);
  EXPECT_EQ(seconds_between(start, clock.now()), 6);
  const DeviceClock of_cpu(inner, at::kCPU);
  EXPECT_EQ(seconds_between(start, of_cpu.now()), 6);
}

TEST_P(Device, ReportsItsNameAndMemory) {
  const DeviceMemory memory = device_memory(device());
  EXPECT_GT(memory.free, int64_t{1} << 20);
  EXPECT_LE(memory.free, memory.total);
  EXPECT_GT(memory.total, int64_t{1} << 28);
  EXPECT_FALSE(device_name(device()).empty());
  synchronize(device());
}

}  // namespace
}  // namespace bough
