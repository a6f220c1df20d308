// The losses of Tinker's API: sums over the positions of all sequences, without a denominator. docs/tinker.md
// has the formulas, which follow the pages of the SDK's documentation.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "algo/loss.h"
#include "plan/plan.h"
#include "tinker/wire.h"
#include "train/make_batch.h"

namespace bough {

// A loss with its settings. Two requests with equal settings can be one tree.
struct TinkerLossSettings {
  std::string name;
  double clip_low = 0, clip_high = 0;  // of the ratio; a datum may have its own at each position
  double beta = 0;                     // of dro

  bool operator==(const TinkerLossSettings&) const = default;
};
// Throws ApiError 400 if the loss is unknown or not served, or the config has an unknown key or a bad value.
TinkerLossSettings read_loss_settings(const ForwardBackwardRequest& request);

// Throws ApiError 400 unless the datum has exactly the inputs that the loss reads, of the right shapes, and
// its tokens fit the model. `where` begins the message.
void check_datum(const WireDatum& datum, const TinkerLossSettings& settings, int64_t vocab_size,
                 int64_t max_length, const std::string& where);

// The inputs of the loss at all rows of a batch. Row r is one position of one datum, K its targets.
struct TinkerLossInputs {
  at::Tensor weights_RK;                                                   // cross_entropy
  at::Tensor sampling_log_probs_R, advantages_R, clip_low_R, clip_high_R;  // the others
  at::Tensor ratio_mask_R;                                                 // gspo

  // Returns a copy with `change` applied to every defined tensor.
  template <class Change>
  TinkerLossInputs mapped(const Change& change) const {
    TinkerLossInputs changed = *this;
    for (at::Tensor* tensor : {&changed.weights_RK, &changed.sampling_log_probs_R, &changed.advantages_R,
                               &changed.clip_low_R, &changed.clip_high_R, &changed.ratio_mask_R})
      if (tensor->defined()) *tensor = change(*tensor);
    return changed;
  }
};

// The loss of each row, [R]. log_probs_RK: of the targets. sequences_R: int64, equal for the rows of one
// sequence, which are adjacent; gspo needs all rows of a sequence.
at::Tensor tinker_loss(const TinkerLossSettings& settings, const TinkerLossInputs& inputs,
                       const at::Tensor& log_probs_RK, const at::Tensor& sequences_R);

// Requests with equal loss settings as one batch of the executor. Position i of a datum is the loss row of
// the token after it. If all targets are the tokens that follow, their log-probabilities are those of the
// rows. Otherwise the targets are the batch's top-k tokens.
struct TinkerBatch {
  std::vector<std::vector<int32_t>> tokens;  // by datum: its inputs and the last target
  std::vector<int64_t> columns;              // targets a position, by datum
  TrainBatch batch;
  TinkerLossInputs inputs;
  TinkerLossSettings settings;

  // [R, K] from the executor's values.
  at::Tensor log_probs(const at::Tensor& log_probs_R, const at::Tensor& top_k_RK) const {
    return batch.top_k_ids_RK.defined() ? top_k_RK : log_probs_R.unsqueeze(1);
  }
};
// The requests must have been checked. type: fp32, or fp64 for fp64 models. The result must not be moved in
// memory that `batch` refers to, so it is a pointer.
std::unique_ptr<TinkerBatch> make_tinker_batch(const std::vector<const ForwardBackwardRequest*>& requests,
                                               const TinkerLossSettings& settings, at::ScalarType type);

class TinkerLoss final : public Loss {
 public:
  // device: of the rows that it gets. `batch` must outlive the loss.
  explicit TinkerLoss(const TinkerBatch& batch, at::Device device = at::kCPU);

  CouplingScope coupling() const override {
    return batch_.settings.name == "gspo" ? CouplingScope::kSequence : CouplingScope::kNothing;
  }
  bool needs_advantages() const override { return false; }
  bool needs_behaviour() const override { return false; }
  bool needs_proximal() const override { return false; }
  bool needs_reference() const override { return false; }
  bool needs_entropy() const override { return false; }
  LossOutput operator()(const LossRows& rows) const override;

 private:
  const TinkerBatch& batch_;
  const TinkerLossInputs inputs_;  // on the device
};

}  // namespace bough
