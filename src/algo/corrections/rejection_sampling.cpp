// AReaL's rejection_sampling {level, action, metric, agg, lower, upper}. A token's metric is one of:
//   ratio  w
//   kl_k1  log w
//   kl_k2  (log w)^2 / 2
//   kl_k3  w - 1 - log w
// At level sequence the metric is the sum, mean or maximum over the sequence's trained tokens. The metric
// `ratio` is then exp of the aggregate of log w, and w below is the sequence's geometric mean. The action is:
//   mask   w if lower <= metric <= upper, else 0
//   clamp  w, clamped to [lower (0 if not set), upper]. At level sequence this happens only if the metric is
//          outside these bounds
#include <ATen/ops/where.h>

#include "algo/corrections/corrections.h"

namespace bough {

namespace {

at::Tensor token_metric(const std::string& name, const at::Tensor& log_w_R) {
  if (name == "kl_k2") return log_w_R.square().mul(0.5);
  if (name == "kl_k3") return log_w_R.expm1().sub(log_w_R);
  return log_w_R;  // k1; for `ratio`, the logarithm of w
}

at::Tensor aggregate(const std::string& how, const Sequences& sequences, const at::Tensor& x_R) {
  const at::Tensor x_S = how == "sum"    ? sequences.sum(x_R)
                         : how == "mean" ? sequences.mean(x_R)
                                         : sequences.largest(x_R);
  return sequences.to_rows(x_S);
}

Corrected reject_or_clamp(const CorrectionRows& rows) {
  const RejectionSampling& settings = rows.settings.rejection_sampling;
  const bool by_ratio = settings.metric == "ratio", by_sequence = settings.level == "sequence";
  at::Tensor metric_R = token_metric(settings.metric, rows.log_w_R);
  at::Tensor log_w_R = rows.log_w_R;
  if (by_sequence) {
    metric_R = aggregate(settings.agg, *rows.sequences, metric_R);
    if (by_ratio) log_w_R = rows.sequences->to_rows(rows.sequences->mean(rows.log_w_R));
  }
  if (by_ratio) metric_R = metric_R.clamp(-kMaxLogRatio, kMaxLogRatio).exp();
  const at::Tensor w_R = log_w_R.exp();
  at::Tensor outside_R = metric_R.gt(settings.upper);
  if (settings.lower) outside_R = outside_R.logical_or(metric_R.lt(*settings.lower));
  if (settings.action == "mask") return {w_R.masked_fill(outside_R, 0.0), {}};
  const at::Tensor clamped_R =
      at::where(outside_R, w_R.clamp(settings.lower.value_or(0.0), settings.upper), w_R);
  return {clamped_R, clamped_R.ne(w_R)};
}

}  // namespace

CorrectionKind rejection_sampling_correction(const LossSettings& settings) {
  return {.coupling = settings.rejection_sampling.level == "sequence" ? CouplingScope::kSequence
                                                                      : CouplingScope::kNothing,
          .apply = reject_or_clamp};
}

}  // namespace bough
