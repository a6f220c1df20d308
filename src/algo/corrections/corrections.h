// Corrections for the mismatch between the engine's policy mu and pi_old. A correction is a factor computed
// from w = pi_old / mu, without a gradient. It multiplies the policy term outside of any clip, and neither
// KL nor entropy. Tokens that get 0 stay in the denominator. To add a correction, write a file in this
// folder that defines NAME_correction(), with its equation and source at the top, and add a line to the list
// below.
//
// `correction: auto` selects the first that applies:
//   1. rejection_sampling, if its settings differ from the defaults
//   2. cap, with the decoupled loss
//   3. none
// A correction that is selected by name replaces the decoupled loss's `cap`. Masks
// (off_policy_mask_threshold, m2_threshold) multiply any correction.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "algo/losses/policy_terms.h"
#include "algo/policy_rows.h"

namespace bough {

struct Corrected {
  at::Tensor factor_R;     // 0 or more; no gradient
  at::Tensor truncated_R;  // bool: rows whose weight was clamped, not masked; undefined if it never clamps
  std::vector<std::pair<std::string, at::Tensor>> means = {};  // metrics: name, and [R] to take the mean of
};

struct CorrectionKind {
  CouplingScope coupling =
      CouplingScope::kNothing;  // with kSequence or kBatch, CorrectionRows::sequences is set
  WeightBounds bounds = {};     // unused if the correction has no bounds
  bool reads_top_k = false;     // needs the engine's top-k tokens
  bool draws_by_row = false;    // needs CorrectionRows::rows_R: draws a random number for each row
  Corrected (*apply)(const CorrectionRows& rows) = nullptr;
};

// The values of the setting `correction`, besides auto and none.
#define BOUGH_CORRECTIONS(X) \
  X(cap)                     \
  X(tis)                     \
  X(icepop)                  \
  X(masked_is)               \
  X(rejection)               \
  X(obrs)

// Corrections that have their own setting.
#define BOUGH_OTHER_CORRECTIONS(X) \
  X(rejection_sampling)            \
  X(off_policy_mask)               \
  X(m2po)

#define BOUGH_DECLARE_CORRECTION(name) CorrectionKind name##_correction(const LossSettings& settings);
BOUGH_CORRECTIONS(BOUGH_DECLARE_CORRECTION)
BOUGH_OTHER_CORRECTIONS(BOUGH_DECLARE_CORRECTION)
#undef BOUGH_DECLARE_CORRECTION

// Returns the corrections that `settings` select. Their factors are multiplied. `against`: the denominator of
// the loss's ratio. Throws UserError if settings contradict each other.
std::vector<CorrectionKind> find_corrections(const LossSettings& settings, Against against);

// Returns log w [R] at settings.correction_level: w of the token, or the product or the geometric mean of w
// over the sequence's loss rows. The result is clamped to +-kMaxLogRatio (loss.h).
at::Tensor log_weight_at_level(const CorrectionRows& rows);
// Returns [R]: 0 on every loss row of a sequence that has a token with w < settings.correction_veto, else 1.
at::Tensor veto_factor(const CorrectionRows& rows);

// Returns the bounds from the settings. If unset there, they are the correction's defaults: `geometric` at
// level geometric, otherwise `token`. Throws UserError if the lower bound is above the upper one.
WeightBounds weight_bounds(const LossSettings& settings, WeightBounds token, WeightBounds geometric);

}  // namespace bough
