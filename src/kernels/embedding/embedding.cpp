#include "kernels/embedding/embedding.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/common/op.h"
#include "kernels/embedding/embedding_loops.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("add_embedding_gradient_(Tensor(a!) sums, Tensor tokens, Tensor rows) -> ()");
}

namespace bough {

namespace {
struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& root, const at::Tensor& tokens,
                            const Parameter& weight, double scale) {
    at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({tokens});
    context->saved_data["main_grad"] = weight.main_grad;
    context->saved_data["scale"] = scale;
    auto rows_TD = at::index_select(weight.value, 0, tokens);
    return scale == 1 ? rows_TD : rows_TD.mul_(scale);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto main_grad = context->saved_data["main_grad"].toTensor();
    if (!main_grad.defined()) return {{}, {}, {}, {}};  // the weight is frozen
    const double scale = context->saved_data["scale"].toDouble();
    auto rows_TD = d_outputs[0].contiguous();
    if (scale != 1) rows_TD = rows_TD.to(main_grad.scalar_type()) * scale;
    add_embedding_gradient_(main_grad, context->get_saved_variables()[0], rows_TD);
    return {{}, {}, {}, {}};
  }
};
}  // namespace

void add_embedding_gradient_(const at::Tensor& sums_VD, const at::Tensor& tokens_T,
                             const at::Tensor& rows_TD) {
  BOUGH_CHECK(sums_VD.dim() == 2 && rows_TD.dim() == 2 && sums_VD.size(1) == rows_TD.size(1) &&
                  sums_VD.is_contiguous() && rows_TD.is_contiguous() && tokens_T.is_contiguous() &&
                  tokens_T.scalar_type() == at::kLong && tokens_T.numel() == rows_TD.size(0) &&
                  sums_VD.scalar_type() == accumulator_type(rows_TD.scalar_type()),
              "add_embedding_gradient_: sums ", sums_VD.sizes(), " ", sums_VD.scalar_type(), ", tokens ",
              tokens_T.sizes(), ", rows ", rows_TD.sizes(), " ", rows_TD.scalar_type());
  static const auto op = find_op<void(const at::Tensor&, const at::Tensor&, const at::Tensor&)>(
      "bough::add_embedding_gradient_");
  op.call(sums_VD, tokens_T, rows_TD);
}

at::Tensor embedding(const at::Tensor& tokens_T, const Parameter& weight, double scale) {
  BOUGH_CHECK(tokens_T.dim() == 1 && tokens_T.scalar_type() == at::kLong && weight.value.dim() == 2,
              "embedding: tokens ", tokens_T.sizes(), " ", tokens_T.scalar_type(), ", weight ",
              weight.value.sizes());
  const auto type = weight.value.scalar_type();
  if (type == at::kFloat) scale = static_cast<float>(scale);
  if (type == at::kBFloat16) scale = static_cast<float>(at::BFloat16(static_cast<float>(scale)));
  return EmbeddingFunction::apply(graph_root(tokens_T.device()), tokens_T, weight, scale);
}

void add_embedding_gradient_reference_(const at::Tensor& sums_VD, const at::Tensor& tokens_T,
                                       const at::Tensor& rows_TD) {
  at::Tensor(sums_VD).index_add_(0, tokens_T, rows_TD.to(sums_VD.scalar_type()));
}

namespace {
constexpr int64_t kColumns = 64;  // a thread's columns are a multiple of this: whole cache lines

// Each thread processes some columns of all rows, so that a token's rows are added in order without atomics.
void add_embedding_gradient_cpu_(const at::Tensor& sums_VD, const at::Tensor& tokens_T,
                                 const at::Tensor& rows_TD) {
  const int64_t width = rows_TD.size(1), num_rows = rows_TD.size(0);
  dispatch_float_types(rows_TD.scalar_type(), "embedding", [&]<class T>() {
    auto* const sums = mutable_data<AccOf<T>>(sums_VD);
    at::parallel_for(0, (width + kColumns - 1) / kColumns, grain(num_rows * kColumns),
                     [&](int64_t begin, int64_t end) {
                       BOUGH_ISA_CALL(add_rows_of_tokens, sums, data<int64_t>(tokens_T), data<T>(rows_TD),
                                      num_rows, width, begin * kColumns, std::min(width, end * kColumns));
                     });
  });
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("add_embedding_gradient_", TORCH_FN(bough::add_embedding_gradient_reference_));
}

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("add_embedding_gradient_", TORCH_FN(bough::add_embedding_gradient_cpu_));
}
