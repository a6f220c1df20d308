// The cost of a pass through a model on a device, for the planner (engine.md 2, "Cost model"). Combines the
// decoder's FLOPs and bytes (models/decoder_cost.h) with the rates of a device's profile.
//
// The seconds of a pass are a sum of four parts. Each part is a curve of the device (device_profile.h) times
// a count for the model:
// - matrix products of the layers: FLOPs;
// - attention: FLOPs of the busiest thread times the number of threads, which are more than the FLOPs of the
//   visible (query, key) pairs (tree_attention_cost.h);
// - elementwise operations: elements read and written;
// - the head (lm_head or value_head): FLOPs, chunk by chunk.
// A constant per layer and per pass is added. On a GPU, kernel launches overlap with computation: a pass then
// takes the larger of the constants and the four parts, not their sum.
#pragma once

#include "cost/device_profile.h"
#include "models/decoder_cost.h"
#include "plan/pass_costs.h"

namespace bough {

class CostModel final : public PassCosts {
 public:
  // Throws InternalError if profile and shape have different element sizes.
  CostModel(DeviceProfile device, ModelShape shape);

  const DeviceProfile& device() const { return device_; }
  const ModelShape& shape() const { return shape_; }

  double forward_seconds(const PassShape& pass) const override;
  double backward_seconds(const PassShape& pass) const override;
  double attention_forward_seconds(const PassShape& pass) const override;
  double attention_backward_seconds(const PassShape& pass) const override;
  double head_forward_seconds(const PassShape& pass) const override;
  double head_backward_seconds(const PassShape& pass) const override;
  double recompute_seconds(const PassShape& pass, RecomputePolicy keep) const override;

  int64_t stack_row_bytes() const override { return bytes().of_stack_row(); }
  int64_t kept_bytes(RecomputePolicy keep) const override { return bytes().of_kept(keep); }
  int64_t boundary_bytes() const override { return bytes().of_exit(); }
  int64_t row_bytes() const override { return bytes().of_loss_row(); }
  int64_t temporary_bytes(const PassShape& pass, RecomputePolicy keep) const override {
    return bytes().of_temporaries(pass, keep);
  }

 private:
  DecoderBytes bytes() const { return {shape_, device_.kernels}; }
  // Seconds of the layers in a forward or a backward pass. left_out: the seconds of operations that the pass
  // skips, which are subtracted.
  double layers_seconds(const PassShape& pass, bool backward, double left_out = 0) const;
  double attention_seconds(const PassShape& pass, bool backward) const;
  // Seconds of the layers' matrix products. flops, of_experts: FLOPs per token in all of them and in the
  // experts. An expert's product has the rows of its tokens only, so a pass with few tokens for each expert
  // takes longer than dense layers with the same FLOPs: it reads the weights of every expert that it uses.
  double linear_seconds(const CostCurve& curve, int64_t tokens, double flops, double of_experts) const;
  // Seconds of all rows, for each FLOP of one row.
  double head_seconds_per_flop(const CostCurve& curve, int64_t rows) const;

  DeviceProfile device_;
  ModelShape shape_;
};

}  // namespace bough
