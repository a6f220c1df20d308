#include <ATen/ATen.h>

#include "kernels/common/op.h"
#include "kernels/sum_of_squares/sum_of_squares.h"

namespace bough {

at::Tensor sum_of_squares_reference(const at::Tensor& x) {
  return x.to(at::kDouble).square().sum();
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("sum_of_squares", TORCH_FN(bough::sum_of_squares_reference));
}
