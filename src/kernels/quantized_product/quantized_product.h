// Products with 8-bit weights, for generation:
//   y[r,o] = scale[o] · sum_i x[r,i] · weight[o,i] (+ bias[o]) (+ residual[r,o])
//
// w is the original weight. It is quantized to int8 with one scale per output o: scale[o] = max_i |w[o,i]| /
// 127 and weight[o,i] = round(w[o,i] / scale[o]), ties to even, so that |w - scale · weight| <= scale / 2.
// bf16 holds these integers exactly. Products are summed in the accumulator type, then scaled and rounded
// once. A decoding step reads each weight once: one byte instead of two or four.
//
// On the CPU in fp32 and bf16, the bits of a row of y depend only on the same row of x, besides the weights,
// because the order of each sum over i is fixed. libtorch computes fp64 and does not guarantee this.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace bough {

// Quantizes weight: [O, K], fp32, bf16 or fp64, contiguous. Overwrites quantized: [O, K] int8, and scale: [O]
// fp32, both contiguous and on weight's device. If weight[o] is all zeros, scale[o] is 0. If weight[o] has an
// infinity or NaN, scale[o] is NaN, which makes column o of y NaN.
void quantize_rows_(const at::Tensor& quantized_OK, const at::Tensor& scale_O, const at::Tensor& weight_OK);

// x: [R, K], fp32, bf16 or fp64; weight: [O, K] int8 and scale: [O] fp32, both contiguous; bias: nullopt or
// [O]; residual: nullopt or [R, O], both contiguous and of x's dtype. Returns [R, O], x's dtype. No
// gradient.
at::Tensor quantized_product(const at::Tensor& x_RK, const at::Tensor& weight_OK, const at::Tensor& scale_O,
                             const std::optional<at::Tensor>& bias_O = std::nullopt,
                             const std::optional<at::Tensor>& residual_RO = std::nullopt);

// References for any device: libtorch's product with the weights in the accumulator type.
void quantize_rows_reference_(const at::Tensor& quantized_OK, const at::Tensor& scale_O,
                              const at::Tensor& weight_OK);
at::Tensor quantized_product_reference(const at::Tensor& x_RK, const at::Tensor& weight_OK,
                                       const at::Tensor& scale_O, const std::optional<at::Tensor>& bias_O,
                                       const std::optional<at::Tensor>& residual_RO);

}  // namespace bough
