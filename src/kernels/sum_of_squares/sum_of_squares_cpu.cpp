#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "kernels/common/dispatch.h"
#include "kernels/common/op.h"
#include "kernels/sum_of_squares/sum_of_squares.h"
#include "kernels/sum_of_squares/sum_of_squares_isa.h"

namespace bough {

namespace {
at::Tensor sum_of_squares_cpu(const at::Tensor& x) {
  const int64_t size = x.numel();
  const int64_t num_blocks = (size + kSumOfSquaresBlock - 1) / kSumOfSquaresBlock;
  std::vector<double> sums(static_cast<size_t>(num_blocks));
  dispatch_float_types(x.scalar_type(), "sum_of_squares", [&]<class T>() {
    const T* x_data = data<T>(x);
    at::parallel_for(0, num_blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = block * kSumOfSquaresBlock;
        BOUGH_ISA_CALL(sum_of_squares_block, &sums[static_cast<size_t>(block)], x_data + begin,
                       std::min(kSumOfSquaresBlock, size - begin));
      }
    });
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  const auto result = at::empty({}, at::TensorOptions().dtype(at::kDouble));
  *mutable_data<double>(result) = total;
  return result;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("sum_of_squares", TORCH_FN(bough::sum_of_squares_cpu));
}
