#include "kernels/embedding/embedding.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/autograd.h"

namespace bough {

namespace {
struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& root, const at::Tensor& tokens,
                            const Parameter& weight) {
    at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({tokens});
    context->saved_data["main_grad"] = weight.main_grad;
    return at::index_select(weight.value, 0, tokens);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto main_grad = context->saved_data["main_grad"].toTensor();
    main_grad.index_add_(0, context->get_saved_variables()[0], d_outputs[0].to(main_grad.scalar_type()));
    return {{}, {}, {}};
  }
};
}  // namespace

at::Tensor embedding(const at::Tensor& tokens_T, const Parameter& weight) {
  BOUGH_CHECK(tokens_T.dim() == 1 && tokens_T.scalar_type() == at::kLong && weight.value.dim() == 2,
              "embedding: tokens ", tokens_T.sizes(), " ", tokens_T.scalar_type(), ", weight ",
              weight.value.sizes());
  return EmbeddingFunction::apply(graph_root(tokens_T.device()), tokens_T, weight);
}

}  // namespace bough
