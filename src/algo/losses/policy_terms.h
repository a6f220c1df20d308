// The policy losses by name. Adding one: a file in this folder that defines NAME_term(), with its equation
// and source at the top, and a line in the list below. What all share (pi_old, corrections, KL, entropy,
// metrics) is PolicyLoss's (algo/policy_loss.h).
#pragma once

#include <span>

#include "algo/policy_rows.h"

namespace bough {

// What the ratio r is of.
enum class Against {
  kNothing,    // the loss has none
  kOld,        // r = pi / pi_old
  kBehaviour,  // r = pi / mu: the loss corrects for mu by itself
};

struct PolicyTermKind {
  Against against = Against::kOld;
  Couples couples = Couples::kNothing;     // kSequence reads `sequences`
  const char* aggregation = "token_mean";  // where loss_aggregation is auto
  double eps_low = 0.2, eps_high = 0.2;    // where eps_clip and eps_clip_higher are not set
  bool has_dual_clip = false;              // reads c_clip
  PolicyTerm (*term)(const PolicyRows& rows) = nullptr;
};

// Every name: LossSettings::loss, docs/algorithms.md.
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

// PPO's: -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A).
PolicyTerm clipped_surrogate(const at::Tensor& ratio_R, const PolicyRows& rows);

}  // namespace bough
