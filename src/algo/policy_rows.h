// What policy terms (losses/) and corrections (corrections/) are functions of: the rows of a batch with their
// log-ratios, and the sequences that the rows belong to. [R] rows, [S] sequences that have a row.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "algo/loss.h"
#include "algo/loss_settings.h"

namespace bough {

// Stands for a log-probability of minus infinity where differences are taken: -inf - -inf would be NaN.
inline constexpr double kLogProbFloor = -1e30;

// log(a / b), clamped to +-kMaxLogRatio. Clamping passes no gradient outside, so exp of it never multiplies
// inf by 0. Two probabilities that both underflowed to 0 count as equal.
at::Tensor log_ratio(const at::Tensor& log_a_R, const at::Tensor& log_b_R);

// The sequences of the rows, for losses and corrections that couple a sequence's tokens. A sequence is a row
// of the batch: rows of one trajectory are sequences of their own.
class Sequences {
 public:
  explicit Sequences(const at::Tensor& sequences_R);  // rows of one sequence are adjacent

  at::Tensor sum(const at::Tensor& x_R) const;      // [S]; differentiable
  at::Tensor mean(const at::Tensor& x_R) const;     // [S]; over the sequence's trained tokens
  at::Tensor largest(const at::Tensor& x_R) const;  // [S]
  at::Tensor to_rows(const at::Tensor& x_S) const;  // [R]: each row gets its sequence's
  int64_t num_sequences() const { return num_sequences_; }

 private:
  at::Tensor index_R_;  // int64
  int64_t num_sequences_ = 0;
};

struct PolicyRows {
  const LossSettings& settings;
  double eps_low, eps_high;  // the loss's own where the settings leave them out
  at::Tensor log_probs_R;    // log pi, differentiable
  at::Tensor log_ratio_R;    // log(pi / pi_old), or of pi / mu; clamped, differentiable
  at::Tensor advantages_R;
  at::Tensor behaviour_log_probs_R;  // log mu; where the loss asks for it
  const Sequences* sequences;        // null unless the loss couples tokens
  int64_t version;                   // the trainer's
};

struct PolicyTerm {
  at::Tensor per_token_R;  // differentiable in log_probs_R
  at::Tensor clipped_R;    // bool: rows whose ratio a clip cut off; undefined where the loss has no clip
};

struct WeightBounds {
  double lower = 0, upper = 0;
};

struct CorrectionRows {
  const LossSettings& settings;
  at::Tensor log_w_R;                // log(pi_old / mu), clamped; nothing here has a gradient
  at::Tensor log_probs_R;            // log pi
  at::Tensor behaviour_log_probs_R;  // log mu
  at::Tensor advantages_R;
  const Sequences* sequences;                   // null unless the correction couples tokens
  WeightBounds bounds;                          // the correction's own
  at::Tensor old_given_RK, behaviour_given_RK;  // log pi_old and log mu of the engine's most likely tokens
  int64_t version = 0;                          // the trainer's
};

// An estimator of KL(p, q) on samples of p, by row, with d = log q - log p:
//   k1 -d,  k2 d^2 / 2,  k3 exp(d) - d - 1
at::Tensor kl_estimate(const std::string& estimator, const at::Tensor& log_p_R, const at::Tensor& log_q_R);

}  // namespace bough
