// The inputs and outputs of policy terms (losses/) and corrections (corrections/): loss rows with their
// log-ratios, and the sequences of the rows. [R]: loss rows. [S]: sequences that have a loss row.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "algo/loss.h"
#include "algo/loss_settings.h"

namespace bough {

// Log-probabilities below this are raised to it before a subtraction, because -inf - -inf is NaN.
inline constexpr double kLogProbFloor = -1e30;

// Returns log(a / b), clamped to +-kMaxLogRatio. Outside this range the gradient is 0, so the backward of exp
// never multiplies inf by 0. Two probabilities that both underflowed to 0 count as equal.
at::Tensor log_ratio(const at::Tensor& log_a_R, const at::Tensor& log_b_R);

// The sequences of the loss rows, for losses and corrections whose scope is a sequence. A sequence is here
// one row of the batch: a conversation that is stored as several rows of the batch is several sequences.
class Sequences {
 public:
  explicit Sequences(const at::Tensor& sequences_R);  // rows of one sequence are adjacent

  at::Tensor sum(const at::Tensor& x_R) const;      // [S]; differentiable
  at::Tensor mean(const at::Tensor& x_R) const;     // [S]; over the sequence's trained tokens
  at::Tensor largest(const at::Tensor& x_R) const;  // [S]
  at::Tensor to_rows(const at::Tensor& x_S) const;  // [R]: each loss row gets its sequence's entry
  int64_t num_sequences() const { return num_sequences_; }

 private:
  at::Tensor index_R_;  // int64
  int64_t num_sequences_ = 0;
};

struct PolicyRows {
  const LossSettings& settings;
  double eps_low, eps_high;  // from the settings; if unset there, the loss's defaults
  at::Tensor log_probs_R;    // log pi, differentiable
  at::Tensor log_ratio_R;    // log(pi / pi_old) or log(pi / mu), see Against; clamped, differentiable
  at::Tensor advantages_R;
  at::Tensor behaviour_log_probs_R;  // log mu; may be undefined if the loss does not need it
  const Sequences* sequences;        // nullptr if the coupling scope is kNothing
  int64_t version;                   // the trainer's weight version
};

struct PolicyTerm {
  at::Tensor per_token_R;  // differentiable in log_probs_R
  at::Tensor clipped_R;    // bool: rows whose ratio was clipped; undefined if the loss has no clip
};

struct WeightBounds {
  double lower = 0, upper = 0;
};

struct CorrectionRows {
  const LossSettings& settings;
  // log(pi_old / mu), or log(pi / mu) if pi_old is mu itself. Clamped. No tensor here has a gradient.
  at::Tensor log_w_R;
  at::Tensor log_probs_R;            // log pi
  at::Tensor behaviour_log_probs_R;  // log mu
  at::Tensor advantages_R;
  const Sequences* sequences;                   // nullptr if the coupling scope is kNothing
  WeightBounds bounds;                          // CorrectionKind::bounds
  at::Tensor old_top_k_RK, behaviour_top_k_RK;  // log pi_old and log mu of the engine's top-k tokens
  int64_t version = 0;                          // the trainer's weight version
  at::Tensor rows_R = {};                       // index of each row in the batch; undefined: 0 to R - 1
};

// Returns an estimate of KL(p, q) for each loss row, from samples of p. With d = log q - log p, clamped:
//   k1 -d,  k2 d^2 / 2,  k3 exp(d) - d - 1
at::Tensor kl_estimate(const std::string& estimator, const at::Tensor& log_p_R, const at::Tensor& log_q_R);

}  // namespace bough
