#include "kernels/common/priority_stream.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

#include "kernels/common/device_test.h"

namespace bough {
namespace {

using CudaPriorityStream = OnCuda;

// The thread's copy to the host does not wait for the products that the main thread has queued.
TEST_F(CudaPriorityStream, DoesNotWaitForAnotherThreadsWork) {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  const c10::Stream before = guard.getStream(guard.getDevice());
  const at::Tensor x = on_gpu(at::ones({8192, 8192}));
  at::Tensor y = at::mm(x, x);
  bool is_own = false, is_busy = false;
  std::thread([&] {
    use_priority_stream(at::kCUDA);
    is_own = guard.getStream(guard.getDevice()) != before;
    std::thread([&] {
      for (int i = 0; i < 20; ++i) y = at::mm(x, x);  // on the default stream, about 20 ms each
    }).join();
    EXPECT_EQ(at::full({1}, 7, x.options()).item<float>(), 7);
    is_busy = !before.query();
  }).join();
  EXPECT_TRUE(is_own);
  EXPECT_TRUE(is_busy) << "the other stream should still compute";
  EXPECT_EQ(guard.getStream(guard.getDevice()), before) << "only the thread's own stream changes";
}

TEST_F(CudaPriorityStream, SeesWhatOtherStreamsHadQueued) {
  const at::Tensor x = on_gpu(at::ones({1 << 20}));
  x.add_(1);
  std::thread([&] {
    use_priority_stream(at::kCUDA);
    EXPECT_EQ(x.sum().item<float>(), 2 << 20);
  }).join();
}

TEST(PriorityStream, IsTheCpuItselfOnACpu) {
  EXPECT_NO_THROW(use_priority_stream(at::kCPU));
}

}  // namespace
}  // namespace bough
