#include "kernels/matrix_product/matrix_product.h"

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/parameter.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("matrix_product(Tensor a, Tensor b, Tensor? bias, Tensor? residual) -> Tensor");
  m.def("batch_invariant_product(Tensor a, Tensor b, Tensor? bias, Tensor? residual) -> Tensor");
  m.def("add_matrix_product_(Tensor(a!) c, Tensor a, Tensor b) -> ()");
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

void check_product(const char* op, const at::Tensor& a_MK, const at::Tensor& b_KN,
                   const OptionalTensor& bias_N, const OptionalTensor& residual_MN) {
  check_factors(op, a_MK, b_KN);
  BOUGH_CHECK(!bias_N || (bias_N->is_contiguous() && bias_N->numel() == b_KN.size(1) &&
                          bias_N->scalar_type() == a_MK.scalar_type()),
              op, ": bias ", bias_N->sizes(), " ", bias_N->scalar_type(), " for ", b_KN.size(1), " columns");
  BOUGH_CHECK(!residual_MN || (residual_MN->is_contiguous() && residual_MN->dim() == 2 &&
                               residual_MN->size(0) == a_MK.size(0) && residual_MN->size(1) == b_KN.size(1) &&
                               residual_MN->scalar_type() == a_MK.scalar_type()),
              op, ": residual ", residual_MN->sizes(), " ", residual_MN->scalar_type(), " for ", a_MK.size(0),
              " rows, ", b_KN.size(1), " columns");
}
}  // namespace

at::Tensor matrix_product(const at::Tensor& a_MK, const at::Tensor& b_KN, const OptionalTensor& bias_N,
                          const OptionalTensor& residual_MN) {
  check_product("matrix_product", a_MK, b_KN, bias_N, residual_MN);
  static const auto op = find_op<Op>("bough::matrix_product");
  return op.call(a_MK, b_KN, bias_N, residual_MN);
}

at::Tensor batch_invariant_product(const at::Tensor& a_MK, const at::Tensor& b_KN,
                                   const OptionalTensor& bias_N, const OptionalTensor& residual_MN) {
  check_product("batch_invariant_product", a_MK, b_KN, bias_N, residual_MN);
  static const auto op = find_op<Op>("bough::batch_invariant_product");
  return op.call(a_MK, b_KN, bias_N, residual_MN);
}

void add_matrix_product_(const at::Tensor& c_MN, const at::Tensor& a_MK, const at::Tensor& b_KN) {
  check_factors("add_matrix_product_", a_MK, b_KN);
  BOUGH_CHECK(c_MN.dim() == 2 && c_MN.is_contiguous() && c_MN.size(0) == a_MK.size(0) &&
                  c_MN.size(1) == b_KN.size(1) && c_MN.scalar_type() == accumulator_type(a_MK.scalar_type()),
              "add_matrix_product_: c ", c_MN.sizes(), " ", c_MN.scalar_type(), " for a ", a_MK.sizes(),
              ", b ", b_KN.sizes());
  static const auto op =
      find_op<void(const at::Tensor&, const at::Tensor&, const at::Tensor&)>("bough::add_matrix_product_");
  op.call(c_MN, a_MK, b_KN);
}

}  // namespace bough
