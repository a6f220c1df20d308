#include <optional>

#include "kernels/adamw/adamw_scalars.h"
#include "kernels/common/dispatch.h"
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
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("adamw_", TORCH_FN(bough::adamw_cpu));
}
