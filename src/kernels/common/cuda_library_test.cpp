#include "kernels/common/cuda_library.h"

#include <c10/core/AllocatorConfig.h>

#include <cstdlib>
#include <stdexcept>

#include "kernels/common/device_test.h"

namespace bough {
namespace {

TEST(CudaLibrary, OpensWithoutAGpu) {
  expect_cuda_kernels({});
}

TEST(CudaLibrary, MemoryGrowsInPlaceUnlessTheUserChose) {
  using Settings = c10::CachingAllocator::AcceleratorAllocatorConfig;
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:False");
  for (const char* const name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    setenv(name, "max_split_size_mb:100", 1);
    set_expandable_segments();
    EXPECT_FALSE(Settings::use_expandable_segments()) << name;
    unsetenv(name);
  }
  set_expandable_segments();
  EXPECT_TRUE(Settings::use_expandable_segments());
}

class FakeRecorder final : public StreamRecorder {
 public:
  explicit FakeRecorder(std::string fails_in = "") : fails_in_(std::move(fails_in)) {}
  void begin() override { call("begin"); }
  void end() override { call("end"); }
  void discard() noexcept override { calls += "discard "; }
  void call(const std::string& name) {
    calls += name + " ";
    if (name == fails_in_) throw std::runtime_error("no memory");
  }
  std::string calls;

 private:
  const std::string fails_in_;
};

TEST(DeviceGraphs, AFailureDoesNotLeaveTheStreamRecording) {
  const auto calls = [](const std::string& fails_in) {
    FakeRecorder recorder(fails_in);
    int runs = 0;
    const auto work = [&] { recorder.call(++runs == 1 ? "setup" : "work"); };
    if (fails_in.empty()) record(recorder, work);
    else EXPECT_THROW(record(recorder, work), std::runtime_error) << fails_in;
    return recorder.calls;
  };
  EXPECT_EQ(calls(""), "setup begin work end ");
  EXPECT_EQ(calls("setup"), "setup ");
  EXPECT_EQ(calls("begin"), "setup begin discard ");
  EXPECT_EQ(calls("work"), "setup begin work discard ");
  EXPECT_EQ(calls("end"), "setup begin work end discard ");
}

TEST(DeviceGraphs, AnOwnerGoesOnWithoutGraphsAfterAFailure) {
  class FakeGraph final : public DeviceGraph {
    void replay() override {}
  };
  class FakeGraphs final : public DeviceGraphs {
   public:
    std::unique_ptr<DeviceGraph> capture(const std::function<void()>& work) override {
      work();
      return std::make_unique<FakeGraph>();
    }
  };
  int made = 0, ran = 0;
  OptionalGraphs graphs([&] {
    ++made;
    return std::make_unique<FakeGraphs>();
  });
  EXPECT_TRUE(graphs.capture([&] { ++ran; }));
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(graphs.capture([] { throw std::runtime_error("no memory"); }));
  const std::string warning = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find("without graphs"), std::string::npos) << warning;
  EXPECT_NE(warning.find("no memory"), std::string::npos) << warning;
  EXPECT_FALSE(graphs.capture([&] { ++ran; }));
  EXPECT_EQ(made, 1);
  EXPECT_EQ(ran, 1);
  OptionalGraphs none([] { return nullptr; });
  EXPECT_FALSE(none.capture([&] { ++ran; }));
  EXPECT_EQ(ran, 1);
}

using CudaGraphs = OnCuda;

TEST_F(CudaGraphs, AFailureWithinACaptureLeavesStreamAndPoolUsable) {
  const auto x = on_gpu(at::zeros({1000}));
  const auto graphs = make_device_graphs();
  ASSERT_TRUE(graphs);
  for (int round = 0; round < 3; ++round) {
    int runs = 0;
    EXPECT_THROW(graphs->capture([&] {
      x.copy_(x + 1);
      if (++runs == 2) throw std::runtime_error("within the capture");
    }),
                 std::runtime_error);
    // Waiting for the device is forbidden during a capture and makes it invalid.
    EXPECT_ANY_THROW(graphs->capture([&] { x.add_(x[0].item<float>()); }));
  }
  x.zero_();
  const auto graph = graphs->capture([&] { x.copy_(x + 1); });
  graph->replay();
  EXPECT_EQ(x[999].item<float>(), 2);
}

TEST_F(CudaGraphs, AGraphRunsItsWorkAgainAtEachReplay) {
  const auto x = on_gpu(at::zeros({1000})), step = on_gpu(at::ones({1000}));
  const auto graphs = make_device_graphs();
  ASSERT_TRUE(graphs);
  const auto graph = graphs->capture([&] { x.add_(step); });
  EXPECT_EQ(x[999].item<float>(), 1) << "once, to set up";
  step.fill_(10);
  graph->replay();
  graph->replay();
  EXPECT_EQ(x[999].item<float>(), 21);
}

// Engines are created and destroyed like this in one process.
TEST_F(CudaGraphs, AreRecordedAfterAnotherOwnersAreGone) {
  for (int owner = 0; owner < 3; ++owner) {
    const auto x = on_gpu(at::zeros({1000}));
    const auto graphs = make_device_graphs();
    const auto graph = graphs->capture([&] { x.copy_(x + 1); });
    graph->replay();
    EXPECT_EQ(x[999].item<float>(), 2);
  }
}

}  // namespace
}  // namespace bough
