#include "train/host_copies.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "kernels/common/device_test.h"

namespace bough {
namespace {

class HostCopiesOn : public OnDevice {};
BOUGH_ON_DEVICES(HostCopiesOn);

// One object is used twice, as for two passes. All tensors come back bit for bit. At most two tensors are on
// the device at a time.
TEST_P(HostCopiesOn, TensorsComeBackLastFirstAndLeaveTheDeviceMeanwhile) {
  constexpr int64_t kCount = 7;
  HostCopies copies;
  for (const auto type : {at::kBFloat16, at::kDouble}) {
    const auto tensor = [&](int64_t i) {
      return (at::arange(300 * 40, at::TensorOptions().dtype(at::kDouble)) + 10 * i).view({300, 40}).to(type);
    };
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> on_device;
    const auto num_on_device = [&] {
      return std::ranges::count_if(on_device, [](const auto& each) { return !each.expired(); });
    };
    const auto watch = [&](const at::Tensor& x) { on_device.emplace_back(x.storage().getWeakStorageImpl()); };
    for (int64_t i = 0; i < kCount; ++i) {
      at::Tensor x = tensor(i).to(device()).clone();
      watch(x);
      copies.put(std::move(x));
      EXPECT_LE(num_on_device(), 2);
    }
    for (int64_t i = kCount; i-- > 0;) {
      const at::Tensor x = copies.take();
      watch(x);
      EXPECT_LE(num_on_device(), 2);
      EXPECT_EQ(x.device().type(), device().type());
      EXPECT_TRUE(x.cpu().equal(tensor(i))) << i;
    }
    EXPECT_THROW(copies.take(), InternalError);
  }
}

TEST_P(HostCopiesOn, APlanExecutionThatEndsEarlyLeavesNothing) {
  HostCopies copies;
  for (int64_t i = 0; i < 3; ++i) copies.put(at::full({1000}, i, at::kFloat).to(device()));
  EXPECT_EQ(copies.take().sum().item<double>(), 2000);
  EXPECT_THROW(copies.put(at::ones({4, 4}).to(device()).t()), InternalError);
}

}  // namespace
}  // namespace bough
