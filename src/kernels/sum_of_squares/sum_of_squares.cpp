#include "kernels/sum_of_squares/sum_of_squares.h"

#include "base/error.h"
#include "kernels/common/op.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("sum_of_squares(Tensor x) -> Tensor");
}

namespace bough {

at::Tensor sum_of_squares(const at::Tensor& x) {
  BOUGH_CHECK(x.is_contiguous() && x.is_floating_point(), "sum_of_squares: x ", x.sizes(), " ",
              x.scalar_type());
  static const auto op = find_op<at::Tensor(const at::Tensor&)>("bough::sum_of_squares");
  return op.call(x);
}

}  // namespace bough
