#include <ATen/ATen.h>

#include "kernels/common/op.h"
#include "kernels/log_prob/log_prob.h"
#include "kernels/parameter.h"

namespace bough {

LogProbOutput log_prob_forward_reference(const at::Tensor& logits_RV, const at::Tensor& labels_R,
                                         double temperature) {
  const auto z = logits_RV.to(accumulator_type(logits_RV.scalar_type())) / temperature;
  const auto lse = z.logsumexp(-1);
  const auto log_probs = z.gather(-1, labels_R.unsqueeze(-1)).squeeze(-1) - lse;
  const auto entropies = lse - ((z - lse.unsqueeze(-1)).exp() * z).sum(-1);
  return {log_probs, lse, entropies};
}

void log_prob_backward_reference_(const at::Tensor& logits_RV, const at::Tensor& labels_R,
                                  const LogProbOutput& output, const at::Tensor& d_log_probs_R,
                                  const at::Tensor& d_entropies_R, double temperature) {
  const auto log_p =
      logits_RV.to(accumulator_type(logits_RV.scalar_type())) / temperature - output.lse_R.unsqueeze(-1);
  const auto p = log_p.exp();
  auto d = -p * (d_log_probs_R.unsqueeze(-1) +
                 d_entropies_R.unsqueeze(-1) * (log_p + output.entropies_R.unsqueeze(-1)));
  d.scatter_add_(-1, labels_R.unsqueeze(-1), d_log_probs_R.unsqueeze(-1));
  logits_RV.copy_(d / temperature);
}

namespace {
std::tuple<at::Tensor, at::Tensor, at::Tensor> log_prob_forward_op(const at::Tensor& logits,
                                                                   const at::Tensor& labels,
                                                                   double temperature) {
  auto out = log_prob_forward_reference(logits, labels, temperature);
  return {out.log_probs_R, out.lse_R, out.entropies_R};
}

void log_prob_backward_op(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& lse,
                          const at::Tensor& entropies, const at::Tensor& d_log_probs,
                          const at::Tensor& d_entropies, double temperature) {
  log_prob_backward_reference_(logits, labels, {{}, lse, entropies}, d_log_probs, d_entropies, temperature);
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("log_prob_forward", TORCH_FN(bough::log_prob_forward_op));
  m.impl("log_prob_backward_", TORCH_FN(bough::log_prob_backward_op));
}
