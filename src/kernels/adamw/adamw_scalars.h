// The numbers of one update (adamw_isa.h), for every device.
#pragma once

#include <cmath>

#include "kernels/adamw/adamw.h"
#include "kernels/adamw/adamw_isa.h"

namespace bough {

template <class A>
AdamwScalars<A> adamw_scalars(const AdamwStep& s) {
  const auto round = [](double x) { return static_cast<A>(x); };
  return {.gradient_scale = round(s.gradient_scale),
          .beta1 = round(s.beta1),
          .one_minus_beta1 = round(1 - s.beta1),
          .beta2 = round(s.beta2),
          .one_minus_beta2 = round(1 - s.beta2),
          .decay = round(1 - s.lr * s.weight_decay),
          .step_size = round(s.lr / (1 - std::pow(s.beta1, s.step))),
          .inverse_variance = round(1 / (1 - std::pow(s.beta2, s.step))),
          .eps = round(s.eps)};
}

}  // namespace bough
