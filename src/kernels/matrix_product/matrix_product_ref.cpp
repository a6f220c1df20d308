#include <ATen/ATen.h>

#include "kernels/common/op.h"
#include "kernels/matrix_product/matrix_product.h"

namespace bough {

at::Tensor matrix_product_reference(const at::Tensor& a_RK, const at::Tensor& b_KO,
                                    const std::optional<at::Tensor>& bias_O,
                                    const std::optional<at::Tensor>& residual_RO) {
  if (residual_RO && bias_O) return at::addmm(*bias_O, a_RK, b_KO).add_(*residual_RO);
  if (residual_RO) return at::addmm(*residual_RO, a_RK, b_KO);
  return bias_O ? at::addmm(*bias_O, a_RK, b_KO) : at::mm(a_RK, b_KO);
}

void add_matrix_product_reference_(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO) {
  c_RO.addmm_(a_RK.to(c_RO.scalar_type()), b_KO.to(c_RO.scalar_type()));
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("matrix_product", TORCH_FN(bough::matrix_product_reference));
  m.impl("add_matrix_product_", [](const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO,
                                   bool) { bough::add_matrix_product_reference_(c_RO, a_RK, b_KO); });
}
