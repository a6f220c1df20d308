// Tree attention in units (tree_attention_units.h), computed in fp32. bf16 elements are widened when they are
// loaded. This file has the functions that both forward and backward use.
#pragma once

#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/tree_attention/tree_attention_isa.h"
#include "kernels/tree_attention/tree_attention_units.h"

namespace bough::fp32 {

// The Session type of for_each_share for the fp32 kernels, which need no state per thread.
struct NoSession {};

// The left factor of multiply(). Element [i][k] is data[i * stride + k], or data[k * stride + i] if turned.
struct Left {
  const float* data;
  int64_t stride;
  bool turned = false;
};
struct ProductShape {
  int64_t m, n, k;
};

// c[m][n] = a·b, or c[m][n] += a·b if `accumulate`.
inline void multiply(float* c, int64_t c_stride, bool accumulate, const Left& a, const float* b,
                     int64_t b_stride, const ProductShape& shape) {
  constexpr int64_t kRows = 11;  // divides 32 or 64 rows into blocks of nearly equal size
  for (int64_t j = 0; j < shape.n; j += kPanelColumns)
    for (int64_t i = 0; i < shape.m; i += kRows)
      BOUGH_AVX_CALL(multiply_block, c + i * c_stride + j, c_stride, accumulate,
                     a.data + i * (a.turned ? 1 : a.stride), a.stride, a.turned, b + j, b_stride,
                     std::min(kRows, shape.m - i), std::min(kPanelColumns, shape.n - j), shape.k, {});
}

// Loads units [first, first + count) of one head's keys or values as fp32 to dst [count][32][width].
template <class T>
void load_units(float* dst, const UnitInputs<T>& x, const at::Tensor& own, const at::Tensor& stack,
                int64_t group, int64_t first, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const auto& unit = x.units[first + i];
    BOUGH_ISA_CALL(load_rows, dst + i * x.factor_elements(), x.width, kUnit,
                   x.key_rows(own, stack, unit, group), x.shape.k_stride(), unit.rows.size(),
                   x.shape.head_dim);
  }
}

// Loads one block of queries of one head from a [T, N, H] tensor: to `rows` as [32][width], and transposed to
// `turned` as [width][32].
template <class T>
void load_block(float* rows, float* turned, const UnitInputs<T>& x, const T* source, const Range& queries,
                int64_t head) {
  BOUGH_ISA_CALL(load_rows, rows, x.width, kUnit,
                 source + queries.begin * x.shape.q_stride() + head * x.shape.head_dim, x.shape.q_stride(),
                 queries.size(), x.shape.head_dim);
  BOUGH_AVX_CALL(pack_panel, turned, rows, x.width, true, x.width, kUnit);
}

}  // namespace bough::fp32
