#include "kernels/tree_attention/tree_attention_isa.h"

#include "kernels/common/element.h"
#include "kernels/common/exp.h"
#include "kernels/common/largest.h"

namespace bough::BOUGH_ISA {

namespace {
constexpr float kMinusInfinity = -__builtin_huge_valf();
}

template <class T>
void load_tile(float* dst, const T* src, int64_t num_rows, int64_t padded_rows, int64_t width,
               int64_t stride) {
  for (int64_t r = 0; r < num_rows; ++r, dst += width, src += stride)
    for (int64_t d = 0; d < width; ++d) dst[d] = load(src + d);
  for (int64_t i = 0; i < (padded_rows - num_rows) * width; ++i) dst[i] = 0;
}

template <class T>
void load_tile_transposed(float* dst, const T* src, int64_t num_rows, int64_t padded_rows, int64_t width,
                          int64_t stride) {
  for (int64_t d = 0; d < width; ++d) {
    float* row = dst + d * padded_rows;
    for (int64_t r = 0; r < num_rows; ++r) row[r] = load(src + r * stride + d);
    for (int64_t r = num_rows; r < padded_rows; ++r) row[r] = 0;
  }
}

void transpose_tile(float* dst, const float* src, int64_t rows, int64_t columns) {
  constexpr int64_t kBlock = 16;  // rows and columns are multiples of it: a block of both sides stays in L1
  for (int64_t r0 = 0; r0 < rows; r0 += kBlock)
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t r = 0; r < kBlock; ++r) dst[c * rows + r0 + r] = src[(r0 + r) * columns + c];
}

void online_softmax_tile(float* scores, float* probabilities, int64_t num_queries, int64_t num_keys,
                         int64_t padded_keys, const TileMask& mask, float scale, float* row_max,
                         float* row_sum, float* o, int64_t width) {
  for (int64_t i = 0; i < num_queries; ++i, scores += padded_keys, probabilities += padded_keys, o += width) {
    if (!mask.all_visible) {
      const int32_t query = static_cast<int32_t>(mask.first_query + i);
      const int32_t last_key = static_cast<int32_t>(query - mask.first_key);  // keys j <= last_key
      for (int64_t j = 0; j < num_keys; ++j) {
        const bool visible = (static_cast<int32_t>(j) <= last_key) & (query < mask.end_local[j]);
        scores[j] = visible ? scores[j] : kMinusInfinity;
      }
    }
    for (int64_t j = num_keys; j < padded_keys; ++j) scores[j] = kMinusInfinity;
    float tile_max = largest(scores, padded_keys);
    tile_max *= scale;
    const float new_max = tile_max > row_max[i] ? tile_max : row_max[i];
    if (new_max == kMinusInfinity) {  // nothing visible yet
      for (int64_t j = 0; j < padded_keys; ++j) store(probabilities + j, 0.0f);
      continue;
    }
    const float rescale = row_max[i] == kMinusInfinity ? 0.0f : vector_exp(row_max[i] - new_max);
    float sum = 0;
#pragma GCC ivdep
    for (int64_t j = 0; j < padded_keys; ++j) {
      const float p = vector_exp(scores[j] * scale - new_max);
      store(probabilities + j, p);
      sum += p;
    }
    row_sum[i] = row_sum[i] * rescale + sum;
    row_max[i] = new_max;
    if (rescale != 1.0f)
      for (int64_t d = 0; d < width; ++d) o[d] *= rescale;
  }
}

template <class T>
void finish_tile(T* out, int64_t out_stride, const float* o, int64_t o_stride, const float* row_sum,
                 int64_t num_queries, int64_t head_dim) {
  for (int64_t i = 0; i < num_queries; ++i, out += out_stride, o += o_stride) {
    const float inverse = 1.0f / row_sum[i];
    for (int64_t d = 0; d < head_dim; ++d) store(out + d, o[d] * inverse);
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

// Forward was p = exp(scale · scores - lse); now dS = p · (d_p - D) · scale.
void softmax_backward_tile(const float* scores, const float* d_probabilities, float* probabilities,
                           float* d_s, int64_t num_queries, int64_t padded_queries, int64_t num_keys,
                           int64_t padded_keys, const TileMask& mask, const float* lse, const float* dots,
                           float scale) {
  for (int64_t j = 0; j < num_keys; ++j) {
    if (mask.all_visible) {
#pragma GCC ivdep
      for (int64_t i = 0; i < num_queries; ++i) {
        const float p = vector_exp(scores[i] * scale - lse[i]);
        store(probabilities + i, p);
        store(d_s + i, p * (d_probabilities[i] - dots[i]) * scale);
      }
    } else {
      const int32_t first =
          static_cast<int32_t>(mask.first_key + j - mask.first_query);                 // queries i >= first
      const int32_t end = static_cast<int32_t>(mask.end_local[j] - mask.first_query);  // queries i < end
#pragma GCC ivdep
      for (int64_t i = 0; i < num_queries; ++i) {
        const bool visible = (static_cast<int32_t>(i) >= first) & (static_cast<int32_t>(i) < end);
        const float p = vector_exp(visible ? scores[i] * scale - lse[i] : kMinusInfinity);
        store(probabilities + i, p);
        store(d_s + i, p * (d_probabilities[i] - dots[i]) * scale);
      }
    }
    for (int64_t i = num_queries; i < padded_queries; ++i) {
      store(probabilities + i, 0.0f);
      store(d_s + i, 0.0f);
    }
    scores += padded_queries;
    d_probabilities += padded_queries;
    probabilities += padded_queries;
    d_s += padded_queries;
  }
  for (int64_t i = 0; i < (padded_keys - num_keys) * padded_queries; ++i) {
    store(probabilities + i, 0.0f);
    store(d_s + i, 0.0f);
  }
}

// NOLINTBEGIN(bugprone-macro-parentheses): T is a type.
#define INSTANTIATE(T)                                                                              \
  template void load_tile<T>(float*, const T*, int64_t, int64_t, int64_t, int64_t);                 \
  template void load_tile_transposed<T>(float*, const T*, int64_t, int64_t, int64_t, int64_t);      \
  template void finish_tile<T>(T*, int64_t, const float*, int64_t, const float*, int64_t, int64_t); \
  template void row_dots<T>(float*, const T*, const T*, int64_t, int64_t, int64_t);
// NOLINTEND(bugprone-macro-parentheses)
INSTANTIATE(float)
INSTANTIATE(BFloat16Bits)

}  // namespace bough::BOUGH_ISA
