// Matrix products of the linear layers and the lm_head. K is the inner dimension, also called depth.
//
//   matrix_product:       c[r,o]  = sum_k a[r,k] · b[k,o] (+ bias[o]) (+ residual[r,o])
//                         c is overwritten and has a's dtype
//   add_matrix_product_:  c[r,o] += sum_k a[r,k] · b[k,o]
//                         c has a's dtype or its accumulator type
//
// Products and sums are computed in the accumulator type and rounded once to c's dtype. A bf16 residual is
// added before this rounding, an fp32 residual after it. Rows or columns of a and b must be contiguous, so a
// transposed view of a weight is not copied. Implementations:
//   bf16  on a GPU: cuBLAS with fp32 sums (matrix_product_cuda_ops.cpp)
//   bf16  on a CPU with AMX tiles, or with AVX512-BF16 and not Intel's (has_fast_bf16(), isa.h): our kernels
//   bf16  on other CPUs: blocks are copied to fp32, which is multiplied as below. Few rows are multiplied by
//         our kernels if the CPU has AVX512-BF16: reading the weight takes longer than the product
//   fp32  on a CPU with AVX2 or AVX-512 that is not Intel's: our kernels (MKL is at half rate in AVX-512)
//   all others: libtorch
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/parameter.h"

namespace bough {

// a: [R, K], fp32, bf16 or fp64; b: [K, O], same dtype and device; bias: nullopt or [O]; residual: nullopt or
// [R, O], both contiguous and of a's dtype. Returns [R, O], a's dtype.
at::Tensor matrix_product(const at::Tensor& a_RK, const at::Tensor& b_KO,
                          const std::optional<at::Tensor>& bias_O = std::nullopt,
                          const std::optional<at::Tensor>& residual_RO = std::nullopt);

// Like matrix_product, but only on a CPU with has_tiles(dtype), else throws. The bits of a row of c depend
// only on b and the same row of a, not on other rows of a or the number of threads.
at::Tensor batch_invariant_product(const at::Tensor& a_RK, const at::Tensor& b_KO,
                                   const std::optional<at::Tensor>& bias_O = std::nullopt,
                                   const std::optional<at::Tensor>& residual_RO = std::nullopt);

// c: [R, O] in the dtype of a and b or in their accumulator type. Each row of c is contiguous; rows may have
// any stride. batch_invariant: sums as batch_invariant_product does; ignored unless c is on a CPU with
// has_tiles(a's dtype).
void add_matrix_product_(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO,
                         bool batch_invariant = false);

// Adds the term of weight.adapter (kernels/parameter.h) to y, [R, O]. With u = scale · x · Aᵀ and slice s of
// the adapter: y[:, s] += u[:, s] · B_sᵀ. For a decoding step: two parallel loops, where products one by one
// would be a loop and several small tensors for each slice. Rounds as they do: u to bf16, times scale, to
// bf16 again, and each y once. Returns false and does nothing unless x and y are bf16 on a CPU whose bf16
// products are ours (or has_tiles(), if batch_invariant), with at most 256 rows.
bool add_adapter_product_(const at::Tensor& y_RO, const at::Tensor& x_RK, const Parameter& weight,
                          bool batch_invariant);

// Whether our kernels, not libtorch's, compute products of this type on this CPU.
bool products_are_ours(at::ScalarType type);
// Whether products of this type, and training's dense attention, multiply fp32 copies on this CPU.
bool copies_to_fp32(at::ScalarType type);

// Tests and benchmarks call our CPU kernels directly, also if products_are_ours() is false. has_tiles() is
// true for fp32 and bf16 if the CPU can run the kernels. Every sum adds in ascending order of k (bf16: of the
// 32 k of a tile at a time), whichever factor is packed or transposed. batch_invariant_product relies on
// this.
bool has_tiles(at::ScalarType type);
at::Tensor matrix_product_tiles(const at::Tensor& a_RK, const at::Tensor& b_KO,
                                const std::optional<at::Tensor>& bias_O = std::nullopt,
                                const std::optional<at::Tensor>& residual_RO = std::nullopt);
void add_matrix_product_tiles_(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO);

// References for any device and dtype: libtorch's products.
at::Tensor matrix_product_reference(const at::Tensor& a_RK, const at::Tensor& b_KO,
                                    const std::optional<at::Tensor>& bias_O,
                                    const std::optional<at::Tensor>& residual_RO);
void add_matrix_product_reference_(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO);

}  // namespace bough
