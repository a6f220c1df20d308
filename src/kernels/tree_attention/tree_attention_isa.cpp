#include "kernels/tree_attention/tree_attention_isa.h"

#include "kernels/common/element.h"

namespace bough::BOUGH_ISA {

template <class T>
void load_rows(float* dst, int64_t dst_stride, int64_t padded_rows, const T* src, int64_t src_stride,
               int64_t num_rows, int64_t head_dim) {
  for (int64_t r = 0; r < num_rows; ++r, dst += dst_stride, src += src_stride) {
    for (int64_t d = 0; d < head_dim; ++d) dst[d] = load(src + d);
    for (int64_t d = head_dim; d < dst_stride; ++d) dst[d] = 0;
  }
  for (int64_t i = 0; i < (padded_rows - num_rows) * dst_stride; ++i) dst[i] = 0;
}

template <class T>
void store_rows(T* out, int64_t out_stride, const float* rows, int64_t stride, const float* factors,
                bool one_factor, int64_t num_rows, int64_t head_dim) {
  for (int64_t i = 0; i < num_rows; ++i, out += out_stride, rows += stride) {
    const float factor = factors[one_factor ? 0 : i];
    for (int64_t d = 0; d < head_dim; ++d) store(out + d, rows[d] * factor);
  }
}

template <class T>
void row_dots(float* sums, const T* d_o, const T* o, int64_t num_rows, int64_t width, int64_t stride) {
  for (int64_t r = 0; r < num_rows; ++r, d_o += stride, o += stride) {
    float sum = 0;
    for (int64_t d = 0; d < width; ++d) sum += load(d_o + d) * load(o + d);
    sums[r] = sum;
  }
}

// NOLINTBEGIN(bugprone-macro-parentheses): T is a type.
#define INSTANTIATE(T)                                                                                   \
  template void load_rows<T>(float*, int64_t, int64_t, const T*, int64_t, int64_t, int64_t);             \
  template void store_rows<T>(T*, int64_t, const float*, int64_t, const float*, bool, int64_t, int64_t); \
  template void row_dots<T>(float*, const T*, const T*, int64_t, int64_t, int64_t);
// NOLINTEND(bugprone-macro-parentheses)
INSTANTIATE(float)
INSTANTIATE(BFloat16Bits)

}  // namespace bough::BOUGH_ISA
