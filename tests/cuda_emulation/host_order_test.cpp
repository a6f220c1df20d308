// Whether the emulated device finds work that nothing orders (host_order.h). Each test runs a program as it
// should be, then the same program with a fault, which must end the process.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "kernels/adamw/adamw.h"
#include "kernels/common/cuda_library.h"
#include "kernels/common/device_test.h"

namespace bough {
namespace {

class CudaOrder : public OnCuda {
 protected:
  void SetUp() override {
    OnCuda::SetUp();
    ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  }

  static c10::Stream current() { return guard().getStream(guard().getDevice()); }
  static c10::Stream side() { return guard().getStreamFromGlobalPool(guard().getDevice()); }
  static at::Tensor ones(int64_t size = 100) { return on_gpu(at::ones({size})); }
  static at::Tensor pinned(int64_t size = 100) {
    return at::zeros({size}, at::TensorOptions().pinned_memory(true));
  }
  static void order(const c10::Stream& first, const c10::Stream& second) {
    c10::Event event(at::kCUDA);
    event.record(first);
    event.block(second);
  }
  static void on(const c10::Stream& stream, const std::function<void()>& work) {
    const c10::StreamGuard on_stream(stream);
    work();
  }

 private:
  static c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(at::kCUDA); }
};

TEST_F(CudaOrder, AReadOnAnotherStreamNeedsAnEventAfterTheWrite) {
  const auto program = [](bool has_event) {
    const at::Tensor x = ones(), y = ones();
    const c10::Stream other = side();
    x.add_(1);
    if (has_event) order(current(), other);
    on(other, [&] { y.copy_(x); });
    order(other, current());
    EXPECT_EQ(y[99].item<float>(), 2);
  };
  program(true);
  EXPECT_DEATH(program(false), "copy_ on stream [0-9]+ reads .*aten::add.* on stream 0 writes.*stream [0-9]+ waits for no");
}

TEST_F(CudaOrder, TheEventMustBeRecordedAfterTheWrite) {
  const auto program = [](bool is_after) {
    const at::Tensor x = ones(), y = ones();
    const c10::Stream other = side();
    c10::Event event(at::kCUDA);
    event.record(current());
    x.add_(1);
    if (is_after) event.record(current());
    event.block(other);
    on(other, [&] { y.copy_(x); });
    order(other, current());
  };
  program(true);
  EXPECT_DEATH(program(false), "nothing orders the two");
}

TEST_F(CudaOrder, MemoryThatAnotherStreamUsesIsFreedOnlyAfterwardsOrWithRecordStream) {
  const auto program = [](bool waits, bool records) {
    std::optional<at::Tensor> x = ones();
    const at::Tensor y = ones();
    const c10::Stream other = side();
    on(other, [&] { y.copy_(*x); });
    if (waits) order(other, current());
    if (records) x->record_stream(other);
    x.reset();
    order(other, current());
  };
  program(true, false);
  program(false, true);
  EXPECT_DEATH(program(false, false), "allocated on stream 0, is freed while copy_ on stream [0-9]+ reads it");
}

TEST_F(CudaOrder, NewMemoryMayStillBeInUseByEarlierWorkOfItsStream) {
  const auto program = [](bool waits) {
    ones().add_(1);  // freed here, while add_ may still run
    const at::Tensor x = at::empty({100}, at::TensorOptions(at::kCUDA));
    const c10::Stream other = side();
    if (waits) order(current(), other);
    on(other, [&] { x.fill_(1); });
    order(other, current());
  };
  program(true);
  EXPECT_DEATH(program(false), "fill_.* writes .*while its former owner on stream 0");
}

TEST_F(CudaOrder, TheHostWritesToPinnedMemoryOnlyAfterTheCopyFromIt) {
  const auto program = [](bool waits) {
    const at::Tensor host = pinned(), x = ones();
    c10::Event event(at::kCUDA);
    x.copy_(host, /*non_blocking=*/true);
    event.record(current());
    EXPECT_EQ(host[99].item<float>(), 0) << "reading is allowed";
    if (waits) event.synchronize();
    std::memset(host.mutable_data_ptr(), 0, host.nbytes());
  };
  program(true);
  EXPECT_DEATH(program(false), "an access on the host writes bytes 0 to 1 of pinned memory .*copy_ on stream 0");
}

TEST_F(CudaOrder, TheHostReadsPinnedMemoryOnlyAfterTheCopyToIt) {
  const auto program = [](bool waits) {
    const at::Tensor host = pinned(), x = ones();
    host.copy_(x, /*non_blocking=*/true);
    if (waits) current().synchronize();
    EXPECT_EQ(host.sum().item<float>(), 100);
  };
  program(true);
  EXPECT_DEATH(program(false), "an access on the host reads .*the host has waited for no event");
}

TEST_F(CudaOrder, TwoStreamsUsePinnedMemoryOneAfterTheOther) {
  const auto program = [](bool waits) {
    const at::Tensor host = pinned(), x = ones(), y = ones();
    const c10::Stream other = side();
    host.copy_(x, /*non_blocking=*/true);
    if (waits) order(current(), other);
    on(other, [&] { y.copy_(host, /*non_blocking=*/true); });
    order(other, current());
  };
  program(true);
  EXPECT_DEATH(program(false), "copy_ on stream [0-9]+ reads bytes 0 to 400 of pinned memory");
}

TEST_F(CudaOrder, AGraphsMemoryStaysAllocated) {
  const auto program = [](bool keeps) {
    std::optional<at::Tensor> x = ones();
    const at::Tensor y = ones();
    const auto graphs = make_device_graphs();
    const auto graph = graphs->capture([&] { y.add_(*x); });
    if (!keeps) x.reset();
    graph->replay();
    EXPECT_EQ(y[99].item<float>(), 3);
  };
  program(true);
  EXPECT_DEATH(program(false), "a graph is replayed after memory that it uses was freed");
}

TEST_F(CudaOrder, AReplayedGraphsWorkIsOrderedLikeOtherWork) {
  const auto program = [](bool waits) {
    const at::Tensor x = ones(), y = ones();
    const auto graphs = make_device_graphs();
    const auto graph = graphs->capture([&] { y.add_(x); });
    const c10::Stream other = side();
    x.fill_(5);
    if (waits) order(current(), other);
    on(other, [&] { graph->replay(); });
    order(other, current());
    EXPECT_EQ(y[99].item<float>(), 7);
  };
  program(true);
  EXPECT_DEATH(program(false), "a graph on stream [0-9]+ reads");
}

TEST_F(CudaOrder, OpsOfBoughAreOrderedToo) {
  const auto program = [](bool waits) {
    const at::Tensor x = ones();
    const c10::Stream other = side();
    x.fill_(2);
    if (waits) order(current(), other);
    on(other, [&] { sum_of_squares(x); });
    order(other, current());
  };
  program(true);
  EXPECT_DEATH(program(false), "bough::sum_of_squares on stream [0-9]+ reads");
}

// One thread writes on its stream, waits, and hands the tensor over. Another thread, which has begun before,
// reads it on a stream of its own.
TEST_F(CudaOrder, AThreadKnowsWhatAnotherHadWaitedForThroughAMutex) {
  const auto program = [](bool hands_over) {
    const at::Tensor x = ones(), y = ones();
    std::mutex mutex, unrelated;
    std::atomic<int> turn = 0;
    std::thread reader([&] {
      const c10::Stream own = side();
      on(own, [&] { at::zeros({1}, at::TensorOptions(at::kCUDA)); });
      turn = 1;
      while (turn != 2) std::this_thread::yield();
      std::mutex& taken = hands_over ? mutex : unrelated;
      taken.lock();
      taken.unlock();
      on(own, [&] { y.copy_(x); });
      own.synchronize();
    });
    while (turn != 1) std::this_thread::yield();
    mutex.lock();
    x.add_(1);
    current().synchronize();
    mutex.unlock();
    turn = 2;
    reader.join();
    EXPECT_EQ(y[99].item<float>(), 2);
  };
  program(true);
  EXPECT_DEATH(program(false), "copy_ on stream [0-9]+ reads .*aten::add.* on stream 0 writes");
}

// Copies of parts of one buffer do not wait for each other, and a part may be read before others arrive.
TEST_F(CudaOrder, PartsOfABufferCount) {
  const at::Tensor host = at::zeros({1 << 16}, at::TensorOptions().pinned_memory(true)), x = ones(1 << 16);
  const c10::Stream first = side(), second = side();
  c10::Event arrived(at::kCUDA);
  on(first, [&] { host.narrow(0, 0, 1 << 15).copy_(x.narrow(0, 0, 1 << 15), /*non_blocking=*/true); });
  on(second, [&] { host.narrow(0, 1 << 15, 1 << 15).copy_(x.narrow(0, 1 << 15, 1 << 15), true); });
  arrived.record(first);
  arrived.synchronize();
  EXPECT_EQ(host.narrow(0, 0, 1 << 15).sum().item<float>(), 1 << 15);
  EXPECT_DEATH(host.sum(), "reads .*copy_ on stream [0-9]+");
  order(second, current());
}

}  // namespace
}  // namespace bough
