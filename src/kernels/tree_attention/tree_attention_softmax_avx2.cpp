#include <immintrin.h>

#include "kernels/common/exp2_avx.h"
#include "kernels/tree_attention/tree_attention_softmax.h"

namespace bough::avx2 {

namespace {
constexpr int64_t kEight = 8;  // lanes

// All bits of the lanes of queries `first` to first + 7 of a unit that see `key`. mask.end must not be
// nullptr.
inline __m256 visible_lanes(const UnitMask& mask, int64_t key, int64_t first) {
  const __m256i q = _mm256_add_epi32(_mm256_set1_epi32(mask.first_query + static_cast<int32_t>(first)),
                                     _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
  const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(mask.first_key + static_cast<int32_t>(key)), q);
  const __m256i within = _mm256_cmpgt_epi32(_mm256_set1_epi32(mask.end[key]), q);
  return _mm256_castsi256_ps(_mm256_andnot_si256(before, within));
}

void mask_scores(float* scores, const UnitMask& mask) {
  const __m256 invisible = _mm256_set1_ps(-__builtin_huge_valf());
  for (int64_t j = 0; j < kUnit; ++j)
    for (int64_t i = 0; i < kUnit; i += kEight) {
      float* s = scores + j * kUnit + i;
      _mm256_store_ps(s, _mm256_blendv_ps(invisible, _mm256_load_ps(s), visible_lanes(mask, j, i)));
    }
}

// Raises the maxima of 8 queries, the first of which is number `first`.
void rescale(const OnlineSoftmax& rows, int64_t first, __m256 largest) {
  float* const max = rows.max + first;
  const __m256 before = _mm256_load_ps(max), now = _mm256_max_ps(before, largest);
  const __m256 factor = exp2_fp32(_mm256_sub_ps(before, now));
  alignas(32) float factors[kEight];
  _mm256_store_ps(factors, factor);
  _mm256_store_ps(max, now);
  float* const sums = rows.sums + first;
  _mm256_store_ps(sums, _mm256_mul_ps(_mm256_load_ps(sums), factor));
  float* o = rows.o + first * rows.width;
  for (int64_t i = 0; i < kEight; ++i, o += rows.width) {
    const __m256 row_factor = _mm256_set1_ps(factors[i]);
    for (int64_t d = 0; d < rows.width; d += kEight)
      _mm256_store_ps(o + d, _mm256_mul_ps(_mm256_load_ps(o + d), row_factor));
  }
}
}  // namespace

void online_softmax(float* scores, const UnitMask* masks, int64_t units, float scale,
                    const OnlineSoftmax& rows) {
  for (int64_t u = 0; u < units; ++u)
    if (masks[u].end) mask_scores(scores + u * kUnitElements, masks[u]);
  const __m256 factor = _mm256_set1_ps(scale);
  for (int64_t i = 0; i < kUnit; i += kEight, scores += kEight) {
    // Two independent chains of maxima and of sums. The number of keys is even.
    __m256 most[2] = {_mm256_set1_ps(kLowest), _mm256_set1_ps(kLowest)};
    for (int64_t j = 0; j < units * kUnit; j += 2)
      for (int64_t c = 0; c < 2; ++c)
        most[c] = _mm256_max_ps(_mm256_load_ps(scores + (j + c) * kUnit), most[c]);
    // The maximum is finite even if no key is visible, so that nothing becomes NaN.
    const __m256 largest =
        _mm256_max_ps(_mm256_mul_ps(_mm256_max_ps(most[0], most[1]), factor), _mm256_set1_ps(kLowest));
    const __m256 above = _mm256_sub_ps(largest, _mm256_load_ps(rows.max + i));
    if (_mm256_movemask_ps(_mm256_cmp_ps(above, _mm256_set1_ps(kSlack), _CMP_GT_OQ)))
      rescale(rows, i, largest);
    const __m256 max = _mm256_load_ps(rows.max + i);
    __m256 sums[2] = {_mm256_load_ps(rows.sums + i), _mm256_setzero_ps()};
    for (int64_t j = 0; j < units * kUnit; j += 2)
#pragma GCC unroll 2
      for (int64_t c = 0; c < 2; ++c) {
        float* s = scores + (j + c) * kUnit;
        const __m256 p = exp2_fp32(_mm256_fmsub_ps(_mm256_load_ps(s), factor, max));
        sums[c] = _mm256_add_ps(sums[c], p);
        _mm256_store_ps(s, p);
      }
    _mm256_store_ps(rows.sums + i, _mm256_add_ps(sums[0], sums[1]));
  }
}

void softmax_backward(float* scores, float* d_p, int64_t stride, const UnitMask& mask, float scale,
                      const float* lse, const float* dots) {
  const __m256 factor = _mm256_set1_ps(scale);
  for (int64_t i = 0; i < kUnit; i += kEight) {
    const __m256 lse_8 = _mm256_load_ps(lse + i), dots_8 = _mm256_load_ps(dots + i);
    float* s = scores + i;
    float* d = d_p + i;
#pragma GCC unroll 2
    for (int64_t j = 0; j < kUnit; ++j, s += stride, d += stride) {
      __m256 p = exp2_fp32(_mm256_fmsub_ps(_mm256_load_ps(s), factor, lse_8));
      __m256 d_s = _mm256_mul_ps(p, _mm256_sub_ps(_mm256_load_ps(d), dots_8));
      if (mask.end) {
        const __m256 visible = visible_lanes(mask, j, i);
        p = _mm256_and_ps(visible, p);
        d_s = _mm256_and_ps(visible, d_s);
      }
      _mm256_store_ps(s, p);
      _mm256_store_ps(d, d_s);
    }
  }
}

void store_gradients(const float* sums, int64_t width, float scale, int64_t num_rows, bool add, float* out,
                     int64_t out_stride, int64_t head_dim) {
  for (int64_t i = 0; i < num_rows; ++i, sums += width, out += out_stride)
    for (int64_t d = 0; d < head_dim; ++d) out[d] = add ? out[d] + sums[d] * scale : sums[d] * scale;
}

}  // namespace bough::avx2
