#include "train/router_losses.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "kernels/common/autograd.h"

namespace bough {

namespace {

void add_to(at::Tensor& sum, const at::Tensor& more) {
  sum = sum.defined() ? sum.add_(more) : more;
}

// Gradients, for a token of weight w = count · scale:
//   d_logits[e] = w · (aux_coef · E · p[e] · (f[e] - sum_i p[i] · f[i]) + z_coef · 2 · lse · p[e])
struct RouterLossFunction : torch::autograd::Function<RouterLossFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits_TE,
                            const RouterLosses* losses) {
    context->save_for_backward({logits_TE});
    context->saved_data["losses"] = reinterpret_cast<int64_t>(losses);  // the pass keeps it
    return at::empty({0}, logits_TE.options());
  }

  static variable_list backward(AutogradContext* context, const variable_list&) {
    const auto& losses = *reinterpret_cast<const RouterLosses*>(context->saved_data["losses"].toInt());
    const at::Tensor logits_TE = context->get_saved_variables()[0];
    const auto [aux_coef, z_coef] = losses.coefficients;
    const at::Tensor p_TE = at::softmax(logits_TE, 1);
    at::Tensor factor_TE = at::zeros_like(p_TE);
    if (aux_coef > 0) {
      const at::Tensor mean_T1 = at::mv(p_TE, losses.shares_E).unsqueeze(1);
      factor_TE.add_(losses.shares_E - mean_T1, aux_coef * static_cast<double>(p_TE.size(1)));
    }
    if (z_coef > 0) factor_TE.add_(at::logsumexp(logits_TE, 1, /*keepdim=*/true), 2 * z_coef);
    const at::Tensor weight_T1 = losses.counts_T.to(p_TE.scalar_type()).mul_(losses.scale).unsqueeze(1);
    return {factor_TE.mul_(p_TE).mul_(weight_T1), {}};
  }
};

}  // namespace

// On a GPU, atomics add in an arbitrary order. Sums of integers do not depend on the order.
void RouterLosses::count(const at::Tensor& logits_TE, const at::Tensor& experts_TK) const {
  if (!sums) return;
  at::Tensor choices_E = at::zeros({logits_TE.size(1)}, counts_T.options());
  choices_E.scatter_add_(0, experts_TK.flatten(), counts_T.repeat_interleave(experts_TK.size(1)));
  add_to(sums->choices_E, choices_E);
  const at::Tensor weights_T = counts_T.to(logits_TE.scalar_type());
  add_to(sums->probabilities_E, at::mv(at::softmax(logits_TE, 1).t(), weights_T));
  add_to(sums->squares, at::dot(at::logsumexp(logits_TE, 1).square(), weights_T));
}

at::Tensor RouterLosses::anchor(const at::Tensor& logits_TE) const {
  BOUGH_CHECK(coefficients.router_aux_loss_coef == 0 || shares_E.defined(),
              "the gradient of a load-balancing loss needs the experts' shares");
  return RouterLossFunction::apply(logits_TE, this);
}

std::vector<int64_t> flat_counts(const PlannedTree& planned, const TrainBatch& batch) {
  const PrefixTree& tree = *planned.tree;
  std::vector<int64_t> counts(static_cast<size_t>(tree.num_tokens()));
  for (size_t i = 0; i < planned.sequences.size(); ++i) {
    const auto& trained = batch.trained_positions[static_cast<size_t>(planned.sequences[i])];
    if (trained.empty()) continue;
    const std::vector<int32_t> path = tree.path(static_cast<int64_t>(i));
    ++counts[static_cast<size_t>(path[static_cast<size_t>(trained.back())])];
  }
  for (size_t t = counts.size(); t-- > 0;)  // a parent has a smaller number than its children
    if (tree.parent[t] >= 0) counts[static_cast<size_t>(tree.parent[t])] += counts[t];
  return counts;
}

double router_loss_scale(const ModelConfig& config, const TrainBatch& batch) {
  int64_t count = 0;
  for (const auto& trained : batch.trained_positions)
    if (!trained.empty()) count += trained.back() + 1;
  return 1.0 / static_cast<double>(std::max<int64_t>(1, count * config.num_sparse_layers()));
}

void check_router_losses(const std::string& prefix, const RouterLossSettings& settings,
                         const ModelConfig& config) {
  const auto refuse = [&](const char* name, double value, const std::string& why) {
    throw UserError(str(prefix, name, ": got ", value, ", but ", why, "; expected 0"));
  };
  if (settings.router_aux_loss_coef > 0 && config.is_mixture() &&
      config.experts_per_token == config.num_experts)
    refuse("router_aux_loss_coef", settings.router_aux_loss_coef,
           "each token uses all experts of this model, so their loads are equal");
  if (config.is_mixture()) return;
  if (settings.router_aux_loss_coef > 0)
    refuse("router_aux_loss_coef", settings.router_aux_loss_coef, "the model has no experts");
  if (settings.router_z_loss_coef > 0)
    refuse("router_z_loss_coef", settings.router_z_loss_coef, "the model has no experts");
}

}  // namespace bough
