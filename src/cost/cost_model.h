// The cost of a pass through a model on a device (engine.md 2, "Cost model"): the decoder's own figures
// (models/decoder_cost.h) at the rates of a device's profile. It answers the planner (plan/pass_costs.h).
//
// Seconds of a pass are the sum of four parts, each a curve of the device (device_profile.h) times the
// model's units of work: the matrix products of the layers (FLOPs), attention (FLOPs of what its busiest
// thread computes, which is more than the pairs that are visible: tree_attention_cost.h), everything
// elementwise (elements read and written) and the head (FLOPs, chunk by chunk); beside them a constant a
// layer and a pass. Where launches run ahead of the device (a GPU) the constants are hidden behind the work,
// and the larger of the two counts.
#pragma once

#include "cost/device_profile.h"
#include "models/decoder_cost.h"
#include "plan/pass_costs.h"

namespace bough {

class CostModel final : public PassCosts {
 public:
  // InternalError where profile and shape are of different element sizes.
  CostModel(DeviceProfile device, ModelShape shape);

  const DeviceProfile& device() const { return device_; }
  const ModelShape& shape() const { return shape_; }

  double forward_seconds(const PassShape& pass) const override;
  double backward_seconds(const PassShape& pass) const override;
  double attention_forward_seconds(const PassShape& pass) const override;
  double attention_backward_seconds(const PassShape& pass) const override;
  double head_forward_seconds(const PassShape& pass) const override;
  double head_backward_seconds(const PassShape& pass) const override;
  double recompute_seconds(const PassShape& pass, Keep keep) const override;

  int64_t stack_row_bytes() const override { return bytes().of_stack_row(); }
  int64_t kept_bytes(Keep keep) const override { return bytes().of_kept(keep); }
  int64_t exit_bytes() const override { return bytes().of_exit(); }
  int64_t row_bytes() const override { return bytes().of_loss_row(); }
  int64_t temporary_bytes(const PassShape& pass, Keep keep) const override {
    return bytes().of_temporaries(pass, keep);
  }

 private:
  DecoderBytes bytes() const { return {shape_, device_.kernels}; }
  // Seconds of the layers in a forward or, where `backward`, a backward pass.
  // left_out: of the work's seconds, what is not computed.
  double layers_seconds(const PassShape& pass, bool backward, double left_out = 0) const;
  double attention_seconds(const PassShape& pass, bool backward) const;
  double head_seconds(const CostCurve& curve, int64_t rows) const;

  DeviceProfile device_;
  ModelShape shape_;
};

}  // namespace bough
