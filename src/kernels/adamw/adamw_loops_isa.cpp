#include "kernels/adamw/adamw_loops.h"
#include "kernels/common/element.h"

namespace bough::BOUGH_ISA {

static inline float square_root(float x) {
  return __builtin_sqrtf(x);
}
static inline double square_root(double x) {
  return __builtin_sqrt(x);
}

// Updates one element and returns the new weight.
template <class A>
static inline A update(A weight, A* exp_avg, A* exp_avg_sq, A* gradient, const AdamwScalars<A>& s) {
  const A g = *gradient * s.gradient_scale;
  const A m = s.beta1 * *exp_avg + s.one_minus_beta1 * g;
  const A v = s.beta2 * *exp_avg_sq + s.one_minus_beta2 * (g * g);
  *exp_avg = m;
  *exp_avg_sq = v;
  *gradient = 0;
  return weight * s.decay - s.step_size * m / (square_root(v * s.inverse_variance) + s.eps);
}

template <class T, class A>
void adamw_elements(T* __restrict__ value, A* __restrict__ master, A* __restrict__ exp_avg,
                    A* __restrict__ exp_avg_sq, A* __restrict__ gradient, int64_t size,
                    const AdamwScalars<A>& scalars) {
  const AdamwScalars<A> s = scalars;  // a local copy: stores cannot alias it, so it stays in registers
  if (master == nullptr) {
    for (int64_t i = 0; i < size; ++i)
      store(value + i, update<A>(load(value + i), exp_avg + i, exp_avg_sq + i, gradient + i, s));
  } else {
    for (int64_t i = 0; i < size; ++i) {
      const A weight = update<A>(master[i], exp_avg + i, exp_avg_sq + i, gradient + i, s);
      master[i] = weight;
      store(value + i, weight);
    }
  }
}

#define INSTANTIATE(T, A) \
  template void adamw_elements<T, A>(T*, A*, A*, A*, A*, int64_t, const AdamwScalars<A>&);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

template <class T>
void sum_of_squares_block(double* sum, const T* x, int64_t size) {
  double total = 0;
  for (int64_t i = 0; i < size; ++i) {
    const double x_i = static_cast<double>(load(x + i));
    total += x_i * x_i;
  }
  *sum = total;
}

template void sum_of_squares_block<float>(double*, const float*, int64_t);
template void sum_of_squares_block<BFloat16Bits>(double*, const BFloat16Bits*, int64_t);
template void sum_of_squares_block<double>(double*, const double*, int64_t);

}  // namespace bough::BOUGH_ISA
