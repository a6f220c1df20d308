// Attention in units (tree_attention_units.h), each a product of bf16 blocks, its softmax
// (tree_attention_softmax_bf16.h) and the products that read it. This file: what forward and backward share.
#pragma once

#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/tree_attention/tree_attention_softmax_bf16.h"
#include "kernels/tree_attention/tree_attention_units.h"

namespace bough::bf16 {

using Element = BFloat16Bits;
using Inputs = UnitInputs<Element>;

// A thread's use of the tiles.
struct Session {
  Session() { begin_tiles(); }
  ~Session() { end_tiles(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

inline int64_t columns_from(const Inputs& x, int64_t column) {
  return std::min(kUnit, x.shape.head_dim - column);
}

// Packs rows as the right factor whose depth they are: a panel for each 32 columns.
inline void pack_rows(Element* dst, const Inputs& x, const Element* rows, int64_t stride, int64_t count) {
  for (int64_t column = 0; column < x.shape.head_dim; column += kUnit, dst += kUnitElements)
    pack_panel(dst, rows + column, stride, false, count, columns_from(x, column));
}

// Packs the transpose of rows as a left factor: a block for each 32 columns.
inline void pack_columns(Element* dst, const Inputs& x, const Element* rows, int64_t stride, int64_t count) {
  for (int64_t column = 0; column < x.shape.head_dim; column += kUnit, dst += kUnitElements)
    pack_block(dst, rows + column, stride, true, columns_from(x, column), count);
}

}  // namespace bough::bf16
