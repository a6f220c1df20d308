// The list of policy losses. To add one, write a file in this folder that defines NAME_term(), with its
// equation and source at the top, and add a line to the list below. PolicyLoss (algo/policy_loss.h) has the
// parts that all policy losses have: pi_old, corrections, KL, entropy and metrics.
#pragma once

#include <span>

#include "algo/policy_rows.h"

namespace bough {

// The denominator of the ratio r.
enum class Against {
  kNothing,    // the loss has no ratio
  kOld,        // r = pi / pi_old
  kBehaviour,  // r = pi / mu: the loss itself corrects for mu
};

struct PolicyTermKind {
  Against against = Against::kOld;
  CouplingScope coupling = CouplingScope::kNothing;  // with kSequence or kBatch, PolicyRows::sequences is set
  const char* aggregation = "token_mean";            // used if loss_aggregation is auto
  double eps_low = 0.2, eps_high = 0.2;              // used if eps_clip and eps_clip_higher are unset
  bool has_dual_clip = false;                        // reads c_clip
  PolicyTerm (*term)(const PolicyRows& rows) = nullptr;
};

// The values of LossSettings::loss besides sft, see docs/algorithms.md.
#define BOUGH_POLICY_LOSSES(X) \
  X(ppo)                       \
  X(pg)                        \
  X(gspo)                      \
  X(gspo_token)                \
  X(cispo)                     \
  X(sapo)                      \
  X(gmpo)                      \
  X(dppo_tv)                   \
  X(dppo_kl)                   \
  X(clip_cov)                  \
  X(kl_cov)

#define BOUGH_DECLARE_POLICY_LOSS(name) PolicyTermKind name##_term();
BOUGH_POLICY_LOSSES(BOUGH_DECLARE_POLICY_LOSS)
#undef BOUGH_DECLARE_POLICY_LOSS

// Returns PPO's clipped term: -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A).
PolicyTerm clipped_surrogate(const at::Tensor& ratio_R, const PolicyRows& rows);

}  // namespace bough
