// Checks that calibration measures plausible orders of magnitude. Speeds are not asserted, since tests run on
// busy machines. bench/cost_model.cpp shows how well the profiles predict.
#include "cost/calibrate.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "cost/calibration_cells.h"
#include "cost/cost_model.h"
#include "cost/rates.h"
#include "kernels/common/cpu_allocator.h"

namespace bough {
namespace {

// One round with passes of up to 256 tokens takes about a second.
const CalibrationEffort kBrief{.seconds = 0, .min_rounds = 1, .max_rounds = 1, .largest_pass = 256};

TEST(Median, IsTheUpperMiddleValue) {
  EXPECT_EQ(upper_median({}), 0);
  EXPECT_EQ(upper_median({3}), 3);
  EXPECT_EQ(upper_median({9, 2, 5}), 5);
  EXPECT_EQ(upper_median({8, 1, 7, 2, 6, 3, 5, 4}), 5);
}

TEST(Calibrate, FewLongRunsAreNoGreatPartOfTheUsualTime) {
  EXPECT_EQ(usual_seconds({}), 0);
  EXPECT_EQ(usual_seconds({3}), 3);
  EXPECT_EQ(usual_seconds({4, 5, 4, 3}), 4);
  EXPECT_EQ(usual_seconds({4, 1000, 4, 4}), 4.5);
  EXPECT_EQ(usual_seconds({1000, 4, 1000, 4, 900}), 5.2);
}

TEST(Calibrate, AProfileThatACostModelCanUse) {
  // Three rounds: a single run that another program interrupts is then no great part of the usual time.
  CalibrationEffort effort = kBrief;
  effort.min_rounds = effort.max_rounds = 3;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto profile = calibrate(at::kCPU, dtype, effort);
    profile.check_integrity();
    const std::string name = dtype == at::kFloat ? "fp32" : "bf16";
    EXPECT_EQ(profile.name, "cpu");
    EXPECT_EQ(profile.dtype, name);
    EXPECT_EQ(profile.kernels.threads, at::get_num_threads());
    EXPECT_GT(profile.memory_bytes, int64_t{1} << 28);
    EXPECT_NE(profile.source.find("measured"), std::string::npos);
    for (const auto* curve :
         {&profile.linear_forward, &profile.linear_backward, &profile.head_forward, &profile.head_backward,
          &profile.attention_forward.by_queries, &profile.attention_backward.by_queries}) {
      EXPECT_EQ(curve->sizes.back(), 256);
      for (size_t i = 0; i < curve->sizes.size(); ++i) {
        // Between 10 MFLOP/s (the smallest passes are slow) and 100 TFLOP/s.
        EXPECT_GT(curve->values[i], static_cast<double>(curve->sizes[i]) * 1e-14);
        EXPECT_LT(curve->values[i], static_cast<double>(curve->sizes[i]) * 1e-7);
      }
      EXPECT_GT(curve->values.back(), curve->values.front());
    }
    // The profile serves other models too: its prediction grows with tokens and pairs.
    const CostModel costs(profile, named_model_shape("qwen3-0.6b", name));
    const PassShape small{.tokens = 64, .pairs = 64 * 65 / 2, .head_rows = 10};
    const PassShape large{
        .tokens = 1024, .stack_rows = 512, .pairs = 1024 * 512 + 1024 * 1025 / 2, .head_rows = 4000};
    EXPECT_GT(costs.forward_seconds(large), 4 * costs.forward_seconds(small));
    EXPECT_GT(costs.backward_seconds(small), 0);
    EXPECT_GT(costs.head_forward_seconds(large), costs.head_forward_seconds(small));
  }
}

// A CPU's profile has no rate of host copies. The measurement on a CPU still gives a plausible copy rate.
TEST(Calibrate, CopiesToTheHost) {
  const double rate = host_copy_rate(1 << 24, at::kCPU);
  EXPECT_GT(rate, 1e7);
  EXPECT_LT(rate, 1e13);
}

TEST(Calibrate, HoldsNothingWhenItIsDone) {
  install_cpu_allocator();
  calibrate(at::kCPU, at::kFloat, kBrief);
  const int64_t before = cpu_allocated_bytes();
  calibrate(at::kCPU, at::kFloat, kBrief);
  EXPECT_EQ(cpu_allocated_bytes(), before);
}

TEST(Calibrate, EndsSoonIfStopped) {
  int asked = 0;
  CalibrationEffort effort = kBrief;
  effort.stop = [&] { return ++asked == 3; };
  EXPECT_THROW(calibrate(at::kCPU, at::kFloat, effort), Interrupted);
  EXPECT_EQ(asked, 3);
}

// In fp64 the reference kernels run. Their FLOPs and memory differ from those of the fast kernels.
TEST(Calibrate, Fp64) {
  const auto profile = calibrate(at::kCPU, at::kDouble, kBrief);
  profile.check_integrity();
  EXPECT_EQ(profile.dtype, "fp64");
  EXPECT_EQ(profile.kernels.attention, DeviceKernels::Attention::kReference);
}

}  // namespace
}  // namespace bough
