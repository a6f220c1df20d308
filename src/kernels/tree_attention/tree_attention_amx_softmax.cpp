#include "kernels/tree_attention/tree_attention_amx_softmax.h"

#include <immintrin.h>

#include "kernels/common/exp2_avx512.h"
#include "kernels/matrix_product/transpose_16x16.h"

namespace bough::amx {

namespace {
inline __m512i lane_numbers() {
  return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

// Two vectors as one of bf16: `low` first.
inline __m512i round_pair(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Keys of lanes [16 · half, 16 · half + 16) that the query sees.
inline __mmask16 visible_keys(const UnitMask& mask, int64_t half, int32_t query) {
  const __m512i q = _mm512_set1_epi32(query);
  const __m512i key = _mm512_add_epi32(
      _mm512_set1_epi32(mask.first_key + static_cast<int32_t>(half * kLanes)), lane_numbers());
  const __mmask16 past = _mm512_cmple_epi32_mask(key, q);
  return _mm512_mask_cmplt_epi32_mask(past, q, _mm512_loadu_si512(mask.end + half * kLanes));
}
}  // namespace

void begin_softmax(const OnlineSoftmax& rows) {
  for (int64_t i = 0; i < kUnit; ++i) {
    rows.max[i] = kLowest;
    _mm512_store_ps(rows.sums + i * kLanes, _mm512_setzero_ps());
  }
  for (int64_t i = 0; i < kUnit * rows.width; i += kLanes) _mm512_store_ps(rows.o + i, _mm512_setzero_ps());
}

void softmax_units(const float* scores, BFloat16Bits* probabilities, const UnitMask* masks, int64_t count,
                   float scale, const OnlineSoftmax& rows) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < kUnit; ++i) {
    const float* s = scores + i * kUnit;
    __m512 low = _mm512_set1_ps(kLowest), high = low;
    for (int64_t u = 0; u < count; ++u, s += kScoreStride) {
      const __m512 a = _mm512_load_ps(s), b = _mm512_load_ps(s + kLanes);
      if (masks[u].end) {
        const int32_t query = masks[u].first_query + static_cast<int32_t>(i);
        low = _mm512_mask_max_ps(low, visible_keys(masks[u], 0, query), a, low);
        high = _mm512_mask_max_ps(high, visible_keys(masks[u], 1, query), b, high);
      } else {
        low = _mm512_max_ps(a, low);
        high = _mm512_max_ps(b, high);
      }
    }
    // A lane above the row's maximum is rare after the first steps; only then is the maximum of the lanes needed.
    __m512 max = _mm512_set1_ps(rows.max[i]);
    const __m512 largest = _mm512_mul_ps(_mm512_max_ps(low, high), factor);
    float* lane_sums = rows.sums + i * kLanes;
    __m512 sums = _mm512_load_ps(lane_sums);
    if (_mm512_cmp_ps_mask(largest, max, _CMP_GT_OQ)) {
      const __m512 before = max;
      max = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
      const __m512 rescale = exp2_lanes(_mm512_sub_ps(before, max));
      rows.max[i] = _mm512_cvtss_f32(max);
      sums = _mm512_mul_ps(sums, rescale);
      for (float* o = rows.o + i * rows.width; o < rows.o + (i + 1) * rows.width; o += kLanes)
        _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), rescale));
    }
    s = scores + i * kUnit;
    BFloat16Bits* p = probabilities + i * kUnit;
    for (int64_t u = 0; u < count; ++u, s += kScoreStride, p += kProbabilityStride) {
      __m512 a = exp2_lanes(_mm512_fmsub_ps(_mm512_load_ps(s), factor, max));
      __m512 b = exp2_lanes(_mm512_fmsub_ps(_mm512_load_ps(s + kLanes), factor, max));
      if (masks[u].end) {
        const int32_t query = masks[u].first_query + static_cast<int32_t>(i);
        a = _mm512_maskz_mov_ps(visible_keys(masks[u], 0, query), a);
        b = _mm512_maskz_mov_ps(visible_keys(masks[u], 1, query), b);
      }
      sums = _mm512_add_ps(sums, _mm512_add_ps(a, b));
      _mm512_store_si512(p, round_pair(a, b));
    }
    _mm512_store_ps(lane_sums, sums);
  }
}

void finish_softmax(const OnlineSoftmax& rows, int64_t num_rows, BFloat16Bits* out, int64_t out_stride,
                    int64_t head_dim, float* lse, int64_t lse_stride) {
  for (int64_t i = 0; i < num_rows; ++i, out += out_stride) {
    const float sum = _mm512_reduce_add_ps(_mm512_load_ps(rows.sums + i * kLanes));
    lse[i * lse_stride] = (rows.max[i] + __builtin_log2f(sum)) * kLn2;
    const __m512 inverse = _mm512_set1_ps(1.0f / sum);
    const float* o = rows.o + i * rows.width;
    for (int64_t d = 0; d < head_dim; d += kUnit) {
      const __m512i both = round_pair(_mm512_mul_ps(_mm512_load_ps(o + d), inverse),
                                      _mm512_mul_ps(_mm512_load_ps(o + d + kLanes), inverse));
      const int64_t left = head_dim - d;
      _mm512_mask_storeu_epi16(out + d, left >= kUnit ? ~__mmask32{0} : (__mmask32{1} << left) - 1, both);
    }
  }
}

void softmax_backward_unit(const float* scores, const float* d_p, const UnitMask& mask, float scale,
                           const float* lse, const float* dots, BFloat16Bits* p, BFloat16Bits* d_s,
                           BFloat16Bits* d_s_right) {
  const __m512 factor = _mm512_set1_ps(scale);
  const __m512 lse_0 = _mm512_load_ps(lse), lse_1 = _mm512_load_ps(lse + kLanes);
  const __m512 dots_0 = _mm512_load_ps(dots), dots_1 = _mm512_load_ps(dots + kLanes);
  // (e0 .. e15, o0 .. o15) -> (e0 o0 e1 o1 ...): a pair of keys of each query.
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                              23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int64_t pair = 0; pair < kUnit / 2; ++pair) {
    __m512 d_0[2], d_1[2];
    for (int64_t k = 0; k < 2; ++k) {
      const int64_t j = 2 * pair + k, at = j * kUnit;
      __m512 p_0 = exp2_lanes(_mm512_fmsub_ps(_mm512_load_ps(scores + at), factor, lse_0));
      __m512 p_1 = exp2_lanes(_mm512_fmsub_ps(_mm512_load_ps(scores + at + kLanes), factor, lse_1));
      d_0[k] = _mm512_mul_ps(p_0, _mm512_sub_ps(_mm512_load_ps(d_p + at), dots_0));
      d_1[k] = _mm512_mul_ps(p_1, _mm512_sub_ps(_mm512_load_ps(d_p + at + kLanes), dots_1));
      if (mask.end) {
        const __m512i first = _mm512_set1_epi32(mask.first_key + static_cast<int32_t>(j) - mask.first_query);
        const __m512i end = _mm512_set1_epi32(mask.end[j] - mask.first_query);
        const __m512i q_0 = lane_numbers(), q_1 = _mm512_add_epi32(q_0, _mm512_set1_epi32(kLanes));
        const __mmask16 v_0 = _mm512_mask_cmplt_epi32_mask(_mm512_cmpge_epi32_mask(q_0, first), q_0, end);
        const __mmask16 v_1 = _mm512_mask_cmplt_epi32_mask(_mm512_cmpge_epi32_mask(q_1, first), q_1, end);
        p_0 = _mm512_maskz_mov_ps(v_0, p_0);
        p_1 = _mm512_maskz_mov_ps(v_1, p_1);
        d_0[k] = _mm512_maskz_mov_ps(v_0, d_0[k]);
        d_1[k] = _mm512_maskz_mov_ps(v_1, d_1[k]);
      }
      _mm512_store_si512(p + at, round_pair(p_0, p_1));
      _mm512_store_si512(d_s + at, round_pair(d_0[k], d_1[k]));
    }
    BFloat16Bits* right = d_s_right + pair * kUnit;
    _mm512_store_si512(right, _mm512_permutexvar_epi16(interleave, round_pair(d_0[0], d_0[1])));
    _mm512_store_si512(right + kUnitElements / 2,
                       _mm512_permutexvar_epi16(interleave, round_pair(d_1[0], d_1[1])));
  }
}

void store_turned(const float* sums, float scale, int64_t num_rows, BFloat16Bits* out, int64_t out_stride,
                  int64_t head_dim) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t d = 0; d < head_dim; d += kLanes)
    for (int64_t half = 0; half < 2; ++half) {
      __m512i r[16];
      for (int64_t i = 0; i < kLanes; ++i)
        r[i] = _mm512_castps_si512(
            _mm512_mul_ps(_mm512_load_ps(sums + (d + i) * kUnit + half * kLanes), factor));
      transpose_16x16(r);
      const int64_t left = head_dim - d;
      const __mmask16 columns = left >= kLanes ? ~__mmask16{0} : static_cast<__mmask16>((1u << left) - 1);
      for (int64_t i = 0; i < kLanes && half * kLanes + i < num_rows; ++i) {
        const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_castsi512_ps(r[i])));
        _mm256_mask_storeu_epi16(out + (half * kLanes + i) * out_stride + d, columns, rounded);
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

}  // namespace bough::amx
