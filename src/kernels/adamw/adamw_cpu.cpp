#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "kernels/adamw/adamw.h"
#include "kernels/adamw/adamw_isa.h"
#include "kernels/common/op.h"

namespace bough {

namespace {
void adamw_cpu(const at::Tensor& value, const std::optional<at::Tensor>& master, const at::Tensor& exp_avg,
               const at::Tensor& exp_avg_sq, const at::Tensor& gradient, double lr, double beta1,
               double beta2, double eps, double weight_decay, double gradient_scale, int64_t step) {
  dispatch_float_types(value.scalar_type(), "adamw", [&]<class T>() {
    using A = AccOf<T>;
    const auto scalars = adamw_scalars<A>({lr, beta1, beta2, eps, weight_decay, gradient_scale, step});
    T* value_data = mutable_data<T>(value);
    A* master_data = master ? mutable_data<A>(*master) : nullptr;
    A* exp_avg_data = mutable_data<A>(exp_avg);
    A* exp_avg_sq_data = mutable_data<A>(exp_avg_sq);
    A* gradient_data = mutable_data<A>(gradient);
    at::parallel_for(0, value.numel(), grain(1), [&](int64_t begin, int64_t end) {
      BOUGH_ISA_CALL(adamw_elements, value_data + begin, master_data ? master_data + begin : nullptr,
                     exp_avg_data + begin, exp_avg_sq_data + begin, gradient_data + begin, end - begin,
                     scalars);
    });
  });
}

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
  m.impl("adamw_", TORCH_FN(bough::adamw_cpu));
  m.impl("sum_of_squares", TORCH_FN(bough::sum_of_squares_cpu));
}
