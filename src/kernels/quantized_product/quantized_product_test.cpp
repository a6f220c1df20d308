#include "kernels/quantized_product/quantized_product.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"
#include "kernels/matrix_product/matrix_product.h"

namespace bough {
namespace {

struct Quantized {
  at::Tensor weight_OK, scale_O;
};

Quantized quantize(const at::Tensor& w_OK) {
  Quantized q{at::full(w_OK.sizes(), 99, w_OK.options().dtype(at::kChar)),
              at::full({w_OK.size(0)}, 99.0, w_OK.options().dtype(at::kFloat))};
  quantize_rows_(q.weight_OK, q.scale_O, w_OK);
  return q;
}

// The rows fill less than one, one and several panels. The outputs are and are not multiples of bf16 and fp32
// blocks. The inputs have several parts, or are no multiple of a tile.
struct Shape {
  int64_t rows, outputs, inputs;
};
constexpr Shape kShapes[] = {{1, 1, 1},     {1, 96, 64},     {3, 33, 31},   {32, 32, 32},    {33, 31, 65},
                             {17, 100, 96}, {5, 1000, 129},  {70, 47, 520}, {128, 64, 1536}, {600, 40, 1100},
                             {2, 13, 2050}, {257, 70, 2048}, {31, 12, 7}};

// Shapes for CUDA: fewer and more rows than the kernel accepts, depths that its warps share unevenly, widths
// that it does not accept, and empty ones.
constexpr Shape kMoreShapes[] = {{1, 1, 16},     {7, 33, 48},     {16, 40, 528},  {31, 1000, 1024},
                                 {70, 47, 1536}, {256, 64, 2048}, {257, 64, 512}, {5, 31, 33},
                                 {0, 4, 16},     {3, 4, 0}};

class QuantizedProductOn : public OnDevice {};
BOUGH_ON_DEVICES(QuantizedProductOn);

TEST(QuantizedProduct, WeightsAreWithinHalfAStep) {
  for (const auto type : kFloatTypes)
    for (const auto& [rows, outputs, inputs] : kShapes) {
      const auto w =
          random_tensor({outputs, inputs}, type, 1) * at::arange(1, outputs + 1).unsqueeze(1).to(type);
      const auto q = quantize(w);
      const auto wide = w.to(at::kDouble), scale = q.scale_O.to(at::kDouble).unsqueeze(1);
      EXPECT_LE((std::get<0>(wide.abs().max(1)) / 127 - q.scale_O).abs().div(q.scale_O).max().item<double>(),
                1e-6);
      EXPECT_LE(((q.weight_OK.to(at::kDouble) * scale - wide).abs() / scale).max().item<double>(),
                0.5 + 1e-4);
      EXPECT_EQ(q.weight_OK.abs().to(at::kLong).amax(1).eq(127).all().item<bool>(), true)
          << "the range is used";
      const Quantized expected{at::empty_like(q.weight_OK), at::empty_like(q.scale_O)};
      quantize_rows_reference_(expected.weight_OK, expected.scale_O, w);
      EXPECT_TRUE(at::equal(q.scale_O, expected.scale_O));
      // The kernel may use a multiply-add, which rounds once; the reference rounds after the product and
      // again to an integer. Ties, which are common in bf16, may therefore give different integers.
      const auto differs = (q.weight_OK.to(at::kLong) - expected.weight_OK.to(at::kLong)).abs();
      EXPECT_LE(differs.max().item<int64_t>(), 1);
      EXPECT_LE(differs.sum().item<int64_t>(), 1 + outputs * inputs / 100);
    }
}

TEST_P(QuantizedProductOn, RowsOfZerosGiveZeroAndRowsThatAreNotFiniteGiveNaN) {
  for (const auto type : kFloatTypes) {
    auto w = random_tensor({5, 40}, type, 1);
    w[1].zero_();
    w[2][17] = std::numeric_limits<double>::infinity();
    w[3][39] = std::numeric_limits<double>::quiet_NaN();
    w[4].fill_(1e-38);  // 127 / 1e-38 overflows fp32
    const auto q = quantize(copy_to(device(), w));
    EXPECT_EQ(q.scale_O[1].item<float>(), 0);
    EXPECT_TRUE(std::isnan(q.scale_O[2].item<float>()) && std::isnan(q.scale_O[3].item<float>()));
    EXPECT_EQ(q.weight_OK.narrow(0, 1, 4).count_nonzero().item<int64_t>(), 0);
    const auto x = copy_to(device(), random_tensor({3, 40}, type, 2));
    const auto y = quantized_product(x, q.weight_OK, q.scale_O).cpu();
    EXPECT_EQ(y.isnan().sum(0).to(at::kInt).equal(at::tensor({0, 0, 3, 3, 0}, at::kInt)), true);
    EXPECT_EQ(y.select(1, 1).count_nonzero().item<int64_t>(), 0);
  }
}

TEST_P(QuantizedProductOn, EqualsTheProductInFp64) {
  std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
  shapes.insert(shapes.end(), std::begin(kMoreShapes), std::end(kMoreShapes));
  for (const auto type : kFloatTypes)
    for (const auto& [rows, outputs, inputs] : shapes) {
      SCOPED_TRACE(testing::Message() << rows << " x " << outputs << " x " << inputs);
      const auto random = [&](at::IntArrayRef sizes, uint64_t seed) {
        return copy_to(device(), random_tensor(sizes, type, seed));
      };
      const auto x = random({rows, inputs}, 1), w = random({outputs, inputs}, 2), bias = random({outputs}, 3),
                 residual = random({rows, outputs}, 4);
      const auto [weight, scale] = quantize(w);
      // On the CPU: libtorch's CUDA division by a number multiplies by its rounded inverse.
      auto weight_ref = at::empty_like(weight, at::kCPU), scale_ref = at::empty_like(scale, at::kCPU);
      quantize_rows_reference_(weight_ref, scale_ref, w.cpu());
      weight_ref = copy_to(device(), weight_ref), scale_ref = copy_to(device(), scale_ref);
      EXPECT_SAME_BITS(scale, scale_ref);
      EXPECT_TRUE((weight.to(at::kInt) - weight_ref.to(at::kInt)).abs().le(1).all().item<bool>());
      const auto product =
          at::mm(x.to(at::kDouble), (weight.to(at::kDouble) * scale.to(at::kDouble).unsqueeze(1)).t());
      const auto with_bias = product + bias.to(at::kDouble),
                 with_residual = product + residual.to(at::kDouble);
      const auto with_both = with_bias + residual.to(at::kDouble);
      const auto got = quantized_product(x, weight, scale);
      EXPECT_EQ(got.scalar_type(), type);
      EXPECT_CLOSE(got, product, type);
      EXPECT_CLOSE(quantized_product(x, weight, scale, bias), with_bias, type);
      EXPECT_CLOSE(quantized_product(x, weight, scale, {}, residual), with_residual, type);
      const auto all = quantized_product(x, weight, scale, bias, residual);
      EXPECT_CLOSE(all, with_both, type);
      EXPECT_SAME_BITS(quantized_product(x, weight, scale, bias, residual), all);
      EXPECT_CLOSE(quantized_product_reference(x, weight, scale, bias, residual), with_both, type);
    }
}

TEST(QuantizedProduct, RowsDoNotDependOnOtherRowsOrThreads) {
  const int threads = at::get_num_threads();
  constexpr int64_t kRows = 700;
  for (const auto type : {at::kFloat, at::kBFloat16})
    for (const auto& [outputs, inputs] : {std::pair{96, 64}, {257, 1030}, {31, 33}, {48, 2048}}) {
      const auto x = random_tensor({kRows, inputs}, type, 1),
                 residual = random_tensor({kRows, outputs}, type, 3);
      const auto [weight, scale] = quantize(random_tensor({outputs, inputs}, at::kFloat, 2));
      at::set_num_threads(1);
      const auto all = quantized_product(x, weight, scale, {}, residual);
      at::set_num_threads(3);
      EXPECT_TRUE(at::equal(quantized_product(x, weight, scale, {}, residual), all)) << "three threads";
      for (const int64_t rows : {1, 2, 12, 16, 17, 33, 129, 600})
        for (const int64_t first : {int64_t{0}, int64_t{37}, kRows - rows})
          ASSERT_TRUE(at::equal(
              quantized_product(x.narrow(0, first, rows), weight, scale, {}, residual.narrow(0, first, rows)),
              all.narrow(0, first, rows)))
              << rows << " rows from " << first << ", " << outputs << " x " << inputs << ", " << type;
    }
  at::set_num_threads(threads);
}

TEST(QuantizedProduct, EmptyInputsGiveAnEmptySum) {
  const auto [weight, scale] = quantize(at::empty({4, 0}));
  EXPECT_TRUE(at::equal(quantized_product(at::empty({3, 0}), weight, scale), at::zeros({3, 4})));
  const auto some = quantize(at::ones({4, 5}));
  EXPECT_EQ(quantized_product(at::empty({0, 5}), some.weight_OK, some.scale_O).size(0), 0);
}

TEST(QuantizedProduct, RefusesOtherShapesAndTypes) {
  const auto [weight, scale] = quantize(at::ones({4, 6}));
  const auto x = at::ones({2, 6});
  EXPECT_THROW(quantized_product(at::ones({2, 5}), weight, scale), std::exception);
  EXPECT_THROW(quantized_product(x, weight.to(at::kFloat), scale), std::exception);
  EXPECT_THROW(quantized_product(x, weight, scale.narrow(0, 0, 3)), std::exception);
  EXPECT_THROW(quantized_product(x, weight, scale, at::ones({5})), std::exception);
  EXPECT_THROW(quantized_product(x, weight, scale, {}, at::ones({2, 4}, at::kBFloat16)), std::exception);
  EXPECT_THROW(quantize_rows_(weight, scale, at::ones({4, 5})), std::exception);
}

BOUGH_HAS_CUDA_KERNELS(QuantizedProduct, "quantize_rows_", "quantized_product")

}  // namespace
}  // namespace bough
