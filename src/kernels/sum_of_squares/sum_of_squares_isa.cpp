#include "kernels/sum_of_squares/sum_of_squares_isa.h"

#include "kernels/common/element.h"

namespace bough::BOUGH_ISA {

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
