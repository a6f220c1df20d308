// A trainable tensor and the gradient that our ops accumulate into.
//
// Parameters are not autograd inputs (libtorch's own path would round dW to bf16 at every tree node): the
// backward of `linear`, `embedding`, `rms_norm` adds (beta = 1) into `main_grad`, in the accumulator type.
//
// A matrix that only generates may be quantized: int8 with a scale for each row (kernels/quantized_product).
// It has no gradient.
//
// A parameter without a main_grad is frozen: what computes with it passes gradients on to its inputs, and
// computes none of its own.
//
// A matrix may have an adapter (Hu et al. 2021, "LoRA"): to its rows [begin, end) of each slice belongs the
// term scale · B A, which is never added to the matrix. A of all slices are rows of one matrix, as B are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace bough {

// The accumulator type of a compute type: fp32 for fp32 and bf16, fp64 for fp64.
inline at::ScalarType accumulator_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

struct Parameter {
  // Projections that read the same input are stored as one matrix (q, k, v; gate and up): one product instead
  // of three. Each keeps its Hugging Face name as a range of rows.
  struct Part {
    std::string name;
    int64_t begin;  // rows [begin, end) of value
    int64_t end;
    // Of a tensor that several ranks share (models/tensor_parallel.h) this is a piece: the elements from
    // `first` on along `dimension`, which has `whole`. 0: all of the tensor is here.
    int64_t dimension = 0, first = 0, whole = 0;
    int64_t copies = 1;        // ranks that hold this very piece
    bool sums_copies = false;  // their gradients are parts of the piece's, else each is the whole
  };

  at::Tensor value;      // fp32, bf16 or fp64, contiguous; [rows, columns] or [rows]
  at::Tensor main_grad;  // accumulator type, value's shape; undefined until training asks for it
  std::vector<Part> parts;
  at::Tensor scale = {};  // of a quantized matrix, whose value is int8: fp32, [rows]; else undefined

  struct AdapterSlice {
    int64_t begin, end;  // rows of value, and columns of what the product with it returns
  };
  // Empty, or A: [slices · rank, columns] and B: [rows of all slices in turn, rank], one part a slice each.
  std::vector<Parameter> adapter = {};
  std::vector<AdapterSlice> adapter_slices = {};
  double adapter_scale = 1;

  bool quantized() const { return scale.defined(); }

  at::Tensor part_value(const Part& part) const { return value.narrow(0, part.begin, part.end - part.begin); }
  at::Tensor part_grad(const Part& part) const {
    return main_grad.narrow(0, part.begin, part.end - part.begin);
  }
};

}  // namespace bough
