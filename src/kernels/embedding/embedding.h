// y[t] = weight[tokens[t]]. Backward: weight.main_grad[tokens[t]] += d_y[t], accumulator type; a token that occurs
// often is summed in the order of t.
#pragma once

#include "kernels/parameter.h"

namespace bough {

// tokens_T: int64, each in [0, V) (checked by who reads them); weight.value: [V, D]. Returns [T, D]. Differentiable:
// it is where a pass's graph begins.
at::Tensor embedding(const at::Tensor& tokens_T, const Parameter& weight);

}  // namespace bough
