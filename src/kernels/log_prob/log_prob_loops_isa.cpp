#include "kernels/common/element.h"
#include "kernels/common/exp.h"
#include "kernels/log_prob/log_prob_loops.h"

namespace bough::BOUGH_ISA {

template <class T, class A>
void log_prob_backward_row(T* logits, int64_t width, A inverse_temperature, A lse, A entropy, A d_log_prob,
                           A d_entropy) {
#pragma GCC ivdep
  for (int64_t v = 0; v < width; ++v) {
    const A log_p = load(logits + v) * inverse_temperature - lse;
    const A p = vector_exp(log_p);
    store(logits + v, -p * (d_log_prob + d_entropy * (log_p + entropy)) * inverse_temperature);
  }
}

#define INSTANTIATE(T, A) template void log_prob_backward_row<T, A>(T*, int64_t, A, A, A, A, A);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough::BOUGH_ISA
