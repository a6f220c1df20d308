// A small model on a made-up device, for tests of plans: a pass costs as much as some dozens of tokens, whatever its
// size, and then the same for each token.
#pragma once

#include "cost/cost_model.h"

namespace bough {

inline ModelShape test_shape() {
  ModelShape shape;
  shape.name = "test";
  shape.num_layers = 2;
  shape.hidden_size = 64;
  shape.intermediate_size = 128;
  shape.num_heads = 4;
  shape.num_kv_heads = 2;
  shape.head_dim = 16;
  shape.vocab_size = 300;
  return shape;
}

// overhead: a pass's fixed cost in tokens.
inline CostModel test_costs(double overhead = 40) {
  const auto curve = [&](double seconds_per_unit) {
    return CostCurve{{1, 1'000'000},
                     {seconds_per_unit * (1 + overhead), seconds_per_unit * (1e6 + overhead)}};
  };
  const CostCurve rate{{1, 1'000'000}, {1e-10, 1e-10 * 1e6}};
  DeviceProfile device;
  device.name = device.source = "test";
  device.dtype = "fp32";
  device.memory_bytes = int64_t{1} << 40;
  device.linear_forward = curve(1e-10);
  device.linear_backward = curve(2e-10);
  device.elementwise_forward = curve(1e-10);
  device.elementwise_backward = curve(2e-10);
  device.attention_forward = rate;
  device.attention_backward = CostCurve{{1, 1'000'000}, {2.5e-10, 2.5e-10 * 1e6}};
  device.head_forward = rate;
  device.head_backward = CostCurve{{1, 1'000'000}, {2e-10, 2e-10 * 1e6}};
  return CostModel(device, test_shape());
}

}  // namespace bough
