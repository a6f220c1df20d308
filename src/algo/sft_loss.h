// Supervised fine-tuning: -log pi(y_t), aggregated with weights_R (by default the token mean).
#pragma once

#include "algo/loss.h"

namespace bough {

class SftLoss : public Loss {
 public:
  CouplingScope coupling() const override { return CouplingScope::kNothing; }
  bool needs_advantages() const override { return false; }
  bool needs_behaviour() const override { return false; }
  bool needs_proximal() const override { return false; }
  bool needs_reference() const override { return false; }
  bool needs_entropy() const override { return false; }

  LossOutput operator()(const LossRows& rows) const override;  // metric: loss/nll
};

}  // namespace bough
