#include "kernels/common/cuda_library.h"

#include "kernels/common/device_test.h"

namespace bough {
namespace {

TEST(CudaLibrary, OpensWithoutAGpu) {
  expect_cuda_kernels({});
}

using CudaGraphs = OnCuda;

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
