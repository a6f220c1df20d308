// A trainable tensor and its gradient `main_grad`.
//
// Autograd does not track parameters, because libtorch would round dW to bf16 in every pass. Instead, the
// backward functions of `linear`, `embedding` and `rms_norm` add to `main_grad` in the accumulator type.
//
// A matrix used only for generation may be quantized: int8 with one scale per row
// (kernels/quantized_product). It has no gradient.
//
// A parameter without main_grad is frozen: ops compute the gradients of their inputs, but none for it.
//
// A matrix may have an adapter (Hu et al. 2021, "LoRA"). Each slice of the adapter covers rows [begin, end)
// of the matrix and acts as if scale · B A were added to these rows. The sum is never stored. The A of all
// slices are stacked in one matrix, and so are the B.
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
  // Projections that read the same input (q, k, v; gate and up) are stored as one matrix, so that one product
  // computes all. A part is the range of rows of one projection, under its Hugging Face name.
  struct Part {
    std::string name;
    int64_t begin;  // rows [begin, end) of value
    int64_t end;
    // The shard of a tensor that is divided among ranks (models/tensor_parallel.h). It has the elements from
    // `first` on along `dimension`, whose size in the unsharded tensor is `whole`. whole = 0: not divided.
    int64_t dimension = 0, first = 0, whole = 0;
    int64_t copies = 1;        // number of ranks that hold this same shard
    bool sums_copies = false;  // true: the copies' gradients must be summed; false: each is the full gradient
  };

  at::Tensor value;      // fp32, bf16 or fp64, contiguous; [rows, columns] or [rows]
  at::Tensor main_grad;  // accumulator type, value's shape; undefined if frozen, or if only used to generate
  std::vector<Part> parts;
  at::Tensor scale = {};  // fp32 [rows] if the matrix is quantized (value is int8); else undefined

  struct AdapterSlice {
    int64_t begin, end;  // rows of `value`, and therefore columns of the product's result
  };
  // Empty if there is no adapter. Otherwise {A, B}, each with one part per slice: A is [slices · rank,
  // columns], B is [rows of all slices, rank].
  std::vector<Parameter> adapter = {};
  std::vector<AdapterSlice> adapter_slices = {};
  double adapter_scale = 1;
  // Empty, or one Parameter with only the three fields above: a frozen adapter that acts beside `adapter`. It
  // uses the tensors of another model's adapter, which may be trained (models/lora.h).
  std::vector<Parameter> frozen_adapter = {};

  bool quantized() const { return scale.defined(); }

  at::Tensor part_value(const Part& part) const { return value.narrow(0, part.begin, part.end - part.begin); }
  at::Tensor part_grad(const Part& part) const {
    return main_grad.narrow(0, part.begin, part.end - part.begin);
  }
};

}  // namespace bough
