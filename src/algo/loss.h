// A loss computes a scalar and metrics from tensors. The differentiable inputs are leaves: log-probabilities
// and entropies. A loss never sees the model or the tree. One loss row (letter R; here just "row") is one
// trained token of one sequence. A tree token that three sequences train is three loss rows, and the executor
// adds their gradients.
//
// A loss does not compute denominators. weights_R (aggregation.h) holds them for the whole global batch, so
// that
//     loss = sum over R of weights_R * per_token_R
// and the losses of plan blocks, micro-batches and ranks just add. docs/algorithms.md has the equations.
//
// Extreme inputs: every log-ratio is clamped to +-kMaxLogRatio (as in verl), with gradient 0 outside.
// Therefore old log-probabilities of -inf and ratios of e^80 give a finite loss. A current log-probability
// that is NaN stays NaN: the optimizer must see it and skip the step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "algo/loss_settings.h"
#include "algo/metric_reader.h"
#include "algo/weighted_sum.h"

namespace bough {

// e^20 = 4.9e8 is far above any useful ratio, and its square still fits fp32.
inline constexpr double kMaxLogRatio = 20.0;

// All tensors are [R], on one device and of one accumulator type (fp32 or fp64) unless stated otherwise.
// Unused tensors are undefined.
struct LossRows {
  at::Tensor log_probs_R;  // log pi(y_t), current policy, at `temperature`; a leaf that requires grad
  at::Tensor entropies_R;  // entropy H of the current policy at the token; a leaf that requires grad
  at::Tensor advantages_R;
  at::Tensor behaviour_log_probs_R;  // log mu, behavior policy, at `temperature`
  at::Tensor proximal_log_probs_R;   // log pi_old, policy at the start of the update
  at::Tensor reference_log_probs_R;  // log pi_ref
  at::Tensor teacher_log_probs_R;    // log q of a teacher
  at::Tensor weights_R;              // 1 / denominator of the row: aggregation.h
  at::Tensor versions_R;             // int32: weight version that sampled the token, 0 or more
  at::Tensor sequences_R;            // int64: index of each row's sequence; rows of one sequence are adjacent
  at::Tensor rows_R;                 // int64: index of each row in the batch

  // [R, K]: log-probabilities of K top-k tokens at each row's position. Loss::top_k_tokens() says which
  // tokens. The tensors list the same tokens. If a row has fewer than K tokens, behaviour_top_k_RK has
  // -infinity in its remaining entries.
  at::Tensor top_k_log_probs_RK;  // log pi; a leaf that requires grad
  at::Tensor behaviour_top_k_RK;  // log mu
  at::Tensor proximal_top_k_RK;   // log pi_old; undefined with proximal_is_current
  at::Tensor reference_top_k_RK;  // log pi_ref
  at::Tensor teacher_top_k_RK;    // log q

  // The current coefficient of the entropy bonus. nullopt: LossSettings::entropy_coef.
  std::optional<double> entropy_coef;

  // True if the whole batch is one optimizer step. pi_old is then the detached current policy: no forward
  // pass computes it, and proximal_log_probs_R is ignored.
  bool proximal_is_current = false;

  // The trainer's weight version.
  int64_t version = 0;

  // Returns a copy with `pick` applied to every defined tensor except the leaves, which stay undefined.
  // `pick` maps a tensor to a tensor, for instance to some of its rows.
  template <class Pick>
  LossRows mapped(const Pick& pick) const {
    LossRows picked;
    for (const auto field :
         {&LossRows::advantages_R, &LossRows::behaviour_log_probs_R, &LossRows::proximal_log_probs_R,
          &LossRows::reference_log_probs_R, &LossRows::teacher_log_probs_R, &LossRows::behaviour_top_k_RK,
          &LossRows::proximal_top_k_RK, &LossRows::reference_top_k_RK, &LossRows::teacher_top_k_RK,
          &LossRows::weights_R, &LossRows::versions_R, &LossRows::sequences_R, &LossRows::rows_R})
      if ((this->*field).defined()) picked.*field = pick(this->*field);
    picked.entropy_coef = entropy_coef;
    picked.proximal_is_current = proximal_is_current;
    picked.version = version;
    return picked;
  }
};

struct LossOutput {
  at::Tensor loss;  // [] in the rows' type; differentiable in the leaves; 0 for R = 0
  // docs/formats.md lists the names. loss/policy, loss/entropy and loss/kl are aggregated with weights_R and
  // without their coefficients. All other metrics are means or maxima over rows.
  WeightedSums metrics;
  MetricReader unread;  // metrics still on a GPU; the caller reads them when it waits for the GPU anyway

  void add_metrics(MetricReader reader) {
    if (loss.is_cpu()) merge(metrics, reader.read());
    else unread.append(std::move(reader));
  }
};

// The top-k tokens whose log-probabilities a loss needs, besides the sampled token.
enum class TopKTokens {
  kNone,
  kPolicyTop,  // the most likely tokens of the policy at the start of the update
  kEngineTop,  // the most likely tokens that the engine returned with the sampled token
};

// The rows that the loss of one row depends on, and so the rows that one call must contain.
//   kNothing   the row itself: a call may have any rows, for instance those of one plan block
//   kSequence  the rows of its sequence: a call has whole sequences, rows of one sequence adjacent
//   kBatch     all rows of the optimizer step (the mini-batch)
enum class CouplingScope { kNothing, kSequence, kBatch };

class Loss {
 public:
  virtual ~Loss() = default;

  virtual CouplingScope coupling() const = 0;
  bool token_separable() const { return coupling() == CouplingScope::kNothing; }

  // The aggregation that `loss_aggregation: auto` selects.
  virtual std::string aggregation() const { return "token_mean"; }

  // The fields of LossRows that a caller must set, besides log_probs_R and weights_R. A leaf that the loss
  // does not need gets an undefined gradient, even if the caller sets it for the metrics.
  virtual bool needs_advantages() const = 0;
  virtual bool needs_behaviour() const = 0;
  virtual bool needs_proximal() const = 0;  // proximal_log_probs_R, or proximal_is_current
  virtual bool needs_reference() const = 0;
  virtual bool needs_reference_top_k() const { return false; }  // of the tokens of top_k_tokens()
  virtual bool needs_entropy() const = 0;
  virtual bool needs_teacher() const { return false; }  // teacher_log_probs_R
  virtual bool needs_rows() const { return false; }     // rows_R
  virtual TopKTokens top_k_tokens() const { return TopKTokens::kNone; }
  virtual bool needs_versions() const { return false; }  // versions_R and version

  // Throws InternalError if a needed tensor is undefined, or a tensor has a wrong shape, type or device.
  virtual LossOutput operator()(const LossRows& rows) const = 0;
};

// Creates the loss named settings.loss. Throws UserError if the name is unknown (the message suggests the
// nearest name), or if a value is out of range or contradicts another setting.
std::unique_ptr<Loss> make_loss(const LossSettings& settings);

// Throws InternalError if a tensor that `loss` needs is undefined, or if a defined tensor has a wrong shape,
// type or device. operator() calls it first.
void check_rows(const Loss& loss, const LossRows& rows);

}  // namespace bough
