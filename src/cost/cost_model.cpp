#include "cost/cost_model.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "kernels/log_prob/log_prob_cost.h"
#include "kernels/tree_attention/tree_attention_cost.h"

namespace bough {

CostModel::CostModel(DeviceProfile device, ModelShape shape)
    : device_(std::move(device)), shape_(std::move(shape)) {
  device_.check_integrity();
  const int64_t bytes = device_.dtype == "bf16" ? 2 : device_.dtype == "fp32" ? 4 : 8;
  BOUGH_CHECK(shape_.element_bytes == bytes, "model shape ", shape_.name, " has elements of ",
              shape_.element_bytes, " bytes, but the profile of ", device_.name, " is for ", device_.dtype);
}

double CostModel::attention_seconds(const PassShape& pass, bool backward) const {
  if (pass.tokens == 0) return 0;
  const auto& cost = backward ? device_.attention_backward : device_.attention_forward;
  const int64_t stack_pairs =
      pass.stack_pairs >= 0 ? pass.stack_pairs : std::min(pass.pairs, pass.tokens * pass.stack_rows);
  const auto tokens = static_cast<double>(pass.tokens);
  const AttentionPass attention{pass.tokens, static_cast<double>(stack_pairs) / tokens,
                                static_cast<double>(pass.pairs - stack_pairs) / tokens, pass.pieces,
                                shape_.num_kv_heads};
  const int64_t rows = attention_rows(device_.kernels.attention, pass.tokens);
  const double keys = attention_work(device_.kernels, attention) / static_cast<double>(rows) +
                      cost.overhead_keys.clamped(rows);
  const double flops_per_key = shape_.flops_per_pair() + cost.score_flops * shape_.scores_per_pair();
  return keys * flops_per_key * cost.by_queries.at(rows);
}

double CostModel::attention_forward_seconds(const PassShape& pass) const {
  return attention_seconds(pass, /*backward=*/false);
}

double CostModel::attention_backward_seconds(const PassShape& pass) const {
  return attention_seconds(pass, /*backward=*/true);
}

double CostModel::linear_seconds(const CostCurve& curve, int64_t tokens, double flops,
                                 double of_experts) const {
  if (of_experts == 0) return flops * curve.at(tokens);
  const double used = shape_.distinct_experts(tokens), chosen = static_cast<double>(shape_.experts_per_token);
  const auto rows = static_cast<int64_t>(std::ceil(static_cast<double>(tokens) * chosen / used));
  return (flops - of_experts) * curve.at(tokens) + of_experts / chosen * used * curve.at(rows);
}

double CostModel::layers_seconds(const PassShape& pass, bool backward, double left_out) const {
  if (pass.tokens == 0) return 0;
  const CostCurve& linear = backward ? device_.linear_backward : device_.linear_forward;
  const CostCurve& elementwise = backward ? device_.elementwise_backward : device_.elementwise_forward;
  const double flops = backward ? shape_.trained_linear_flops_per_token() : shape_.linear_flops_per_token();
  // Backward of frozen experts takes one product instead of two.
  const double of_experts = shape_.expert_flops_per_token() * (backward && shape_.is_frozen() ? 0.5 : 1);
  const double work = linear_seconds(linear, pass.tokens, flops, of_experts) +
                      shape_.elements_per_token() * elementwise.at(pass.tokens) +
                      attention_seconds(pass, backward) - left_out;
  const double constant =
      static_cast<double>(shape_.num_layers) *
          (backward ? device_.seconds_per_layer_backward : device_.seconds_per_layer_forward) +
      (backward ? device_.seconds_per_pass_backward : device_.seconds_per_pass_forward);
  return device_.launches_overlap ? std::max(work, constant) : work + constant;
}

double CostModel::forward_seconds(const PassShape& pass) const {
  return layers_seconds(pass, /*backward=*/false);
}

double CostModel::backward_seconds(const PassShape& pass) const {
  return layers_seconds(pass, /*backward=*/true);
}

double CostModel::recompute_seconds(const PassShape& pass, RecomputePolicy keep) const {
  if (keep == RecomputePolicy::kActivations || pass.tokens == 0) return 0;
  double left_out = 0;
  if (keep == RecomputePolicy::kAttention || keep == RecomputePolicy::kLayerInputsAndAttention)
    left_out += attention_forward_seconds(pass);
  // Recomputation of a layer stops before the layer's last product, unless a post-norm reads its result.
  if (recomputes_layers(keep) && !shape_.post_norms)
    left_out += linear_seconds(device_.linear_forward, pass.tokens, shape_.last_flops_per_token(),
                               shape_.last_expert_flops_per_token());
  const double seconds = layers_seconds(pass, /*backward=*/false, left_out);
  if (keep != RecomputePolicy::kLayerInputsOnHost) return seconds;
  // The copy to the host overlaps the forward pass. The copy back overlaps the recomputation and the backward
  // pass.
  const double rate = device_.host_bytes_per_s > 0 ? device_.host_bytes_per_s : kAssumedHostBytesPerS;
  const double copy = static_cast<double>(pass.tokens * bytes().copied_to_host()) / rate;
  return seconds + std::max(0.0, copy - forward_seconds(pass)) +
         std::max(0.0, copy - seconds - backward_seconds(pass));
}

double CostModel::head_seconds_per_flop(const CostCurve& curve, int64_t rows) const {
  const int64_t chunk = head_chunk_rows(shape_.vocab_size, device_.kernels.on_gpu());
  const int64_t whole = rows / chunk;
  double seconds = static_cast<double>(whole) * curve.at(chunk);
  if (rows % chunk > 0) seconds += curve.at(rows % chunk);
  return seconds;
}

double CostModel::head_forward_seconds(const PassShape& pass) const {
  return head_seconds_per_flop(device_.head_forward, pass.head_rows) * shape_.flops_per_head_row();
}

double CostModel::head_backward_seconds(const PassShape& pass) const {
  return head_seconds_per_flop(device_.head_backward, pass.head_rows) * shape_.trained_flops_per_head_row();
}

}  // namespace bough
