// A mixture's sublayer and its expected results, for tests.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"
#include "kernels/experts/experts.h"

namespace bough {

constexpr double kNormEps = 1e-6;

struct Mixture {
  int64_t num_experts, num_chosen;
  Parameter norm, router, gate_up, down;
  bool renormalise = true, has_norm = true, residual = true;
  GateActivation activation = GateActivation::kSilu;

  Mixture(int64_t experts, int64_t chosen, int64_t width, int64_t inner, at::ScalarType type)
      : num_experts(experts),
        num_chosen(chosen),
        norm(random_parameter({width}, type, 1)),
        router(random_parameter({experts, width}, type, 2)),
        gate_up(random_parameter({experts * 2 * inner, width}, type, 3)),
        down(random_parameter({experts * width, inner}, type, 4)) {
    // Weights are scaled so that logits, gate, up and y are of order 1.
    for (Parameter* parameter : {&router, &gate_up}) parameter->value.mul_(1 / std::sqrt(double(width)));
    down.value.mul_(1 / std::sqrt(double(inner)));
  }

  at::Tensor logits(const at::Tensor& x, bool batch_invariant = false) const {
    return router_logits(x, has_norm ? &norm : nullptr, kNormEps, router, false, batch_invariant);
  }
  at::Tensor run(const at::Tensor& x, const at::Tensor& experts_TK, bool output_is_read = true,
                 bool batch_invariant = false) const {
    return experts_mlp(x, experts_TK, expert_weights(logits(x, batch_invariant), experts_TK, renormalise),
                       {.norm = has_norm ? &norm : nullptr,
                        .gate_up = gate_up,
                        .down = down,
                        .norm_settings = kNormEps,
                        .activation = activation,
                        .residual = residual,
                        .output_is_read = output_is_read},
                       batch_invariant);
  }
  at::Tensor operator()(const at::Tensor& x) const { return run(x, choose_experts(logits(x), num_chosen)); }
  std::vector<Parameter*> parameters() { return {&norm, &router, &gate_up, &down}; }
  Mixture on(at::Device device) const {
    Mixture moved = *this;
    for (Parameter* parameter : moved.parameters()) *parameter = copy_to(device, *parameter);
    return moved;
  }
};

// The expected results for given experts, in fp64 with tensor ops and libtorch's autograd.
struct ExpectedMixture {
  at::Tensor y, d_x;
  std::vector<at::Tensor> gradients;  // in the order of Mixture::parameters()

  ExpectedMixture(const Mixture& f, const at::Tensor& x, const at::Tensor& experts_TK,
                  const at::Tensor& d_y) {
    const auto leaf = [](const at::Tensor& t) {
      return t.detach().to(at::kDouble).clone().requires_grad_(true);
    };
    const auto xd = leaf(x), norm = leaf(f.norm.value), router = leaf(f.router.value),
               gate_up = leaf(f.gate_up.value), down = leaf(f.down.value);
    const auto h = f.has_norm ? xd * (xd.square().mean(-1, true) + kNormEps).rsqrt() * norm : xd;
    auto weights = at::softmax(at::mm(h, router.t()), 1).gather(1, experts_TK);
    // A single expert has weight 1 and no gradient. The quotient's gradient would be 0 only to rounding.
    if (f.renormalise) weights = f.num_chosen == 1 ? at::ones_like(weights) : weights / weights.sum(1, true);
    y = experts_mlp_reference(h, experts_TK, weights, gate_up, down, f.activation);
    if (f.residual) y = y + xd;
    y.backward(d_y.to(at::kDouble));
    y = y.detach();
    d_x = xd.grad();
    for (const auto& each : {norm, router, gate_up, down})
      gradients.push_back(each.grad().defined() ? each.grad() : at::zeros_like(each));
  }
};

// As in linear_test.cpp, with one more rounding: that of an expert's output.
inline double mixture_bound(at::ScalarType type) {
  return type == at::kBFloat16 ? 10 * 3.9e-3 : tolerance(type);
}

}  // namespace bough
