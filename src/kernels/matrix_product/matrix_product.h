// Matrix products of the linear layers and the head.
//
//   matrix_product:       c[r,o]  = sum_k a[r,k] · b[k,o] (+ bias[o]) (+ residual[r,o])
//                         overwritten, a's dtype
//   add_matrix_product_:  c[r,o] += sum_k a[r,k] · b[k,o]
//                         accumulated in the accumulator type, and rounded once where c is of a's dtype
//
// Products and sums are of the accumulator type, rounded once (a residual in fp32 after the sum, in bf16 with
// it). Rows or columns of a and b are contiguous: a weight's transposed view is as good as the weight. bf16
// is computed here on a CPU with AMX tiles or AVX512-BF16, fp32 on one with AVX-512 that is not Intel's (MKL
// reaches half of such a CPU's rate); all else is libtorch's.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace bough {

// a: [R, K]; b: [K, O], a's dtype (fp32, bf16, fp64) and device; bias: none or [O], residual: none or [R, O],
// both contiguous and of a's dtype. Returns [R, O].
at::Tensor matrix_product(const at::Tensor& a_RK, const at::Tensor& b_KO,
                          const std::optional<at::Tensor>& bias_O = std::nullopt,
                          const std::optional<at::Tensor>& residual_RO = std::nullopt);

// matrix_product on a CPU that has_tiles() for the type, in a way that makes a row of c depend on its row of
// a only: the same bits with any other rows, any number of them, on any number of threads.
at::Tensor batch_invariant_product(const at::Tensor& a_RK, const at::Tensor& b_KO,
                                   const std::optional<at::Tensor>& bias_O = std::nullopt,
                                   const std::optional<at::Tensor>& residual_RO = std::nullopt);

// c: [R, O] of the accumulator type of a and b or of their own; its rows contiguous, and may be apart.
// batch_invariant: of such a c a row depends on its row of a only (batch_invariant_product).
void add_matrix_product_(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO,
                         bool batch_invariant = false);

// Whether products of that type on this CPU are computed here.
bool products_are_ours(at::ScalarType type);

// What is computed here, for tests and measurements: fp32 and bf16 on a CPU that has_tiles() for them. Every
// sum runs over k in ascending order (bf16: in steps of a tile's depth) whichever factor is packed or turned,
// padded with zeros: hence batch_invariant_product.
bool has_tiles(at::ScalarType type);
at::Tensor matrix_product_tiles(const at::Tensor& a_RK, const at::Tensor& b_KO,
                                const std::optional<at::Tensor>& bias_O = std::nullopt,
                                const std::optional<at::Tensor>& residual_RO = std::nullopt);
void add_matrix_product_tiles_(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO);

// References: libtorch's products; any device and dtype.
at::Tensor matrix_product_reference(const at::Tensor& a_RK, const at::Tensor& b_KO,
                                    const std::optional<at::Tensor>& bias_O,
                                    const std::optional<at::Tensor>& residual_RO);
void add_matrix_product_reference_(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO);

}  // namespace bough
