// Compares the estimated memory of products with the allocator's count while one thread computes them.
#include "kernels/matrix_product/matrix_product_cost.h"

#include <ATen/Parallel.h>

#include <functional>

#include "kernels/common/cpu_allocator.h"
#include "kernels/common/kernel_test.h"
#include "kernels/matrix_product/matrix_product.h"

namespace bough {
namespace {

int64_t peak_bytes(const std::function<void()>& work) {
  const int64_t before = cpu_allocated_bytes();
  reset_cpu_peak_bytes();
  work();
  return cpu_peak_bytes() - before;
}

class MatrixProductCost : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (!has_tiles(type_)) GTEST_SKIP() << "no tiles of this type on this CPU";
    install_cpu_allocator();
    at::set_num_threads(1);
  }
  void TearDown() override { at::set_num_threads(threads_); }

  at::ScalarType type_ = GetParam();
  bool bf16_ = type_ == at::kBFloat16;
  ElementSizes sizes_{bf16_ ? 2 : 4, 4};
  DeviceKernels kernels_{
      .attention = bf16_ ? DeviceKernels::Attention::kBf16Tiles : DeviceKernels::Attention::kTiles,
      .packs_factors = true,
      .threads = 1};
  int threads_ = at::get_num_threads();
};

TEST_P(MatrixProductCost, EqualsTheBytesThatAProductPacks) {
  for (const int64_t rows : {300, 700})
    for (const int64_t depth : {96, 512, 1024, 1536, 2500})
      for (const int64_t columns : {32, 1000, 5000}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << depth << " x " << columns);
        const auto a = random_tensor({rows, depth}, type_, 1), b = random_tensor({columns, depth}, type_, 2);
        const int64_t measured =
            peak_bytes([&] { matrix_product_tiles(a, b.t()); }) - rows * columns * sizes_.element;
        EXPECT_EQ(matrix_product_bytes(kernels_, sizes_, rows, depth, columns), measured);
      }
}

TEST_P(MatrixProductCost, EqualsTheBytesThatAWeightGradientPacks) {
  for (const int64_t tokens : {40, 512, 1300})
    for (const int64_t outputs : {64, 1500})
      for (const int64_t inputs : {96, 1000}) {
        SCOPED_TRACE(testing::Message() << tokens << " tokens, " << outputs << " x " << inputs);
        const auto d_y = random_tensor({tokens, outputs}, type_, 1),
                   x = random_tensor({tokens, inputs}, type_, 2);
        const auto gradient = at::zeros({outputs, inputs}, at::kFloat);
        const int64_t measured = peak_bytes([&] { add_matrix_product_tiles_(gradient, d_y.t(), x); });
        const int64_t counted = weight_gradient_bytes(kernels_, sizes_, tokens, outputs, inputs);
        // With fp32, the kernels round the packed rows up to a multiple of 12, the estimate to a multiple of
        // 32.
        const int64_t block = Fp32Blocking::kRows * std::min(tokens, Fp32Blocking::kDepthPerPass) * 4;
        EXPECT_LE(std::abs(counted - measured), bf16_ ? 0 : block) << counted << " and " << measured;
      }
}

TEST(MatrixProductCopies, AreCovered) {
  if (!copies_to_fp32(at::kBFloat16)) GTEST_SKIP() << "this CPU multiplies bf16 without copies";
  install_cpu_allocator();
  const int threads = at::get_num_threads();
  for (const int64_t together : {1, 2}) {
    at::set_num_threads(static_cast<int>(together));
    const DeviceKernels kernels{
        .packs_factors = products_are_ours(at::kFloat), .copies_factors = true, .threads = together};
    for (const int64_t rows : {8, 300, 3000})
      for (const int64_t depth : {96, 1536})
        for (const int64_t columns : {1000, 5000}) {
          SCOPED_TRACE(testing::Message() << rows << " x " << depth << " x " << columns);
          const auto a = random_tensor({rows, depth}, at::kBFloat16, 1),
                     b = random_tensor({columns, depth}, at::kBFloat16, 2);
          const int64_t measured = peak_bytes([&] { matrix_product(a, b.t()); }) - rows * columns * 2;
          const int64_t counted = matrix_product_bytes(kernels, {2, 4}, rows, depth, columns);
          EXPECT_LE(measured, counted);
          EXPECT_LE(counted, 3 * measured);  // threads do not reach their peaks at the same time
        }
  }
  at::set_num_threads(threads);
}

INSTANTIATE_TEST_SUITE_P(Types, MatrixProductCost, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return info.param == at::kFloat ? "Fp32" : "Bf16"; });

}  // namespace
}  // namespace bough
