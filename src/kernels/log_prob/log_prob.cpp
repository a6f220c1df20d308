#include "kernels/log_prob/log_prob.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/parameter.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("log_prob_forward(Tensor logits, Tensor labels, float temperature) -> (Tensor, Tensor, Tensor)");
  m.def(
      "log_prob_backward_(Tensor(a!) logits, Tensor labels, Tensor lse, Tensor entropies, Tensor "
      "d_log_probs, "
      "Tensor d_entropies, float temperature) -> ()");
  m.def("draw_token(Tensor logits, Tensor requests) -> Tensor");
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

LogProbOutput merge_columns(const LogProbOutput& parts_SR) {
  const auto lse_R = parts_SR.lse_R.logsumexp(0);
  const auto log_weights_SR = parts_SR.lse_R - lse_R;
  const auto entropies_R = (log_weights_SR.exp() * (parts_SR.entropies_R - log_weights_SR)).sum(0);
  return {(parts_SR.log_probs_R + log_weights_SR).amax(0), lse_R, entropies_R};
}

TopLogProbs top_log_probs(T logits_RV, T lse_R, int64_t k, double temperature) {
  const auto [values_RK, ids_RK] = logits_RV.topk(std::min(k, logits_RV.size(1)), -1);
  return {ids_RK, values_RK.to(lse_R.scalar_type()).div(temperature).sub(lse_R.unsqueeze(1))};
}

at::Tensor top_k_log_probs(T logits_RV, T lse_R, T rows_L, T ids_LK, double temperature) {
  const auto z_LK = logits_RV.index({rows_L.unsqueeze(1), ids_LK.clamp_min(0)});
  return z_LK.to(lse_R.scalar_type())
      .div(temperature)
      .sub(lse_R.index_select(0, rows_L).unsqueeze(1))
      .masked_fill(ids_LK < 0, 0);
}

void add_top_k_gradient_(T d_logits_RV, T labels_R, T rows_L, T ids_LK, T d_top_k_LK, double temperature) {
  const auto d_LK = d_top_k_LK.div(temperature);
  const auto ids = at::cat({ids_LK, labels_R.index_select(0, rows_L).unsqueeze(1)}, 1);
  const auto d = at::cat({d_LK, d_LK.sum(1, /*keepdim=*/true).neg()}, 1).masked_fill(ids < 0, 0);
  d_logits_RV.index_put_({rows_L.unsqueeze(1), ids.clamp_min(0)}, d.to(d_logits_RV.scalar_type()),
                         /*accumulate=*/true);
}

LogProbOutput log_prob_forward_reference(const at::Tensor& logits_RV, const at::Tensor& labels_R,
                                         double temperature) {
  const auto z = logits_RV.to(accumulator_type(logits_RV.scalar_type())) / temperature;
  const auto lse = z.logsumexp(-1);
  const auto log_probs = (z.gather(-1, labels_R.clamp_min(0).unsqueeze(-1)).squeeze(-1) - lse)
                             .masked_fill(labels_R < 0, -std::numeric_limits<double>::infinity());
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
  d.scatter_add_(-1, labels_R.clamp_min(0).unsqueeze(-1),
                 d_log_probs_R.masked_fill(labels_R < 0, 0).unsqueeze(-1));
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

at::Tensor draw_token_op(const at::Tensor& logits_RV, const at::Tensor& requests) {
  const auto number = [&](DrawNumber which) { return requests.select(1, which).unsqueeze(1); };
  const auto x_DV = logits_RV.index_select(0, number(kDrawRow).view(-1).to(at::kLong))
                        .to(accumulator_type(logits_RV.scalar_type()));
  const auto largest_D1 = x_DV.amax(1, /*keepdim=*/true), below_DV = x_DV - largest_D1;
  const auto weights_DV = below_DV.div(number(kDrawTemperature).to(x_DV.scalar_type())).exp().to(at::kDouble);
  const auto up_to_DV = weights_DV.cumsum(1), sum_D1 = up_to_DV.narrow(1, up_to_DV.size(1) - 1, 1);
  const auto ids_V = at::arange(x_DV.size(1), requests.options().dtype(at::kLong));
  const auto first_where = [&](const at::Tensor& is_one_DV) {
    return ids_V.expand_as(x_DV).masked_fill(is_one_DV.logical_not(), x_DV.size(1)).amin(1, true);
  };
  // Rounding may leave the uniform number beyond all weights. Then the last positive weight is chosen.
  const auto last_D1 = ids_V.expand_as(x_DV).masked_fill(weights_DV.le(0), 0).amax(1, true);
  const auto drawn_D1 = at::minimum(first_where(up_to_DV.gt(number(kDrawUniform) * sum_D1)), last_D1);
  const auto token_D1 =
      at::where(number(kDrawGreedy).eq(1), first_where(below_DV.eq(0)).clamp_max(x_DV.size(1) - 1), drawn_D1);
  return at::cat({token_D1.to(at::kDouble), x_DV.gather(1, token_D1).to(at::kDouble),
                  largest_D1.to(at::kDouble), below_DV.exp().sum(1, true, at::kDouble), sum_D1},
                 1);
}
}  // namespace

at::Tensor draw_token(const at::Tensor& logits_RV, const at::Tensor& requests) {
  static const auto op = find_op<at::Tensor(const at::Tensor&, const at::Tensor&)>("bough::draw_token");
  BOUGH_CHECK(logits_RV.dim() == 2 && logits_RV.size(1) > 0 && requests.dim() == 2 &&
                  requests.size(1) == kDrawNumbers && requests.scalar_type() == at::kDouble,
              "draw_token: logits ", logits_RV.sizes(), ", requests ", requests.sizes(), " ",
              requests.scalar_type());
  return op.call(logits_RV, requests);
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("log_prob_forward", TORCH_FN(bough::log_prob_forward_op));
  m.impl("log_prob_backward_", TORCH_FN(bough::log_prob_backward_op));
  m.impl("draw_token", TORCH_FN(bough::draw_token_op));
}
