// bf16 products on CUDA by cuBLAS, summed in fp32. A product is either added in place to an fp32 tensor,
// without fp32 copies of the factors, or rounded once after a bias and a residual are added (cuBLASLt).
// libtorch's bf16 products may round partial sums to bf16, and with an fp32 result they allocate a new
// tensor. libtorch computes the fp32 and fp64 products.
//
// This library does not link cuBLAS. It uses the cuBLAS and the CUDA runtime that libtorch_cuda brings
// (cmake/cuda.cmake).
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/Exceptions.h>
#include <ATen/ops/empty.h>

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <tuple>

#include "base/mutex.h"
#include "kernels/common/cuda_launch.h"
#include "kernels/matrix_product/matrix_product.h"

namespace bough {

namespace {
// A matrix with contiguous rows or columns, as cuBLAS sees it. cuBLAS is column-major, so it sees a row-major
// matrix as the transpose. The row-major product c = a b is therefore computed as cT = bT aT.
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
    // A single row or column may have any stride, but cuBLAS requires a stride of at least the length.
    stride = by_rows ? std::max(owner.stride(0), owner.size(1)) : std::max(owner.stride(1), owner.size(0));
  }
};

// While this object exists, cuBLAS keeps sums in fp32 even if it splits them among CUDA thread blocks.
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

// c = a b + beta c. c is bf16 or fp32. Each row of c is contiguous; rows may have any stride.
void multiply(Tensor c_RO, Tensor a_RK, Tensor b_KO, float beta) {
  const c10::cuda::CUDAGuard device(c_RO.device());
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

template <class T, cublasStatus_t (*destroy)(T)>
struct Owned {
  T handle = nullptr;
  ~Owned() { destroy(handle); }
};
using Description = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// c = a b + residual + bias in one kernel; the residual and the bias are optional. The residual is read in
// place, while multiply() would need a copy of it in c. All tensors are bf16; c, residual and bias are
// contiguous. Returns false if cuBLASLt has no algorithm for the shape.
bool multiply_with_epilogue(Tensor c_RO, Tensor a_RK, Tensor b_KO, const at::Tensor* residual_RO,
                            const at::Tensor* bias_O) {
  const Launch launch("matrix_product", {c_RO});
  const Factor a(a_RK), b(b_KO);
  const auto rows = static_cast<uint64_t>(a_RK.size(0)), depth = static_cast<uint64_t>(a_RK.size(1)),
             columns = static_cast<uint64_t>(b_KO.size(1));
  Description product;
  TORCH_CUDABLAS_CHECK(cublasLtMatmulDescCreate(&product.handle, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const auto set = [&](cublasLtMatmulDescAttributes_t which, const auto& value) {
    TORCH_CUDABLAS_CHECK(cublasLtMatmulDescSetAttribute(product.handle, which, &value, sizeof(value)));
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, b.operation);
  set(CUBLASLT_MATMUL_DESC_TRANSB, a.operation);
  if (bias_O) {  // column-major c is [O, R]: one bias element per row
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias_O->const_data_ptr());
  }
  const auto layout = [](Layout& of, uint64_t height, uint64_t width, int64_t stride) {
    TORCH_CUDABLAS_CHECK(cublasLtMatrixLayoutCreate(&of.handle, CUDA_R_16BF, height, width, stride));
  };
  Layout of_b, of_a, of_c;
  b.operation == CUBLAS_OP_N ? layout(of_b, columns, depth, b.stride)
                             : layout(of_b, depth, columns, b.stride);
  a.operation == CUBLAS_OP_N ? layout(of_a, depth, rows, a.stride) : layout(of_a, rows, depth, a.stride);
  layout(of_c, columns, rows, c_RO.size(1));
  Preference preference;
  TORCH_CUDABLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference.handle));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t which, const auto& value) {
    TORCH_CUDABLAS_CHECK(
        cublasLtMatmulPreferenceSetAttribute(preference.handle, which, &value, sizeof(value)));
  };
  const size_t workspace_bytes = at::cuda::getCUDABlasLtWorkspaceSize();
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  // Keeps sums in fp32 even if an algorithm splits the inner dimension.
  const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  const void* const added = residual_RO ? residual_RO->const_data_ptr() : c_RO.const_data_ptr();
  const auto alignment = [](const void* data) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    return static_cast<uint32_t>(std::min<uintptr_t>(256, address & -address));
  };
  // Alignments of b, a, residual, c.
  const std::array<uint32_t, 4> alignments = {alignment(b.owner.const_data_ptr()),
                                              alignment(a.owner.const_data_ptr()), alignment(added),
                                              alignment(c_RO.const_data_ptr())};
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments[0]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments[1]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments[2]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments[3]);
  // The algorithm found for a shape is cached, because the heuristic takes longer than a small product.
  using Shape = std::tuple<int, uint64_t, uint64_t, uint64_t, int64_t, int64_t, int, int, bool, bool,
                           std::array<uint32_t, 4>>;
  const Shape shape{c_RO.device().index(),
                    rows,
                    depth,
                    columns,
                    a.stride,
                    b.stride,
                    a.operation,
                    b.operation,
                    bias_O != nullptr,
                    residual_RO != nullptr,
                    alignments};
  static Mutex mutex;
  static std::map<Shape, std::optional<cublasLtMatmulAlgo_t>> found GUARDED_BY(mutex);
  const cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  std::optional<cublasLtMatmulAlgo_t> algorithm;
  {
    const MutexLock lock(mutex);
    const auto [place, is_new] = found.try_emplace(shape);
    if (is_new) {
      cublasLtMatmulHeuristicResult_t result{};
      int count = 0;
      const cublasStatus_t status =
          cublasLtMatmulAlgoGetHeuristic(handle, product.handle, of_b.handle, of_a.handle, of_c.handle,
                                         of_c.handle, preference.handle, 1, &result, &count);
      if (status == CUBLAS_STATUS_SUCCESS && count > 0) place->second = result.algo;
    }
    algorithm = place->second;
  }
  if (!algorithm) return false;
  const float one = 1, beta = residual_RO ? 1 : 0;
  TORCH_CUDABLAS_CHECK(cublasLtMatmul(handle, product.handle, &one, b.owner.const_data_ptr(), of_b.handle,
                                      a.owner.const_data_ptr(), of_a.handle, &beta, added, of_c.handle,
                                      c_RO.mutable_data_ptr(), of_c.handle, &*algorithm,
                                      at::cuda::getCUDABlasLtWorkspace(), workspace_bytes, launch.stream()));
  return true;
}

bool is_ours(Tensor a, Tensor b) {
  return a.scalar_type() == at::kBFloat16 && a.numel() > 0 && b.numel() > 0;
}

at::Tensor matrix_product_cuda(Tensor a_RK, Tensor b_KO, const std::optional<at::Tensor>& bias_O,
                               const std::optional<at::Tensor>& residual_RO) {
  if (!is_ours(a_RK, b_KO)) return matrix_product_reference(a_RK, b_KO, bias_O, residual_RO);
  auto c = at::empty({a_RK.size(0), b_KO.size(1)}, a_RK.options());
  const auto optional = [](const std::optional<at::Tensor>& x) { return x ? &*x : nullptr; };
  if ((bias_O || residual_RO) &&
      multiply_with_epilogue(c, a_RK, b_KO, optional(residual_RO), optional(bias_O)))
    return c;
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
  bough::register_cuda_kernel(m, "matrix_product", TORCH_FN(bough::matrix_product_cuda));
  bough::register_cuda_kernel(m, "add_matrix_product_", TORCH_FN(bough::add_matrix_product_cuda_));
}
