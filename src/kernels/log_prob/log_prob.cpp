#include "kernels/log_prob/log_prob.h"

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/parameter.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("log_prob_forward(Tensor logits, Tensor labels, float temperature) -> (Tensor, Tensor, Tensor)");
  m.def(
      "log_prob_backward_(Tensor(a!) logits, Tensor labels, Tensor lse, Tensor entropies, Tensor "
      "d_log_probs, "
      "Tensor d_entropies, float temperature) -> ()");
}

namespace bough {

namespace {
using T = const at::Tensor&;

void check(T logits, T labels, double temperature) {
  BOUGH_CHECK(logits.dim() == 2 && logits.is_contiguous() && labels.dim() == 1 &&
                  labels.size(0) == logits.size(0) && labels.scalar_type() == at::kLong && temperature > 0,
              "log_prob: logits ", logits.sizes(), ", labels ", labels.sizes(), " ", labels.scalar_type(),
              ", temperature ", temperature);
}
}  // namespace

LogProbOutput log_prob_forward(T logits_RV, T labels_R, double temperature) {
  check(logits_RV, labels_R, temperature);
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op =
      find_op<std::tuple<at::Tensor, at::Tensor, at::Tensor>(T, T, double)>("bough::log_prob_forward");
  auto [log_probs, lse, entropies] = op.call(logits_RV, labels_R, temperature);
  return {log_probs, lse, entropies};
}

void log_prob_backward_(T logits_RV, T labels_R, const LogProbOutput& output, T d_log_probs_R,
                        T d_entropies_R, double temperature) {
  check(logits_RV, labels_R, temperature);
  const auto acc = accumulator_type(logits_RV.scalar_type());
  for (T row : {output.lse_R, output.entropies_R, d_log_probs_R, d_entropies_R})
    BOUGH_CHECK(row.sizes() == labels_R.sizes() && row.scalar_type() == acc && row.is_contiguous(),
                "log_prob: a row tensor is ", row.sizes(), " ", row.scalar_type());
  at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op = find_op<void(T, T, T, T, T, T, double)>("bough::log_prob_backward_");
  op.call(logits_RV, labels_R, output.lse_R, output.entropies_R, d_log_probs_R, d_entropies_R, temperature);
}

}  // namespace bough
