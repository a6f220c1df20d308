#include "kernels/tree_attention/tree_attention_softmax_bf16.h"

#include <immintrin.h>

#include "kernels/common/exp2_avx.h"
#include "kernels/matrix_product/transpose_16x16.h"
#include "kernels/tree_attention/unit_mask_avx512.h"

namespace bough::bf16 {

namespace {
// Rounds two vectors of 16 to one vector of 32 bf16 elements: all of `low`, then all of `high`.
inline __m512i round_pair(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Rounds two vectors to pairs of bf16 (low[i], high[i]). Ties are rounded away from zero.
inline __m512i round_to_pairs(__m512 low, __m512 high) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(low), half), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_add_epi32(_mm512_castps_si512(high), half));
}

// Rounds up to 16 elements to nearest even and stores the first `count`.
inline void store_rounded(BFloat16Bits* out, __m512 x, int64_t count) {
  const __mmask16 columns = count >= kLanes ? ~__mmask16{0} : static_cast<__mmask16>((1u << count) - 1);
  _mm256_mask_storeu_epi16(out, columns, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

constexpr int64_t kHalf = kUnit * kLanes;  // scores of half of the queries

// Sets invisible scores of [32 keys][16 queries] to -infinity.
inline void mask_scores(float* scores, const UnitMask& mask, int64_t half) {
  if (!mask.end) return;
  const __m512 invisible = _mm512_set1_ps(-__builtin_huge_valf());
  for (int64_t j = 0; j < kUnit; ++j) {
    float* s = scores + j * kLanes;
    _mm512_store_ps(s, _mm512_mask_blend_ps(visible_lanes(mask, j, half), invisible, _mm512_load_ps(s)));
  }
}
}  // namespace

void raise_maxima(float* scores, const UnitMask* masks, int64_t count, float scale, bool first_step,
                  const OnlineSoftmax& rows) {
  for (int64_t half = 0; half < 2; ++half, scores += kHalf) {
    __m512 largest_0 = _mm512_set1_ps(kLowest), largest_1 = largest_0;
    for (int64_t u = 0; u < count; ++u) {
      float* s = scores + u * kScoreStride;
      mask_scores(s, masks[u], half);
#pragma GCC unroll 4
      for (int64_t j = 0; j < kHalf; j += 2 * kLanes) {
        largest_0 = _mm512_max_ps(_mm512_load_ps(s + j), largest_0);
        largest_1 = _mm512_max_ps(_mm512_load_ps(s + j + kLanes), largest_1);
      }
    }
    // The maximum is finite even if no key is visible, so that nothing becomes NaN.
    const __m512 largest = _mm512_max_ps(
        _mm512_mul_ps(_mm512_max_ps(largest_0, largest_1), _mm512_set1_ps(scale)), _mm512_set1_ps(kLowest));
    float* const row_max = rows.max + half * kLanes;
    float* const row_sums = rows.sums + half * kLanes;
    if (first_step) {
      _mm512_store_ps(row_max, largest);
      _mm512_store_ps(row_sums, _mm512_setzero_ps());
      continue;
    }
    const __m512 before = _mm512_load_ps(row_max), max = _mm512_max_ps(before, largest);
    const __m512 rescale = exp2_lanes(_mm512_sub_ps(before, max));
    _mm512_store_ps(row_max, max);
    _mm512_store_ps(row_sums, _mm512_mul_ps(_mm512_load_ps(row_sums), rescale));
    for (float* o = rows.o + half * kLanes; o < rows.o + rows.width * kUnit; o += kUnit)
      _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), rescale));
  }
}

bool softmax_units(float* scores, const UnitMask* masks, int64_t count, float scale,
                   const OnlineSoftmax& rows) {
  const __m512 factor = _mm512_set1_ps(scale);
  __m512i largest = _mm512_setzero_si512();  // in bf16: positive numbers and their bits have the same order
  __m512 row_sums[2];
  for (int64_t half = 0; half < 2; ++half, scores += kHalf) {
    const __m512 max = _mm512_load_ps(rows.max + half * kLanes);
    __m512 sum_0 = _mm512_load_ps(rows.sums + half * kLanes), sum_1 = _mm512_setzero_ps();
    for (int64_t u = 0; u < count; ++u) {
      float* s = scores + u * kScoreStride;
      mask_scores(s, masks[u], half);
#pragma GCC unroll 4
      for (int64_t j = 0; j < kHalf; j += 2 * kLanes) {
        const __m512 a = exp2_lanes(_mm512_fmsub_ps(_mm512_load_ps(s + j), factor, max));
        const __m512 b = exp2_lanes(_mm512_fmsub_ps(_mm512_load_ps(s + j + kLanes), factor, max));
        sum_0 = _mm512_add_ps(sum_0, a);
        sum_1 = _mm512_add_ps(sum_1, b);
        const __m512i pairs = round_to_pairs(a, b);
        largest = _mm512_max_epu16(largest, pairs);
        _mm512_store_si512(s + j, pairs);
      }
    }
    row_sums[half] = _mm512_add_ps(sum_0, sum_1);
  }
  constexpr int kLargestBits = (127 + kSlack) << 7;
  if (_mm512_cmpgt_epu16_mask(largest, _mm512_set1_epi16(kLargestBits))) return false;
  _mm512_store_ps(rows.sums, row_sums[0]);
  _mm512_store_ps(rows.sums + kLanes, row_sums[1]);
  return true;
}

void finish_softmax(const OnlineSoftmax& rows, int64_t num_rows, BFloat16Bits* out, int64_t out_stride,
                    int64_t head_dim, float* lse, int64_t lse_stride) {
  alignas(64) float inverse[kUnit];
  for (int64_t i = 0; i < kUnit; ++i) inverse[i] = 1.0f / rows.sums[i];
  for (int64_t i = 0; i < num_rows; ++i)
    lse[i * lse_stride] = (rows.max[i] + __builtin_log2f(rows.sums[i])) * kLn2;
  store_turned(rows.o, inverse, num_rows, out, out_stride, head_dim);
}

void row_dots(float* sums, const BFloat16Bits* a, const BFloat16Bits* b, int64_t num_rows, int64_t stride,
              int64_t head_dim) {
  for (int64_t r = 0; r < num_rows; ++r, a += stride, b += stride) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t d = 0; d < head_dim; d += kUnit) {
      const int64_t left = head_dim - d;
      const __mmask32 columns = left >= kUnit ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(columns, a + d)),
                             reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(columns, b + d)));
    }
    sums[r] = _mm512_reduce_add_ps(sum);
  }
}

void softmax_backward_unit(const float* scores, const float* d_p, const UnitMask& mask, float scale,
                           const float* lse, const float* dots, BFloat16Bits* p, BFloat16Bits* d_s,
                           BFloat16Bits* d_s_right) {
  const __m512 factor = _mm512_set1_ps(scale);
  const __m512 lse_0 = _mm512_load_ps(lse), lse_1 = _mm512_load_ps(lse + kLanes);
  const __m512 dots_0 = _mm512_load_ps(dots), dots_1 = _mm512_load_ps(dots + kLanes);
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
    _mm512_store_si512(right, round_to_pairs(d_0[0], d_0[1]));
    _mm512_store_si512(right + kUnitElements / 2, round_to_pairs(d_1[0], d_1[1]));
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
      for (int64_t i = 0; i < kLanes && half * kLanes + i < num_rows; ++i)
        store_rounded(out + (half * kLanes + i) * out_stride + d, _mm512_castsi512_ps(r[i]), head_dim - d);
    }
}

void softmax_backward_page(const float* scores, const float* d_p, const uint16_t* visible, float scale,
                           const float* lse, const float* dots, BFloat16Bits* d_s, BFloat16Bits* p_turned,
                           BFloat16Bits* d_s_turned) {
  const __m512 factor = _mm512_set1_ps(scale);
  __m512i p_pairs[16], d_pairs[16];  // a pair of queries in each dword
  for (int64_t pair = 0; pair < kLanes; ++pair) {
    __m512 p[2], d[2];
    for (int64_t k = 0; k < 2; ++k) {
      const int64_t i = 2 * pair + k;
      const __mmask16 seen = visible[i];
      p[k] = _mm512_maskz_mov_ps(seen, exp2_lanes(_mm512_fmsub_ps(_mm512_load_ps(scores + i * kLanes), factor,
                                                                  _mm512_set1_ps(lse[i]))));
      d[k] = _mm512_maskz_mul_ps(seen, p[k],
                                 _mm512_sub_ps(_mm512_load_ps(d_p + i * kLanes), _mm512_set1_ps(dots[i])));
      _mm256_store_si256(reinterpret_cast<__m256i*>(d_s + i * kUnit),
                         reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(d[k])));
    }
    p_pairs[pair] = round_to_pairs(p[0], p[1]);
    d_pairs[pair] = round_to_pairs(d[0], d[1]);
  }
  transpose_16x16(p_pairs);
  transpose_16x16(d_pairs);
  for (int64_t j = 0; j < kLanes; ++j) {
    _mm512_store_si512(p_turned + j * kUnit, p_pairs[j]);
    _mm512_store_si512(d_s_turned + j * kUnit, d_pairs[j]);
  }
}

void add_rows(const float* sums, float* const* rows, int64_t num_rows, int64_t width) {
  for (int64_t i = 0; i < num_rows; ++i, sums += width)
    for (int64_t h = 0; h < width; h += kLanes)
      _mm512_store_ps(rows[i] + h, _mm512_add_ps(_mm512_load_ps(rows[i] + h), _mm512_load_ps(sums + h)));
}

void store_row(const float* sums, float factor, BFloat16Bits* out, int64_t head_dim) {
  for (int64_t h = 0; h < head_dim; h += kLanes)
    store_rounded(out + h, _mm512_mul_ps(_mm512_load_ps(sums + h), _mm512_set1_ps(factor)), head_dim - h);
}

}  // namespace bough::bf16
