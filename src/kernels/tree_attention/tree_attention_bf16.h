// Tree attention in units (tree_attention_units.h), computed in bf16: matrix products of 32 x 32 tiles and
// the softmax of tree_attention_softmax_bf16.h. Forward and backward use this file.
#pragma once

#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/tree_attention/tree_attention_softmax_bf16.h"
#include "kernels/tree_attention/tree_attention_units.h"

namespace bough::bf16 {

using Element = BFloat16Bits;
using Inputs = UnitInputs<Element>;

// Enables the AMX tiles of the thread that creates this object, until the object is destroyed.
struct Session {
  Session() { begin_tiles(); }
  ~Session() { end_tiles(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

inline int64_t columns_from(const Inputs& x, int64_t column) {
  return std::min(kUnit, x.shape.head_dim - column);
}

// Packs matrix rows as right factors (pack_panel), one per 32 columns. `count` is the inner dimension.
inline void pack_rows(Element* dst, const Inputs& x, const Element* rows, int64_t stride, int64_t count) {
  for (int64_t column = 0; column < x.shape.head_dim; column += kUnit, dst += kUnitElements)
    pack_panel(dst, rows + column, stride, false, count, columns_from(x, column));
}

// Packs the transpose of `count` matrix rows as left factors (pack_block), one per 32 columns. `count` is the
// inner dimension.
inline void pack_columns(Element* dst, const Inputs& x, const Element* rows, int64_t stride, int64_t count) {
  for (int64_t column = 0; column < x.shape.head_dim; column += kUnit, dst += kUnitElements)
    pack_block(dst, rows + column, stride, true, columns_from(x, column), count);
}

}  // namespace bough::bf16
