#include "kernels/tree_attention/tree_attention_softmax.h"

#include <immintrin.h>

#include "kernels/common/exp2_avx.h"
#include "kernels/tree_attention/unit_mask_avx512.h"

namespace bough::avx512 {

namespace {
constexpr int kChains = 4;  // independent chains of maxima and of sums, for each half of the queries

void mask_scores(float* scores, const UnitMask& mask) {
  const __m512 invisible = _mm512_set1_ps(-__builtin_huge_valf());
  for (int64_t j = 0; j < kUnit; ++j)
    for (int64_t half = 0; half < 2; ++half) {
      float* s = scores + j * kUnit + half * kLanes;
      _mm512_store_ps(s, _mm512_mask_blend_ps(visible_lanes(mask, j, half), invisible, _mm512_load_ps(s)));
    }
}

// Returns, for each of the first 16 queries of scores [keys][32 queries], the maximum over the keys. `keys`
// is a multiple of kChains.
inline __m512 largest(const float* scores, int64_t keys) {
  __m512 most[kChains];
  for (auto& chain : most) chain = _mm512_set1_ps(kLowest);
  for (int64_t j = 0; j < keys; j += kChains)
    for (int64_t c = 0; c < kChains; ++c)
      most[c] = _mm512_max_ps(_mm512_load_ps(scores + (j + c) * kUnit), most[c]);
  return _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
}

void rescale(const OnlineSoftmax& rows, int64_t half, __m512 largest) {
  float* const max = rows.max + half * kLanes;
  const __m512 before = _mm512_load_ps(max), now = _mm512_max_ps(before, largest);
  alignas(64) float factors[kLanes];
  const __m512 factor = exp2_fp32(_mm512_sub_ps(before, now));
  _mm512_store_ps(factors, factor);
  _mm512_store_ps(max, now);
  float* const sums = rows.sums + half * kLanes;
  _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), factor));
  float* o = rows.o + half * kLanes * rows.width;
  for (int64_t i = 0; i < kLanes; ++i, o += rows.width) {
    const __m512 row_factor = _mm512_set1_ps(factors[i]);
    for (int64_t d = 0; d < rows.width; d += kLanes)
      _mm512_store_ps(o + d, _mm512_mul_ps(_mm512_load_ps(o + d), row_factor));
  }
}
}  // namespace

void online_softmax(float* scores, const UnitMask* masks, int64_t units, float scale,
                    const OnlineSoftmax& rows) {
  for (int64_t u = 0; u < units; ++u)
    if (masks[u].end) mask_scores(scores + u * kUnitElements, masks[u]);
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t half = 0; half < 2; ++half, scores += kLanes) {
    // The maximum is finite even if no key is visible, so that nothing becomes NaN.
    const __m512 most =
        _mm512_max_ps(_mm512_mul_ps(largest(scores, units * kUnit), factor), _mm512_set1_ps(kLowest));
    const __m512 above = _mm512_sub_ps(most, _mm512_load_ps(rows.max + half * kLanes));
    if (_mm512_cmp_ps_mask(above, _mm512_set1_ps(kSlack), _CMP_GT_OQ)) rescale(rows, half, most);
    const __m512 max = _mm512_load_ps(rows.max + half * kLanes);
    __m512 sums[kChains];
    sums[0] = _mm512_load_ps(rows.sums + half * kLanes);
    for (int c = 1; c < kChains; ++c) sums[c] = _mm512_setzero_ps();
    for (int64_t j = 0; j < units * kUnit; j += kChains)
      for (int64_t c = 0; c < kChains; ++c) {
        float* s = scores + (j + c) * kUnit;
        const __m512 p = exp2_fp32(_mm512_fmsub_ps(_mm512_load_ps(s), factor, max));
        sums[c] = _mm512_add_ps(sums[c], p);
        _mm512_store_ps(s, p);
      }
    _mm512_store_ps(rows.sums + half * kLanes,
                    _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
  }
}

void softmax_backward(float* scores, float* d_p, int64_t stride, const UnitMask& mask, float scale,
                      const float* lse, const float* dots) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t half = 0; half < 2; ++half) {
    const __m512 lse_16 = _mm512_load_ps(lse + half * kLanes), dots_16 = _mm512_load_ps(dots + half * kLanes);
    float* s = scores + half * kLanes;
    float* d = d_p + half * kLanes;
#pragma GCC unroll 4
    for (int64_t j = 0; j < kUnit; ++j, s += stride, d += stride) {
      __m512 p = exp2_fp32(_mm512_fmsub_ps(_mm512_load_ps(s), factor, lse_16));
      __m512 d_s = _mm512_mul_ps(p, _mm512_sub_ps(_mm512_load_ps(d), dots_16));
      if (mask.end) {
        const __mmask16 visible = visible_lanes(mask, j, half);
        p = _mm512_maskz_mov_ps(visible, p);
        d_s = _mm512_maskz_mov_ps(visible, d_s);
      }
      _mm512_store_ps(s, p);
      _mm512_store_ps(d, d_s);
    }
  }
}

void store_gradients(const float* sums, int64_t width, float scale, int64_t num_rows, bool add, float* out,
                     int64_t out_stride, int64_t head_dim) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < num_rows; ++i, sums += width, out += out_stride)
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      const int64_t left = head_dim - d;
      const __mmask16 columns = left >= kLanes ? ~__mmask16{0} : static_cast<__mmask16>((1u << left) - 1);
      __m512 value = _mm512_mul_ps(_mm512_load_ps(sums + d), factor);
      if (add) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(columns, out + d));
      _mm512_mask_storeu_ps(out + d, columns, value);
    }
}

}  // namespace bough::avx512
