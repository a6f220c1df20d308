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

// Two vectors of bf16 as pairs, `low` first; rounds half up.
inline __m512i round_to_pairs(__m512 low, __m512 high) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(low), half), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_add_epi32(_mm512_castps_si512(high), half));
}

// Scores that are not visible become -infinity. scores: [32 keys][16 queries], the first of them `query`.
inline void mask_scores(float* scores, const UnitMask& mask, int32_t query) {
  const __m512i q = _mm512_add_epi32(_mm512_set1_epi32(query), lane_numbers());
  const __m512 invisible = _mm512_set1_ps(-__builtin_huge_valf());
  for (int32_t j = 0; j < kUnit; ++j) {
    const __mmask16 past = _mm512_cmple_epi32_mask(_mm512_set1_epi32(mask.first_key + j), q);
    const __mmask16 visible = _mm512_mask_cmplt_epi32_mask(past, q, _mm512_set1_epi32(mask.end[j]));
    float* s = scores + j * kLanes;
    _mm512_store_ps(s, _mm512_mask_blend_ps(visible, invisible, _mm512_load_ps(s)));
  }
}
}  // namespace

void softmax_units(float* scores, const UnitMask* masks, int64_t count, float scale, bool first_step,
                   const OnlineSoftmax& rows) {
  constexpr int64_t kHalf = kUnit * kLanes;
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t half = 0; half < 2; ++half, scores += kHalf) {
    __m512 largest_0 = _mm512_set1_ps(kLowest), largest_1 = largest_0;
    for (int64_t u = 0; u < count; ++u) {
      float* s = scores + u * kScoreStride;
      if (masks[u].end) mask_scores(s, masks[u], masks[u].first_query + static_cast<int32_t>(half * kLanes));
#pragma GCC unroll 4
      for (int64_t j = 0; j < kHalf; j += 2 * kLanes) {
        largest_0 = _mm512_max_ps(_mm512_load_ps(s + j), largest_0);
        largest_1 = _mm512_max_ps(_mm512_load_ps(s + j + kLanes), largest_1);
      }
    }
    // Nothing visible: still finite, so that nothing becomes NaN.
    const __m512 largest =
        _mm512_max_ps(_mm512_mul_ps(_mm512_max_ps(largest_0, largest_1), factor), _mm512_set1_ps(kLowest));
    float* const row_max = rows.max + half * kLanes;
    float* const row_sums = rows.sums + half * kLanes;
    __m512 max = first_step ? largest : _mm512_load_ps(row_max);
    __m512 sum_0 = first_step ? _mm512_setzero_ps() : _mm512_load_ps(row_sums), sum_1 = _mm512_setzero_ps();
    if (_mm512_cmp_ps_mask(largest, _mm512_add_ps(max, _mm512_set1_ps(kSlack)), _CMP_GT_OQ)) {
      const __m512 before = max;
      max = _mm512_max_ps(max, largest);
      const __m512 rescale = exp2_lanes(_mm512_sub_ps(before, max));
      sum_0 = _mm512_mul_ps(sum_0, rescale);
      for (float* o = rows.o + half * kLanes; o < rows.o + rows.width * kUnit; o += kUnit)
        _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), rescale));
    }
    _mm512_store_ps(row_max, max);
    for (int64_t u = 0; u < count; ++u) {
      float* s = scores + u * kScoreStride;
#pragma GCC unroll 4
      for (int64_t j = 0; j < kHalf; j += 2 * kLanes) {
        const __m512 a = exp2_lanes(_mm512_fmsub_ps(_mm512_load_ps(s + j), factor, max));
        const __m512 b = exp2_lanes(_mm512_fmsub_ps(_mm512_load_ps(s + j + kLanes), factor, max));
        sum_0 = _mm512_add_ps(sum_0, a);
        sum_1 = _mm512_add_ps(sum_1, b);
        _mm512_store_si512(s + j, round_to_pairs(a, b));
      }
    }
    _mm512_store_ps(row_sums, _mm512_add_ps(sum_0, sum_1));
  }
}

void finish_softmax(const OnlineSoftmax& rows, int64_t num_rows, BFloat16Bits* out, int64_t out_stride,
                    int64_t head_dim, float* lse, int64_t lse_stride) {
  alignas(64) float inverse[kUnit];
  for (int64_t i = 0; i < kUnit; ++i) inverse[i] = 1.0f / rows.sums[i];
  for (int64_t i = 0; i < num_rows; ++i)
    lse[i * lse_stride] = (rows.max[i] + __builtin_log2f(rows.sums[i])) * kLn2;
  store_turned(rows.o, inverse, num_rows, out, out_stride, head_dim);
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

void store_turned(const float* sums, const float* factors, int64_t num_rows, BFloat16Bits* out,
                  int64_t out_stride, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += kLanes)
    for (int64_t half = 0; half < 2; ++half) {
      const __m512 factor = _mm512_load_ps(factors + half * kLanes);
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
