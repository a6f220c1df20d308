// bf16 products on CUDA by cuBLAS, summed in fp32: added to fp32 in place, without fp32 copies of the
// factors, or rounded once. libtorch's own may round partial sums to bf16, and with an fp32 result make a new
// tensor. fp32 and fp64 are libtorch's.
//
// cuBLAS is not linked: as CUDA's runtime, it is the one that libtorch_cuda brings (cmake/cuda.cmake).
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/Exceptions.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "kernels/common/cuda_launch.h"
#include "kernels/matrix_product/matrix_product.h"

namespace bough {

namespace {
using Tensor = const at::Tensor&;

// A matrix whose rows or columns are contiguous, as cuBLAS sees it: by columns, so rows as they lie are the
// transposed matrix, which is what a product by rows wants: c = a b is cT = bT aT.
struct Factor {
  at::Tensor owner;
  cublasOperation_t operation;
  int64_t stride;

  explicit Factor(Tensor x) {
    const bool rows = x.stride(1) == 1 && x.stride(0) >= x.size(1);
    const bool columns = x.stride(0) == 1 && x.stride(1) >= x.size(0);
    owner = rows || columns ? x : x.contiguous();
    const bool by_rows = rows || !columns;
    operation = by_rows ? CUBLAS_OP_N : CUBLAS_OP_T;
    // A single row or column may have any stride: cuBLAS wants it to be at least the length.
    stride = by_rows ? std::max(owner.stride(0), owner.size(1)) : std::max(owner.stride(1), owner.size(0));
  }
};

// Sums are fp32 to the end also where the device splits them among blocks.
class Fp32Sums {
 public:
  explicit Fp32Sums(cublasHandle_t handle) : handle_(handle) {
    TORCH_CUDABLAS_CHECK(cublasGetMathMode(handle_, &before_));
    TORCH_CUDABLAS_CHECK(cublasSetMathMode(handle_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
  }
  ~Fp32Sums() { cublasSetMathMode(handle_, before_); }
  Fp32Sums(const Fp32Sums&) = delete;
  Fp32Sums& operator=(const Fp32Sums&) = delete;

 private:
  cublasHandle_t handle_;
  cublasMath_t before_ = CUBLAS_DEFAULT_MATH;
};

// c = a b + beta c; c bf16 or fp32, its rows may be apart.
void multiply(Tensor c_RO, Tensor a_RK, Tensor b_KO, float beta) {
  const Launch launch("matrix_product", {c_RO});
  BOUGH_CHECK(a_RK.device() == c_RO.device() && b_KO.device() == c_RO.device(), "matrix_product: c on ",
              c_RO.device().str(), ", a on ", a_RK.device().str(), ", b on ", b_KO.device().str());
  const Factor a(a_RK), b(b_KO);
  const cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();  // on the current stream
  const Fp32Sums fp32_sums(handle);
  const float one = 1;
  TORCH_CUDABLAS_CHECK(cublasGemmEx_64(
      handle, b.operation, a.operation, b_KO.size(1), a_RK.size(0), a_RK.size(1), &one,
      b.owner.const_data_ptr(), CUDA_R_16BF, b.stride, a.owner.const_data_ptr(), CUDA_R_16BF, a.stride, &beta,
      c_RO.mutable_data_ptr(), c_RO.scalar_type() == at::kFloat ? CUDA_R_32F : CUDA_R_16BF,
      std::max(c_RO.stride(0), c_RO.size(1)), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

bool is_ours(Tensor a, Tensor b) {
  return a.scalar_type() == at::kBFloat16 && a.numel() > 0 && b.numel() > 0;
}

at::Tensor matrix_product_cuda(Tensor a_RK, Tensor b_KO, const std::optional<at::Tensor>& bias_O,
                               const std::optional<at::Tensor>& residual_RO) {
  if (!is_ours(a_RK, b_KO)) return matrix_product_reference(a_RK, b_KO, bias_O, residual_RO);
  auto c = at::empty({a_RK.size(0), b_KO.size(1)}, a_RK.options());
  if (residual_RO) c.copy_(*residual_RO);
  else if (bias_O) c.copy_(bias_O->expand_as(c));
  multiply(c, a_RK, b_KO, bias_O || residual_RO ? 1 : 0);
  if (residual_RO && bias_O) c.add_(*bias_O);
  return c;
}

void add_matrix_product_cuda_(Tensor c_RO, Tensor a_RK, Tensor b_KO, bool) {
  if (is_ours(a_RK, b_KO)) multiply(c_RO, a_RK, b_KO, 1);
  else add_matrix_product_reference_(c_RO, a_RK, b_KO);
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  m.impl("matrix_product", TORCH_FN(bough::matrix_product_cuda));
  m.impl("add_matrix_product_", TORCH_FN(bough::add_matrix_product_cuda_));
}
