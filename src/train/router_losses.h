// Losses of a mixture's routers, in addition to the policy's loss: a load-balancing loss and a z-loss
// (docs/moe.md, "Losses of the routers").
//
//   aux = E · sum_e f[e] · P[e]      as load_balancing_loss_func() of transformers (modeling_mixtral.py)
//   f[e] = mean over (t, l) of the number of choices of e (0 or 1)     a constant in backward
//   P[e] = mean over (t, l) of p[t,l,e], p = softmax(logits)
//   z   = mean over (t, l) of (log sum_e exp(logits[t,l,e]))^2        ST-MoE (arXiv 2202.08906), eq. 5
//
// t: tokens of the flat batch, each sequence up to its last trained token. Later tokens change no
// log-probability, and plans need not compute them. l: layers with experts. A shared token counts once for
// each sequence that has it. So the losses depend neither on the plan nor on the number of ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "models/config.h"
#include "plan/plan.h"
#include "train/make_batch.h"

namespace bough {

// Sums over (t, l) in the passes of a plan execution, on the model's device. Undefined before the first pass.
struct RouterSums {
  at::Tensor choices_E;        // int64
  at::Tensor probabilities_E;  // accumulator type
  at::Tensor squares;          // of the z-loss, accumulator type, one element
};

// The losses of one pass.
struct RouterLosses {
  RouterLossSettings coefficients;
  double scale = 0;            // 1 / (number of (t, l) in the whole batch)
  at::Tensor shares_E;         // f, accumulator type; undefined: backward does not need it
  at::Tensor counts_T;         // int64: of flat_counts()
  RouterSums* sums = nullptr;  // nullptr if the pass is not counted. Not owned

  // Adds a layer's tokens to `sums`. logits_TE: without a graph. experts_TK: those that the tokens use.
  void count(const at::Tensor& logits_TE, const at::Tensor& experts_TK) const;
  // Returns an empty tensor. If it is a root of backward, the gradient of the losses is added to that of
  // logits_TE. This object must outlive backward.
  at::Tensor anchor(const at::Tensor& logits_TE) const;
};

// By tree token: the number of sequences that have the token at or before their last trained token.
std::vector<int64_t> flat_counts(const PlannedTree& planned, const TrainBatch& batch);
// 1 / (number of (t, l) of the batch): the factor from sums to means.
double router_loss_scale(const ModelConfig& config, const TrainBatch& batch);

// Throws UserError if a coefficient has no effect: the model has no experts, or each token uses all of them.
// prefix: of the settings' names, for example "actor.".
void check_router_losses(const std::string& prefix, const RouterLossSettings& settings,
                         const ModelConfig& config);

}  // namespace bough
