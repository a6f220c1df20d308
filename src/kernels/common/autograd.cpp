#include "kernels/common/autograd.h"

#include <ATen/ops/empty.h>

namespace bough {

at::Tensor graph_root(at::Device device) {
  return at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(device)).requires_grad_(true);
}

}  // namespace bough
