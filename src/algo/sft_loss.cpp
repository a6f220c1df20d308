#include "algo/sft_loss.h"

#include "algo/metric_reader.h"

namespace bough {

LossOutput SftLoss::operator()(const LossRows& rows) const {
  check_rows(*this, rows);
  const at::Tensor weighted_R = rows.weights_R.mul(rows.log_probs_R).neg();
  MetricReader metrics;
  metrics.add_sum("loss/nll", weighted_R.detach());
  LossOutput output{.loss = weighted_R.sum()};
  output.add_metrics(std::move(metrics));
  return output;
}

}  // namespace bough
