#include "kernels/log_prob/softmax_blocks.h"

#include <limits>

#include "kernels/log_prob/log_prob_loops.h"

namespace bough {

namespace {

using simd::kLanes;

template <class T>
BOUGH_INLINE void load_tail(typename simd::Types<T>::Vector& v, const T* p, int64_t count) {
  using Acc = typename simd::Types<T>::Acc;
  Acc lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    lanes[i] = i < count ? simd::widen(p[i]) : -std::numeric_limits<Acc>::infinity();
  }
  simd::load(v, lanes);
}

template <class T>
BOUGH_INLINE void block_maxima(const T* row, int64_t size, typename simd::Types<T>::Acc* maxima) {
  using Acc = typename simd::Types<T>::Acc;
  using Vector = typename simd::Types<T>::Vector;
  using Integers = typename simd::Types<T>::Integers;
  for (int64_t begin = 0; begin < size; begin += kSoftmaxBlock, ++maxima) {
    const int64_t end = begin + kSoftmaxBlock < size ? begin + kSoftmaxBlock : size;
    Vector maximum = Vector{} - std::numeric_limits<Acc>::infinity();
    for (int64_t i = begin; i < end; i += kLanes) {
      Vector x;
      if (i + kLanes <= end) simd::load(x, row + i);
      else load_tail(x, row + i, end - i);
      simd::raise_to<Integers>(maximum, x);
    }
    *maxima = simd::max_of(maximum);
  }
}

// Computes for one block the sum of the weights (kSum), this sum and the sum of weight · log weight (kDot),
// or only the weights themselves (kWeights).
enum class Use { kSum, kDot, kWeights };
template <Use kUse, class T>
BOUGH_INLINE void block_sum(const T* row, int64_t count, typename simd::Types<T>::Acc maximum,
                            typename simd::Types<T>::Acc inverse_temperature,
                            typename simd::Types<T>::Acc* weights, double* sum, double* dot) {
  using Vector = typename simd::Types<T>::Vector;
  using Integers = typename simd::Types<T>::Integers;
  Vector total = {}, total_dot = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    Vector x;
    if (i + kLanes <= count) simd::load(x, row + i);
    else load_tail(x, row + i, count - i);
    x = (x - maximum) * inverse_temperature;
    Vector z = x;
    if constexpr (kUse == Use::kDot)  // bounds z, so that a weight of 0 adds 0, not NaN
      simd::raise_to<Integers>(z, Vector(Vector{} - typename simd::Types<T>::Acc{1000}));
    Vector nan = {};  // exp_nonpositive may map NaN to 0: keep it visible in the sum
    Integers is_nan;
    simd::nan_mask(is_nan, x);
    simd::replace(nan, is_nan, x);
    simd::exp_nonpositive(x);
    x += nan;
    total += x;
    if constexpr (kUse == Use::kDot) total_dot += x * z;
    if constexpr (kUse == Use::kWeights) simd::store(weights + i, x);
  }
  if constexpr (kUse != Use::kWeights) *sum = static_cast<double>(simd::sum_of(total));
  if constexpr (kUse == Use::kDot) *dot = static_cast<double>(simd::sum_of(total_dot));
}

template <class T>
BOUGH_INLINE void block_sums(const T* row, int64_t size, typename simd::Types<T>::Acc maximum,
                             typename simd::Types<T>::Acc inverse_temperature, double* sums, double* dots) {
  for (int64_t begin = 0; begin < size; begin += kSoftmaxBlock, ++sums) {
    const int64_t count = size - begin < kSoftmaxBlock ? size - begin : kSoftmaxBlock;
    if (dots) block_sum<Use::kDot>(row + begin, count, maximum, inverse_temperature, nullptr, sums, dots++);
    else block_sum<Use::kSum>(row + begin, count, maximum, inverse_temperature, nullptr, sums, nullptr);
  }
}

template <class T>
BOUGH_INLINE void block_weights(const T* row, int64_t count, typename simd::Types<T>::Acc maximum,
                                typename simd::Types<T>::Acc inverse_temperature,
                                typename simd::Types<T>::Acc* weights) {
  block_sum<Use::kWeights>(row, count, maximum, inverse_temperature, weights, nullptr, nullptr);
}

#define BOUGH_SOFTMAX_LOOPS(T, A)                                                                   \
  BOUGH_ON_BEST_ISA(find_maxima, (const T* row, int64_t size, A* maxima), (row, size, maxima),      \
                    block_maxima<T>)                                                                \
  BOUGH_ON_BEST_ISA(sum_blocks,                                                                     \
                    (const T* row, int64_t size, A maximum, A inverse, double* sums, double* dots), \
                    (row, size, maximum, inverse, sums, dots), block_sums<T>)                       \
  BOUGH_ON_BEST_ISA(weigh, (const T* row, int64_t count, A maximum, A inverse, A* weights),         \
                    (row, count, maximum, inverse, weights), block_weights<T>)
BOUGH_SOFTMAX_LOOPS(float, float)
BOUGH_SOFTMAX_LOOPS(BFloat16Bits, float)
BOUGH_SOFTMAX_LOOPS(double, double)

}  // namespace

// fp64 uses the loops above. fp32 and bf16 use them only on CPUs without AVX-512.

template <class T>
void softmax_maxima(const T* logits, int64_t width, typename simd::Types<T>::Acc* maxima) {
  if constexpr (!std::is_same_v<T, double>)
    if (best_isa() == Isa::kAvx512) return avx512::softmax_maxima(logits, width, maxima);
  find_maxima(logits, width, maxima);
}

template <class T>
void softmax_sums(const T* logits, int64_t width, typename simd::Types<T>::Acc maximum,
                  typename simd::Types<T>::Acc inverse_temperature, double* sums, double* dots) {
  if constexpr (!std::is_same_v<T, double>)
    if (best_isa() == Isa::kAvx512)
      return avx512::softmax_sums(logits, width, maximum, inverse_temperature, sums, dots);
  sum_blocks(logits, width, maximum, inverse_temperature, sums, dots);
}

template <class T>
void softmax_weights(const T* logits, int64_t count, typename simd::Types<T>::Acc maximum,
                     typename simd::Types<T>::Acc inverse_temperature,
                     typename simd::Types<T>::Acc* weights) {
  if constexpr (!std::is_same_v<T, double>)
    if (best_isa() == Isa::kAvx512)
      return avx512::softmax_weights(logits, count, maximum, inverse_temperature, weights);
  weigh(logits, count, maximum, inverse_temperature, weights);
}

#define INSTANTIATE(T, A)                                                   \
  template void softmax_maxima<T>(const T*, int64_t, A*);                   \
  template void softmax_sums<T>(const T*, int64_t, A, A, double*, double*); \
  template void softmax_weights<T>(const T*, int64_t, A, A, A*);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough
