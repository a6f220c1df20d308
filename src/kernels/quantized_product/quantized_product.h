// Products with 8-bit weights, for generation: y[r,o] = scale[o] · sum_i x[r,i] · weight[o,i] (+ bias[o]) (+
// residual[r,o]).
//
// Weights are symmetric int8 with one scale for each output row: scale[o] = max_i |w[o,i]| / 127 and
// weight[o,i] = round(w[o,i] / scale[o]), ties to even, so that |w - scale · weight| <= scale / 2. A row's
// scale stands outside its sum: the product is of x as it is and of integers that bf16 holds exactly, summed
// in the accumulator type, scaled and rounded once. A decoding step reads each weight once: one byte instead
// of two or four.
//
// A row of y depends on its row of x alone, bit for bit: on the CPU every sum runs over i in an order of its
// own (fp64: libtorch's sums, which promise no such thing).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace bough {

// weight: [O, K], fp32, bf16 or fp64, contiguous. Overwrites quantized: [O, K] int8, and scale: [O] fp32,
// both contiguous, on weight's device. A row of zeros has scale 0; one with an infinity or NaN has scale NaN,
// and so makes y NaN.
void quantize_rows_(const at::Tensor& quantized_OK, const at::Tensor& scale_O, const at::Tensor& weight_OK);

// x: [R, K], fp32, bf16 or fp64; weight: [O, K] int8, scale: [O] fp32, both contiguous; bias: none or [O],
// residual: none or [R, O], contiguous and of x's dtype. Returns [R, O], x's dtype. No gradient.
at::Tensor quantized_product(const at::Tensor& x_RK, const at::Tensor& weight_OK, const at::Tensor& scale_O,
                             const std::optional<at::Tensor>& bias_O = std::nullopt,
                             const std::optional<at::Tensor>& residual_RO = std::nullopt);

// References: weights in the accumulator type and libtorch's product; any device.
void quantize_rows_reference_(const at::Tensor& quantized_OK, const at::Tensor& scale_O,
                              const at::Tensor& weight_OK);
at::Tensor quantized_product_reference(const at::Tensor& x_RK, const at::Tensor& weight_OK,
                                       const at::Tensor& scale_O, const std::optional<at::Tensor>& bias_O,
                                       const std::optional<at::Tensor>& residual_RO);

}  // namespace bough
