// Losses: tensors in, a scalar and metrics out. A loss is a function of leaves only (log-probabilities and
// entropies); it never sees the model or the tree. One row is one trained token of one sequence: a token that
// three sequences share and train is three rows, whose gradients the executor adds.
//
// Denominators are not the loss's business: weights_R (aggregation.h) carries them, computed once for the
// whole global batch, so that
//     loss = sum over R of weights_R * per_token_R
// and blocks, micro-batches and ranks just add. The equations are those of docs/algorithms.md.
//
// Extreme inputs: every log-ratio is first clamped to +-kMaxLogRatio (as verl does), with gradient 0 outside;
// so old log-probabilities of -inf, or ratios of e^80, give a finite loss, no NaN. A current log-probability
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

// e^20 = 4.9e8: far beyond any ratio that learning could use, and its square still fits fp32.
inline constexpr double kMaxLogRatio = 20.0;

// All [R], on one device, in one accumulator type (fp32 or fp64) unless said; undefined where unused.
struct LossRows {
  at::Tensor log_probs_R;  // log pi(y_t), current policy, at `temperature`; a leaf that requires grad
  at::Tensor entropies_R;  // H of the distribution the token was drawn from; a leaf that requires grad
  at::Tensor advantages_R;
  at::Tensor behaviour_log_probs_R;  // log mu: under the policy that sampled the token, at `temperature`
  at::Tensor proximal_log_probs_R;   // log pi_old: at the start of the update
  at::Tensor reference_log_probs_R;  // log pi_ref
  at::Tensor teacher_log_probs_R;    // log q of a teacher
  at::Tensor weights_R;              // 1 / denominator of the row: aggregation.h
  at::Tensor versions_R;             // int32: weight version that sampled the token, 0 or more
  at::Tensor sequences_R;            // int64: index of each row's sequence; rows of one sequence are adjacent

  // [R, K]: log-probabilities of K tokens at each row's position, the same tokens in all of these, which are
  // those that given_tokens() says. given_log_probs_RK is a third leaf. Where a row has fewer than K, their
  // behaviour_given_RK is -infinity.
  at::Tensor given_log_probs_RK;  // log pi
  at::Tensor behaviour_given_RK;  // log mu
  at::Tensor proximal_given_RK;   // log pi_old; undefined with proximal_is_current
  at::Tensor teacher_given_RK;    // log q

  // The entropy bonus's coefficient now, where it moves; else the settings'.
  std::optional<double> entropy_coef;

  // True for one update a batch at eta = 0: pi_old is the current policy, detached, and no proximal walk was
  // made (proximal_log_probs_R is then ignored).
  bool proximal_is_current = false;

  // The trainer's version: how many batches it has been trained on (Asynchrony, i).
  int64_t version = 0;

  // Every defined field but the leaves, which are left undefined, through `pick`, from tensor to tensor:
  // some of the rows, say.
  template <class Pick>
  LossRows mapped(const Pick& pick) const {
    LossRows picked;
    for (const auto field :
         {&LossRows::advantages_R, &LossRows::behaviour_log_probs_R, &LossRows::proximal_log_probs_R,
          &LossRows::reference_log_probs_R, &LossRows::teacher_log_probs_R, &LossRows::behaviour_given_RK,
          &LossRows::proximal_given_RK, &LossRows::teacher_given_RK, &LossRows::weights_R,
          &LossRows::versions_R, &LossRows::sequences_R})
      if ((this->*field).defined()) picked.*field = pick(this->*field);
    picked.entropy_coef = entropy_coef;
    picked.proximal_is_current = proximal_is_current;
    picked.version = version;
    return picked;
  }
};

struct LossOutput {
  at::Tensor loss;  // [] in the rows' type; differentiable in the leaves; 0 for R = 0
  // Under the names of docs/formats.md. loss/policy, loss/entropy, loss/kl are aggregated with weights_R,
  // without their coefficients; the others are means or maxima over rows.
  WeightedSums metrics;
  MetricReader unread;  // those of rows on a GPU: whoever waits for it anyway reads them

  void add_metrics(MetricReader reader) {
    if (loss.is_cpu()) merge(metrics, reader.read());
    else unread.append(std::move(reader));
  }
};

// Whose most likely tokens a loss wants the log-probabilities of, beside the token drawn.
enum class GivenTokens {
  kNone,
  kPolicyTop,  // the policy's at the start of the update
  kEngineTop,  // those that the engine returned with the token
};

// What a row's loss depends on beside the row, and so which rows a call must have at once: any, those of one
// block; all of the sequences that it has any of, a sequence's rows adjacent; all of the batch.
enum class Couples { kNothing, kSequence, kBatch };

class Loss {
 public:
  virtual ~Loss() = default;

  virtual Couples couples() const = 0;
  bool token_separable() const { return couples() == Couples::kNothing; }

  // What loss_aggregation: auto means for it.
  virtual std::string aggregation() const { return "token_mean"; }

  // What a caller must provide beside log_probs_R and weights_R. A leaf that a loss does not need gets no
  // gradient (autograd returns an undefined tensor for it), even if it is provided for the metrics.
  virtual bool needs_advantages() const = 0;
  virtual bool needs_behaviour() const = 0;
  virtual bool needs_proximal() const = 0;  // proximal_log_probs_R, or proximal_is_current
  virtual bool needs_reference() const = 0;
  virtual bool needs_entropy() const = 0;
  virtual bool needs_teacher() const { return false; }  // teacher_log_probs_R
  virtual GivenTokens given_tokens() const { return GivenTokens::kNone; }
  virtual bool needs_versions() const { return false; }  // versions_R and version

  // InternalError where a needed tensor is missing or has another shape, type or device.
  virtual LossOutput operator()(const LossRows& rows) const = 0;
};

// The loss named settings.loss. UserError: an unknown name (says the nearest), or impossible values.
std::unique_ptr<Loss> make_loss(const LossSettings& settings);

// What operator() checks first: shapes [R], types and devices of all that is defined, and that `loss` has
// what it needs.
void check_rows(const Loss& loss, const LossRows& rows);

}  // namespace bough
