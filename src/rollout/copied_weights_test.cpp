#include "rollout/copied_weights.h"

#include <ATen/ATen.h>

#include "kernels/common/device.h"
#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

// With one copy in host memory, as on a GPU, the engine gets every publication's bits in its own tensors.
TEST(CopiedWeights, InHostMemoryAreOneCopyThatIsLoadedInPlace) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const auto trained = small_rollout_model(type, 1);
    const auto generating = copy_of(*trained);
    std::vector<int64_t> allocated;
    const auto allocate = [&](int64_t bytes) {
      allocated.push_back(bytes);
      return at::zeros({bytes}, at::kByte);
    };
    constexpr int64_t kPiece = 1024;  // most matrices cross pieces
    CopiedWeights weights(*trained, *generating, Changing::kTrained, allocate, kPiece);
    int64_t bytes = 0, held = 0;
    std::vector<const void*> addresses;
    for (const Parameter* parameter : generating->trained_parameters()) {
      bytes += static_cast<int64_t>(parameter->value.nbytes());
      addresses.push_back(parameter->value.const_data_ptr());
    }
    for (const int64_t piece : allocated) held += piece;
    EXPECT_EQ(held, bytes) << "one copy, without rounding";
    for (int32_t version = 1; version <= 3; ++version) {
      EXPECT_FALSE(weights.take());
      const at::NoGradGuard no_grad;
      for (Parameter* parameter : trained->parameters())
        parameter->value.add_(at::randn_like(parameter->value), 0.1);
      weights.publish(version);
      std::vector<at::Tensor> published;
      for (Parameter* parameter : trained->trained_parameters()) {
        published.push_back(parameter->value.clone());
        parameter->value.add_(1);  // the next step has begun
      }
      const auto update = weights.take();
      ASSERT_TRUE(update);
      EXPECT_EQ(update->version, version);
      const std::vector<Parameter*> got = generating->trained_parameters();
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(got[i]->value.equal(published[i])) << i;
        EXPECT_EQ(got[i]->value.const_data_ptr(), addresses[i])
            << "graphs keep the address of parameter " << i;
      }
    }
    EXPECT_EQ(held, bytes);
  }
}

using CudaCopiedWeights = OnCuda;

TEST_F(CudaCopiedWeights, TakeDeviceMemoryForTheGeneratingModelAlone) {
  const auto trained = small_rollout_model(at::kFloat, 1, small_config(), at::kCUDA);
  const PeakBytes peak(at::kCUDA);
  const auto generating = copy_of(*trained);
  const int64_t of_generating = peak.bytes();
  CopiedWeights weights(*trained, *generating, /*in_place=*/true);
  weights.publish(1);
  ASSERT_TRUE(weights.take());
  EXPECT_LT(peak.bytes(), of_generating + of_generating / 2);
}

}  // namespace
}  // namespace bough
