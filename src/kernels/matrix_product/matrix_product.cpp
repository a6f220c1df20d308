#include "kernels/matrix_product/matrix_product.h"

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/parameter.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("matrix_product(Tensor a, Tensor b, Tensor? bias, Tensor? residual) -> Tensor");
  m.def("batch_invariant_product(Tensor a, Tensor b, Tensor? bias, Tensor? residual) -> Tensor");
  m.def("add_matrix_product_(Tensor(a!) c, Tensor a, Tensor b, bool batch_invariant=False) -> ()");
}

namespace bough {

namespace {
void check_factors(const char* op, const at::Tensor& a, const at::Tensor& b) {
  BOUGH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && a.scalar_type() == b.scalar_type() &&
                  a.device() == b.device(),
              op, ": a ", a.sizes(), " ", a.scalar_type(), ", b ", b.sizes(), " ", b.scalar_type());
}

using OptionalTensor = std::optional<at::Tensor>;
using Op = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&);

void check_product(const char* op, const at::Tensor& a_RK, const at::Tensor& b_KO,
                   const OptionalTensor& bias_O, const OptionalTensor& residual_RO) {
  check_factors(op, a_RK, b_KO);
  BOUGH_CHECK(!bias_O || (bias_O->is_contiguous() && bias_O->numel() == b_KO.size(1) &&
                          bias_O->scalar_type() == a_RK.scalar_type()),
              op, ": bias ", bias_O->sizes(), " ", bias_O->scalar_type(), " for ", b_KO.size(1), " columns");
  BOUGH_CHECK(!residual_RO || (residual_RO->is_contiguous() && residual_RO->dim() == 2 &&
                               residual_RO->size(0) == a_RK.size(0) && residual_RO->size(1) == b_KO.size(1) &&
                               residual_RO->scalar_type() == a_RK.scalar_type()),
              op, ": residual ", residual_RO->sizes(), " ", residual_RO->scalar_type(), " for ", a_RK.size(0),
              " rows, ", b_KO.size(1), " columns");
}
}  // namespace

at::Tensor matrix_product(const at::Tensor& a_RK, const at::Tensor& b_KO, const OptionalTensor& bias_O,
                          const OptionalTensor& residual_RO) {
  check_product("matrix_product", a_RK, b_KO, bias_O, residual_RO);
  static const auto op = find_op<Op>("bough::matrix_product");
  return op.call(a_RK, b_KO, bias_O, residual_RO);
}

at::Tensor batch_invariant_product(const at::Tensor& a_RK, const at::Tensor& b_KO,
                                   const OptionalTensor& bias_O, const OptionalTensor& residual_RO) {
  check_product("batch_invariant_product", a_RK, b_KO, bias_O, residual_RO);
  static const auto op = find_op<Op>("bough::batch_invariant_product");
  return op.call(a_RK, b_KO, bias_O, residual_RO);
}

void add_matrix_product_(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO,
                         bool batch_invariant) {
  check_factors("add_matrix_product_", a_RK, b_KO);
  BOUGH_CHECK(c_RO.dim() == 2 && c_RO.stride(1) == 1 && c_RO.size(0) == a_RK.size(0) &&
                  c_RO.size(1) == b_KO.size(1) &&
                  (c_RO.scalar_type() == accumulator_type(a_RK.scalar_type()) ||
                   c_RO.scalar_type() == a_RK.scalar_type()),
              "add_matrix_product_: c ", c_RO.sizes(), " ", c_RO.scalar_type(), " for a ", a_RK.sizes(),
              ", b ", b_KO.sizes());
  static const auto op = find_op<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool)>(
      "bough::add_matrix_product_");
  op.call(c_RO, a_RK, b_KO, batch_invariant);
}

}  // namespace bough
