#include "kernels/log_prob/log_prob_loops.h"

#include <immintrin.h>

#include "kernels/common/exp2_avx.h"

namespace bough::avx512 {

namespace {
constexpr int64_t kBlock = 256;  // equals kSoftmaxBlock, whose header is not for files with intrinsics
constexpr int64_t kTogether = 32;

inline __mmask16 first(int64_t count) {
  return count >= 16 ? ~__mmask16{0} : static_cast<__mmask16>((1u << (count < 0 ? 0 : count)) - 1);
}

// Holds 32 elements; with `count` < 32, `count` elements and zeros. For fp32, a and b hold 16 consecutive
// elements each. For bf16, a holds the elements at even places and b those at odd places.
struct Two {
  __m512 a, b;
};
inline __mmask16 lanes_of_a(const float*, int64_t count) {
  return first(count);
}
inline __mmask16 lanes_of_b(const float*, int64_t count) {
  return first(count - 16);
}
inline __mmask16 lanes_of_a(const BFloat16Bits*, int64_t count) {
  return first((count + 1) / 2);
}
inline __mmask16 lanes_of_b(const BFloat16Bits*, int64_t count) {
  return first(count / 2);
}
inline __mmask32 lanes_of_both(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
}
inline Two load(const float* p, int64_t count) {
  return {_mm512_maskz_loadu_ps(lanes_of_a(p, count), p),
          _mm512_maskz_loadu_ps(lanes_of_b(p, count), p + 16)};
}
inline Two load(const BFloat16Bits* p, int64_t count) {
  const __m512i pairs = _mm512_maskz_loadu_epi16(lanes_of_both(count), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
}

// Rounds fp32 to bf16, to nearest even, and keeps the bf16 in the upper 16 bits. NaN stays NaN.
inline __m512i round_up_half(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                               _mm512_set1_epi32(0x7FC00000));
}
inline void store(float* p, const Two& x, int64_t count) {
  _mm512_mask_storeu_ps(p, lanes_of_a(p, count), x.a);
  _mm512_mask_storeu_ps(p + 16, lanes_of_b(p, count), x.b);
}
inline void store(BFloat16Bits* p, const Two& x, int64_t count) {
  const __m512i a = _mm512_srli_epi32(round_up_half(x.a), 16);
  _mm512_mask_storeu_epi16(p, lanes_of_both(count),
                           _mm512_mask_blend_epi16(0xAAAAAAAAu, a, round_up_half(x.b)));
}

// Loads 16 elements in order.
inline __m512 load_in_order(const float* p, __mmask16 lanes) {
  return _mm512_maskz_loadu_ps(lanes, p);
}
inline __m512 load_in_order(const BFloat16Bits* p, __mmask16 lanes) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)), 16));
}

// Converts logits to exponents of base 2.
struct Exponent {
  __m512 maximum, factor;
  Exponent(float maximum, float inverse_temperature)
      : maximum(_mm512_set1_ps(maximum)), factor(_mm512_set1_ps(inverse_temperature * kLog2E)) {}
  __m512 operator()(__m512 logits) const { return _mm512_mul_ps(_mm512_sub_ps(logits, maximum), factor); }
};

// Bounds exponents from below, so that a weight of 0 times its exponent is 0, not 0 · -inf = NaN.
inline __m512 bounded(__m512 exponent) {
  return _mm512_max_ps(exponent, _mm512_set1_ps(-1443.0f));
}

template <bool kDots, class T>
void sum_block(const T* p, int64_t count, const Exponent& exponent, double* sum, double* dot) {
  __m512 sum_a = _mm512_setzero_ps(), sum_b = sum_a, dot_a = sum_a, dot_b = sum_a;
  for (int64_t i = 0; i < count; i += kTogether) {
    const Two x = load(p + i, count - i);
    const __m512 t_a = exponent(x.a), t_b = exponent(x.b);
    const __m512 w_a = _mm512_maskz_mov_ps(lanes_of_a(p, count - i), exp2_fp32(t_a));
    const __m512 w_b = _mm512_maskz_mov_ps(lanes_of_b(p, count - i), exp2_fp32(t_b));
    sum_a = _mm512_add_ps(sum_a, w_a);
    sum_b = _mm512_add_ps(sum_b, w_b);
    if constexpr (kDots) {
      dot_a = _mm512_fmadd_ps(w_a, bounded(t_a), dot_a);
      dot_b = _mm512_fmadd_ps(w_b, bounded(t_b), dot_b);
    }
  }
  *sum = static_cast<double>(_mm512_reduce_add_ps(_mm512_add_ps(sum_a, sum_b)));
  if constexpr (kDots)
    *dot = static_cast<double>(kLn2) * static_cast<double>(_mm512_reduce_add_ps(_mm512_add_ps(dot_a, dot_b)));
}
}  // namespace

template <class T>
void softmax_maxima(const T* logits, int64_t width, float* maxima) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_huge_valf());
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t end = begin + kBlock < width ? begin + kBlock : width;
    __m512 a = lowest, b = lowest;
    for (int64_t i = begin; i < end; i += kTogether) {
      const Two x = load(logits + i, end - i);
      a = _mm512_mask_max_ps(a, lanes_of_a(logits, end - i), x.a, a);
      b = _mm512_mask_max_ps(b, lanes_of_b(logits, end - i), x.b, b);
    }
    *maxima++ = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
  }
}

template <class T>
void softmax_sums(const T* logits, int64_t width, float maximum, float inverse_temperature, double* sums,
                  double* dots) {
  const Exponent exponent(maximum, inverse_temperature);
  for (int64_t begin = 0; begin < width; begin += kBlock, ++sums) {
    const int64_t count = width - begin < kBlock ? width - begin : kBlock;
    if (dots) sum_block<true>(logits + begin, count, exponent, sums, dots++);
    else sum_block<false>(logits + begin, count, exponent, sums, nullptr);
  }
}

template <class T>
void softmax_weights(const T* logits, int64_t count, float maximum, float inverse_temperature,
                     float* weights) {
  const Exponent exponent(maximum, inverse_temperature);
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = first(count - i);
    _mm512_mask_storeu_ps(weights + i, lanes, exp2_fp32(exponent(load_in_order(logits + i, lanes))));
  }
}

template <class T>
void log_prob_backward(T* logits, int64_t width, float inverse_temperature, float lse, float entropy,
                       float d_log_prob, float d_entropy) {
  const __m512 inverse = _mm512_set1_ps(inverse_temperature), lse_16 = _mm512_set1_ps(lse);
  const __m512 log2_e = _mm512_set1_ps(kLog2E);
  const __m512 constant = _mm512_set1_ps(-(d_log_prob + d_entropy * entropy) * inverse_temperature);
  const __m512 slope = _mm512_set1_ps(-d_entropy * inverse_temperature);
  const auto gradient = [&](__m512 x) {
    const __m512 log_p = _mm512_fmsub_ps(x, inverse, lse_16);
    const __m512 p = exp2_fp32(_mm512_mul_ps(log_p, log2_e));
    return _mm512_mul_ps(p, _mm512_fmadd_ps(slope, log_p, constant));
  };
  for (int64_t i = 0; i < width; i += kTogether) {
    const Two x = load(logits + i, width - i);
    store(logits + i, {gradient(x.a), gradient(x.b)}, width - i);
  }
}

#define INSTANTIATE(T)                                                              \
  template void softmax_maxima<T>(const T*, int64_t, float*);                       \
  template void softmax_sums<T>(const T*, int64_t, float, float, double*, double*); \
  template void softmax_weights<T>(const T*, int64_t, float, float, float*);        \
  template void log_prob_backward<T>(T*, int64_t, float, float, float, float, float);
INSTANTIATE(float)
INSTANTIATE(BFloat16Bits)

}  // namespace bough::avx512
