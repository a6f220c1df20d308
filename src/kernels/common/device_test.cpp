#include "kernels/common/device.h"

#include <ATen/ATen.h>

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
