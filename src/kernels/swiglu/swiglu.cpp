#include "kernels/swiglu/swiglu.h"

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/common/op.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("swiglu_forward(Tensor gate_up) -> Tensor");
  m.def("swiglu_backward(Tensor d_y, Tensor gate_up) -> Tensor");
}

namespace bough {

namespace {
struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate_up) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = find_op<at::Tensor(const at::Tensor&)>("bough::swiglu_forward");
    context->save_for_backward({gate_up});
    return op.call(gate_up);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    static const auto op =
        find_op<at::Tensor(const at::Tensor&, const at::Tensor&)>("bough::swiglu_backward");
    return {op.call(d_outputs[0].contiguous(), context->get_saved_variables()[0])};
  }
};
}  // namespace

at::Tensor swiglu(const at::Tensor& gate_up_TF2) {
  BOUGH_CHECK(gate_up_TF2.dim() == 2 && gate_up_TF2.is_contiguous() && gate_up_TF2.size(1) % 2 == 0,
              "swiglu: gate_up ", gate_up_TF2.sizes());
  return SwigluFunction::apply(gate_up_TF2);
}

}  // namespace bough
