#include "kernels/embedding/embedding.h"

#include <ATen/Parallel.h>

#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

class EmbeddingGradientOn : public OnDevice {};
BOUGH_ON_DEVICES(EmbeddingGradientOn);

TEST_P(EmbeddingGradientOn, MatchesReferenceInEveryDtype) {
  auto shapes = kRowShapes;
  for (const int64_t width : {1, 63, 64, 200})
    for (const int64_t num_tokens : {0, 1, 77}) shapes.emplace_back(num_tokens, width);
  for (const auto type : kFloatTypes)
    for (const auto& [num_tokens, width] : shapes) {
      SCOPED_TRACE(testing::Message() << width << " wide, " << num_tokens << " tokens");
      // There are few distinct tokens, so many occur often.
      const auto tokens = at::randint(11, {num_tokens}, at::kLong);
      const auto rows = random_tensor({num_tokens, width}, type, 1);
      const auto start = random_tensor({11, width}, accumulator_type(type), 2), expected = start.clone();
      add_embedding_gradient_reference_(expected, tokens, rows);
      std::vector<at::Tensor> sums;
      for (int run = 0; run < 2; ++run) {
        sums.push_back(copy_to(device(), start));
        add_embedding_gradient_(sums.back(), copy_to(device(), tokens), copy_to(device(), rows));
        EXPECT_CLOSE(sums.back().cpu(), expected, accumulator_type(type));
      }
      EXPECT_SAME_BITS(sums[0], sums[1]);
    }
}

TEST(EmbeddingGradient, DoesNotDependOnThreads) {
  const auto tokens = at::randint(5, {300}, at::kLong);
  const auto rows = random_tensor({300, 512}, at::kFloat, 1);
  const int before = at::get_num_threads();
  std::vector<at::Tensor> sums;
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    sums.push_back(at::zeros({5, 512}));
    add_embedding_gradient_(sums.back(), tokens, rows);
  }
  at::set_num_threads(before);
  EXPECT_TRUE(at::equal(sums[0], sums[1]));
}

TEST(Embedding, GathersAndAddsRepeatedTokens) {
  Parameter weight = random_parameter({6, 3}, at::kDouble, 1);
  const auto tokens = at::tensor({4, 1, 4}, at::kLong);
  const auto d_y = random_tensor({3, 3}, at::kDouble, 2);
  const auto y = embedding(tokens, weight);
  EXPECT_TRUE(at::equal(y, weight.value.index_select(0, tokens)));
  y.backward(d_y);
  EXPECT_TRUE(at::allclose(weight.main_grad[4], d_y[0] + d_y[2]));
  EXPECT_TRUE(at::allclose(weight.main_grad[1], d_y[1]));
  EXPECT_EQ(weight.main_grad[0].abs().sum().item<double>(), 0.0);
}

TEST(Embedding, IsScaled) {
  for (const auto type : kFloatTypes) {
    Parameter weight = random_parameter({6, 64}, type, 1);
    const auto tokens = at::tensor({4, 1, 4}, at::kLong);
    const auto d_y = random_tensor({3, 64}, type, 2);
    const double root = std::sqrt(3072.0);  // 55.5 in bf16
    const auto scale = at::scalar_tensor(root, at::TensorOptions().dtype(type));
    const auto y = embedding(tokens, weight, root);
    EXPECT_TRUE(at::equal(y, weight.value.index_select(0, tokens) * scale));
    y.backward(d_y);
    const auto expected = (d_y[0] + d_y[2].to(at::kDouble)) * scale.to(at::kDouble);
    EXPECT_CLOSE(weight.main_grad[4], expected, accumulator_type(type));
  }
}

BOUGH_HAS_CUDA_KERNELS(Embedding, "add_embedding_gradient_")

}  // namespace
}  // namespace bough
