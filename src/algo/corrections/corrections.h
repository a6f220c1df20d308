// Corrections for the mismatch between the engine's policy mu and pi_old: factors of the policy term (not of
// KL or entropy, and never inside a clip), made of w = pi_old / mu without a gradient. Tokens that one sets
// to 0 stay in the denominator. Adding one: a file in this folder that defines NAME_correction(), with its
// equation and source at the top, and a line in the list below.
//
// correction: auto is `rejection_sampling` where its settings say anything, else `cap` with the decoupled
// loss, else none. Explicitly named, one takes the place of the decoupled loss's own, never on top of it.
// Masks (off_policy_mask_threshold, m2_threshold) come on top of any.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "algo/losses/policy_terms.h"
#include "algo/policy_rows.h"

namespace bough {

struct Corrected {
  at::Tensor factor_R;     // 0 or more; no gradient
  at::Tensor truncated_R;  // bool: rows whose weight was cut, not masked; undefined where none is
  std::vector<std::pair<std::string, at::Tensor>> means = {};  // metrics: the mean over the rows of each
};

struct CorrectionKind {
  Couples couples = Couples::kNothing;  // kSequence reads `sequences`
  WeightBounds bounds = {};             // where it has some
  bool reads_given = false;             // needs the engine's most likely tokens
  Corrected (*apply)(const CorrectionRows& rows) = nullptr;
};

// Every name of the setting `correction`, beside auto and none.
#define BOUGH_CORRECTIONS(X) \
  X(cap)                     \
  X(tis)                     \
  X(icepop)                  \
  X(masked_is)               \
  X(rejection)               \
  X(obrs)

// Those with settings of their own.
#define BOUGH_OTHER_CORRECTIONS(X) \
  X(rejection_sampling)            \
  X(off_policy_mask)               \
  X(m2po)

#define BOUGH_DECLARE_CORRECTION(name) CorrectionKind name##_correction(const LossSettings& settings);
BOUGH_CORRECTIONS(BOUGH_DECLARE_CORRECTION)
BOUGH_OTHER_CORRECTIONS(BOUGH_DECLARE_CORRECTION)
#undef BOUGH_DECLARE_CORRECTION

// What `settings` ask for; their factors multiply. `against`: what the loss's ratio is of. UserError:
// settings that contradict each other.
std::vector<CorrectionKind> find_corrections(const LossSettings& settings, Against against);

// log w at the level that settings.correction_level names: the token's own; the sequence's product; its
// geometric mean. [R], clamped.
at::Tensor log_weight_at_level(const CorrectionRows& rows);
// 0 on every row of a sequence that has a token with w < settings.correction_veto, else 1.
at::Tensor veto_factor(const CorrectionRows& rows);

// The bounds in force: the settings' where set, else the correction's own at this level. UserError: no weight
// is between them.
WeightBounds weight_bounds(const LossSettings& settings, WeightBounds token, WeightBounds geometric);

}  // namespace bough
