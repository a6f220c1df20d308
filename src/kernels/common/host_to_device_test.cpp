#include "kernels/common/host_to_device.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "kernels/common/device_test.h"

namespace bough {
namespace {

class HostToDevice : public OnDevice {};
BOUGH_ON_DEVICES(HostToDevice);

TEST_P(HostToDevice, TensorsEqualTheAddedValues) {
  at::Tensor longs, none, ints, more;
  HostToDeviceBatch upload(device());
  upload.add(std::vector<int64_t>{3, -1, int64_t{1} << 40}, &longs);
  upload.add(std::vector<int64_t>{}, &none);
  upload.add(std::vector<int32_t>{7}, &ints);
  upload.add(std::vector<int64_t>{5, 6}, &more);
  upload.send();
  const auto expect = [&](const at::Tensor& got, const at::Tensor& wanted) {
    EXPECT_EQ(got.device().type(), device().type());
    EXPECT_TRUE(got.is_contiguous());
    EXPECT_EQ(got.scalar_type(), wanted.scalar_type());
    EXPECT_TRUE(got.cpu().equal(wanted)) << got << wanted;
    EXPECT_EQ(got.numel() > 0 ? reinterpret_cast<uintptr_t>(got.const_data_ptr()) % 64 : 0, 0u);
  };
  expect(longs, at::tensor({int64_t{3}, int64_t{-1}, int64_t{1} << 40}, at::kLong));
  expect(none, at::empty({0}, at::kLong));
  expect(ints, at::tensor({7}, at::kInt));
  expect(more, at::tensor({int64_t{5}, int64_t{6}}, at::kLong));
}

TEST(HostToDeviceBatch, AnEmptyBatchGivesEmptyTensors) {
  at::Tensor none;
  HostToDeviceBatch(at::kCPU).send();
  HostToDeviceBatch upload(at::kCPU);
  upload.add(std::vector<int32_t>{}, &none);
  upload.send();
  EXPECT_EQ(none.numel(), 0);
}

}  // namespace
}  // namespace bough
