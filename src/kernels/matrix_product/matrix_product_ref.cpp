#include <ATen/ATen.h>

#include "kernels/common/op.h"
#include "kernels/matrix_product/matrix_product.h"

namespace bough {

at::Tensor matrix_product_reference(const at::Tensor& a_MK, const at::Tensor& b_KN,
                                    const std::optional<at::Tensor>& bias_N,
                                    const std::optional<at::Tensor>& residual_MN) {
  if (residual_MN && bias_N) return at::addmm(*bias_N, a_MK, b_KN).add_(*residual_MN);
  if (residual_MN) return at::addmm(*residual_MN, a_MK, b_KN);
  return bias_N ? at::addmm(*bias_N, a_MK, b_KN) : at::mm(a_MK, b_KN);
}

void add_matrix_product_reference_(const at::Tensor& c_MN, const at::Tensor& a_MK, const at::Tensor& b_KN) {
  c_MN.addmm_(a_MK.to(c_MN.scalar_type()), b_KN.to(c_MN.scalar_type()));
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("matrix_product", TORCH_FN(bough::matrix_product_reference));
  m.impl("add_matrix_product_", TORCH_FN(bough::add_matrix_product_reference_));
}
