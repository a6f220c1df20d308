#include "kernels/matrix_product/matrix_product.h"

#include <ATen/Parallel.h>

#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

struct Shape {
  int64_t m, n, k;
};
// The shapes cover whole blocks and panels, every kind of remainder, few rows, more rows than are packed at
// once, and a single element. The depths of the last shapes exceed one part (kPartDepth); their row strides
// are or are not a multiple of 2 KiB.
const Shape kShapes[] = {{64, 64, 64},  {1, 96, 64},   {12, 32, 33},    {16, 100, 96},    {17, 40, 96},
                         {33, 31, 32},  {45, 65, 130}, {1100, 70, 40},  {96, 33, 2100},   {1, 1, 1},
                         {300, 200, 7}, {5, 1000, 96}, {31, 257, 1030}, {430, 550, 2048}, {70, 40, 1568},
                         {3, 64, 1600}, {2, 37, 70},   {4, 18, 33}};

// Returns a [rows, columns] matrix. If `transposed`, it is the transposed view of a [columns, rows] matrix.
// If `padded`, it is a part of a wider matrix.
at::Tensor operand(int64_t rows, int64_t columns, at::ScalarType type, uint64_t seed, bool transposed,
                   bool padded) {
  const int64_t outer = transposed ? columns : rows, inner = transposed ? rows : columns;
  const auto whole = random_tensor({outer, inner + (padded ? 3 : 0)}, type, seed);
  const auto part = whole.narrow(1, padded ? 1 : 0, inner);
  return transposed ? part.t() : part;
}

// The error of a sum of k products of order one grows like sqrt(k). tolerance() is relative to the largest
// element, which is of order sqrt(k), too.
void expect_product(const at::Tensor& got, const at::Tensor& a, const at::Tensor& b, at::ScalarType type,
                    const at::Tensor& start) {
  EXPECT_CLOSE(got, start + at::mm(a.to(at::kDouble), b.to(at::kDouble)), type);
}

TEST(MatrixProduct, EqualsTheProductInFp64) {
  for (const auto type : kFloatTypes)
    for (const auto& [m, n, k] : kShapes)
      for (int variant = 0; variant < 8; ++variant) {
        SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << ", variant " << variant);
        const auto a = operand(m, k, type, 1, variant & 1, variant & 4);
        const auto b = operand(k, n, type, 2, variant & 2, variant & 4);
        const auto bias = random_tensor({n}, type, 3);
        const auto zero = at::zeros({m, n}, at::kDouble);
        const auto got = matrix_product(a, b);
        EXPECT_EQ(got.scalar_type(), type);
        expect_product(got, a, b, type, zero);
        expect_product(matrix_product(a, b, bias), a, b, type, zero + bias.to(at::kDouble));
        const auto residual = random_tensor({m, n}, type, 4);
        expect_product(matrix_product(a, b, {}, residual), a, b, type, residual.to(at::kDouble));
        const auto both = residual.to(at::kDouble) + bias.to(at::kDouble);
        expect_product(matrix_product(a, b, bias, residual), a, b, type, both);
        if (!has_tiles(type)) continue;
        expect_product(matrix_product_tiles(a, b), a, b, type, zero);
        expect_product(matrix_product_tiles(a, b, bias), a, b, type, zero + bias.to(at::kDouble));
        expect_product(matrix_product_tiles(a, b, {}, residual), a, b, type, residual.to(at::kDouble));
        expect_product(matrix_product_tiles(a, b, bias, residual), a, b, type, both);
      }
}

TEST(MatrixProduct, AddsInTheAccumulatorType) {
  for (const auto type : kFloatTypes)
    for (const auto& [m, n, k] : kShapes)
      for (int variant = 0; variant < 4; ++variant) {
        SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << ", variant " << variant);
        const auto a = operand(m, k, type, 1, variant & 1, false);
        const auto b = operand(k, n, type, 2, variant & 2, false);
        const auto acc = accumulator_type(type);
        const auto c = random_tensor({m, n}, acc, 3);
        const auto start = c.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
        add_matrix_product_(c, a, b);
        // Products of two bf16 numbers are exact in fp32, so the error must not exceed that of a sum in fp32.
        expect_product(c, a, b, acc, start);
        if (!has_tiles(type)) continue;
        c.copy_(start);
        add_matrix_product_tiles_(c, a, b);
        expect_product(c, a, b, acc, start);
      }
}

// Adds to some columns of a wider tensor. The other columns must not change.
TEST(MatrixProduct, AddsToRowsThatAreApart) {
  for (const auto type : kFloatTypes)
    for (const auto& [m, n, k] : kShapes)
      for (const bool batch_invariant : {false, true}) {
        SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k << ", " << batch_invariant);
        const auto a = operand(m, k, type, 1, false, true), b = operand(k, n, type, 2, true, false);
        const auto wide = random_tensor({m, n + 8}, type, 3), before = wide.clone();
        const auto c = wide.narrow(1, 5, n);
        add_matrix_product_(c, a, b, batch_invariant);
        expect_product(c, a, b, type, before.narrow(1, 5, n).to(at::kDouble));
        EXPECT_TRUE(at::equal(wide.narrow(1, 0, 5), before.narrow(1, 0, 5)));
        EXPECT_TRUE(at::equal(wide.narrow(1, n + 5, 3), before.narrow(1, n + 5, 3)));
      }
}

TEST(MatrixProduct, ARowDoesNotDependOnItsNeighbours) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    if (!has_tiles(type)) continue;  // libtorch's products do not promise this
    const auto a = random_tensor({70, 96}, type, 1);
    const auto b = random_tensor({130, 96}, type, 2).t();
    const auto whole = matrix_product_tiles(a, b);
    for (const int64_t rows : {1, 13, 40})
      EXPECT_TRUE(at::equal(matrix_product_tiles(a.narrow(0, 20, rows), b), whole.narrow(0, 20, rows)))
          << rows << " rows, " << c10::toString(type);
  }
}

TEST(MatrixProduct, EmptyInputsGiveAnEmptySum) {
  const auto a = at::empty({3, 0}), b = at::empty({0, 4});
  EXPECT_TRUE(at::equal(matrix_product(a, b), at::zeros({3, 4})));
  const auto c = at::ones({3, 4});
  add_matrix_product_(c, a, b);
  EXPECT_TRUE(at::equal(c, at::ones({3, 4})));
  EXPECT_EQ(matrix_product(at::empty({0, 5}), at::ones({5, 2})).size(0), 0);
}

TEST(MatrixProduct, InfinitiesStayWhereTheyAre) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    if (!has_tiles(type)) continue;
    at::Tensor a = at::ones({40, 33}, type);
    a[7][3] = std::numeric_limits<float>::infinity();
    const at::Tensor c = matrix_product_tiles(a, at::ones({33, 35}, type));
    EXPECT_EQ(at::sum(at::isinf(c)).item<int64_t>(), 35);
    EXPECT_EQ(at::sum(at::isnan(c)).item<int64_t>(), 0);
  }
}

TEST(MatrixProduct, RefusesOtherShapes) {
  EXPECT_THROW(matrix_product(at::ones({2, 3}), at::ones({2, 3})), std::exception);
  EXPECT_THROW(matrix_product(at::ones({2, 3}), at::ones({3, 2}, at::kBFloat16)), std::exception);
  EXPECT_THROW(add_matrix_product_(at::ones({2, 2}, at::kBFloat16), at::ones({2, 3}), at::ones({3, 2})),
               std::exception);
}

TEST(MatrixProduct, BatchInvariantRowsDoNotDependOnOtherRowsOrThreads) {
  const int threads = at::get_num_threads();
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    if (!has_tiles(type)) continue;
    for (const auto& [n, k] :
         {std::pair{96, 64}, {257, 1030}, {1000, 96}, {31, 33}, {70, 600}, {48, 2048}, {33, 1568}}) {
      constexpr int64_t kRows = 1100;  // more than kPackedRows, which are packed at a time
      const auto a = random_tensor({kRows, k}, type, 1);
      const auto b = random_tensor({n, k}, type, 2).t();
      for (const auto& bias : {std::optional<at::Tensor>(), std::optional(random_tensor({n}, type, 3))}) {
        const auto residual = bias ? std::nullopt : std::optional(random_tensor({kRows, n}, type, 4));
        at::set_num_threads(1);
        const auto all = batch_invariant_product(a, b, bias, residual);
        at::set_num_threads(3);
        EXPECT_TRUE(at::equal(batch_invariant_product(a, b, bias, residual), all)) << "three threads";
        for (const int64_t rows : {1, 2, 8, 11, 12, 16, 17, 40, 129, 256, 257, 700})
          for (const int64_t first : {int64_t{0}, int64_t{37}, kRows - rows}) {
            const auto part = a.narrow(0, first, rows);
            const auto got = batch_invariant_product(
                part, b, bias, residual ? std::optional(residual->narrow(0, first, rows)) : std::nullopt);
            ASSERT_TRUE(at::equal(got, all.narrow(0, first, rows)))
                << rows << " rows from " << first << ", " << n << " columns, depth " << k << ", " << type;
          }
      }
    }
  }
  at::set_num_threads(threads);
}

using CudaMatrixProduct = OnCuda;

TEST_F(CudaMatrixProduct, EqualsTheProductInFp64) {
  struct Shape {
    int64_t m, n, k;
  };
  for (const auto type : kFloatTypes)
    for (const Shape& shape :
         {Shape{64, 64, 64}, Shape{1, 96, 64}, Shape{33, 31, 32}, Shape{45, 65, 130}, Shape{1, 1, 1},
          Shape{300, 200, 7}, Shape{5, 1000, 96}, Shape{64, 48, 5000}, Shape{3, 4, 0}})
      for (const bool a_turned : {false, true})
        for (const bool b_turned : {false, true}) {
          SCOPED_TRACE(testing::Message() << shape.m << " x " << shape.n << " x " << shape.k
                                          << (a_turned ? " a turned" : "") << (b_turned ? " b turned" : ""));
          const auto a = a_turned ? random_tensor({shape.k, shape.m}, type, 1).t()
                                  : random_tensor({shape.m, shape.k}, type, 1);
          const auto b = b_turned ? random_tensor({shape.n, shape.k}, type, 2).t()
                                  : random_tensor({shape.k, shape.n}, type, 2);
          const auto bias = random_tensor({shape.n}, type, 3);
          const auto c = random_tensor({shape.m, shape.n}, accumulator_type(type), 4);
          const auto product = at::mm(a.to(at::kDouble), b.to(at::kDouble));
          EXPECT_CLOSE(matrix_product(on_gpu(a), on_gpu(b)).cpu(), product, type);
          EXPECT_CLOSE(matrix_product(on_gpu(a), on_gpu(b), on_gpu(bias)).cpu(),
                       product + bias.to(at::kDouble), type);
          const auto residual = random_tensor({shape.m, shape.n}, type, 5);
          EXPECT_CLOSE(matrix_product(on_gpu(a), on_gpu(b), {}, on_gpu(residual)).cpu(),
                       product + residual.to(at::kDouble), type);
          EXPECT_CLOSE(matrix_product(on_gpu(a), on_gpu(b), on_gpu(bias), on_gpu(residual)).cpu(),
                       product + bias.to(at::kDouble) + residual.to(at::kDouble), type);
          const auto c_gpu = on_gpu(c);
          add_matrix_product_(c_gpu, on_gpu(a), on_gpu(b));
          EXPECT_CLOSE(c_gpu.cpu(), product + c.to(at::kDouble), c.scalar_type());
          const auto apart = on_gpu(at::cat({residual, residual}, 1)).narrow(1, 0, shape.n);
          add_matrix_product_(apart, on_gpu(a), on_gpu(b));
          EXPECT_CLOSE(apart.cpu(), product + residual.to(at::kDouble), type);
        }
}

BOUGH_HAS_CUDA_KERNELS(MatrixProduct, "matrix_product", "add_matrix_product_")

}  // namespace
}  // namespace bough
