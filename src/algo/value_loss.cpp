#include "algo/value_loss.h"

#include <ATen/ATen.h>

#include <utility>

#include "base/error.h"

namespace bough {

ValueLoss value_loss(const ValueRows& rows, std::optional<double> eps_clip) {
  const auto& values_R = rows.values_R;
  for (const at::Tensor* field : {&rows.old_values_R, &rows.returns_R, &rows.weights_R})
    BOUGH_CHECK(field->defined() && field->sizes() == values_R.sizes() &&
                    field->scalar_type() == values_R.scalar_type(),
                "rows of ", values_R.sizes());
  const auto error_R = values_R - rows.returns_R;
  auto squares_R = error_R.square();
  at::Tensor is_cut_R = at::zeros_like(values_R, values_R.options().dtype(at::kBool));
  if (eps_clip) {
    const auto clipped_R =
        at::min(at::max(values_R, rows.old_values_R - *eps_clip), rows.old_values_R + *eps_clip);
    const auto clipped_squares_R = (clipped_R - rows.returns_R).square();
    is_cut_R = clipped_squares_R > squares_R;
    squares_R = at::where(is_cut_R, clipped_squares_R, squares_R);
  }
  ValueLoss out;
  const auto loss_R = rows.weights_R * squares_R * 0.5;
  out.output.loss = loss_R.sum();
  out.d_values_R = (rows.weights_R * error_R).masked_fill(is_cut_R, 0);
  MetricReader reader;
  reader.add_sum("critic/loss", loss_R);
  reader.add_mean("critic/clip_fraction", is_cut_R);
  out.output.add_metrics(std::move(reader));
  return out;
}

double explained_variance(const at::Tensor& values_R, const at::Tensor& returns_R) {
  if (returns_R.numel() == 0) return 0;
  const auto variance = [](const at::Tensor& x) { return (x - x.mean()).square().mean().item<double>(); };
  const auto returns = returns_R.to(at::kDouble);
  if (returns.min().equal(returns.max())) return 0;
  return 1 - variance(returns - values_R.to(at::kDouble)) / variance(returns);
}

}  // namespace bough
