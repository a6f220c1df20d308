// A model that generates with 8-bit weights: the matrices of its layers are int8 with one scale per matrix
// row (kernels/quantized_product). Embedding, lm_head, norms and biases are not quantized. They are shared
// with the source model.
//
// The scheme:
//   - symmetric, because weights are centered around 0
//   - one scale per matrix row, because a dot product is then the scale times a sum of integers
//   - no quantization of the lm_head, because its error goes directly into the logits
#pragma once

#include <cstdint>
#include <memory>

#include "models/model.h"

namespace bough {

class QuantizedModel {
 public:
  // Quantizes in the constructor. `source` must outlive this object.
  explicit QuantizedModel(const Model& source);

  // Quantizes the source's weights again, in place. Call it after they have changed.
  void update();

  const Model& model() const { return *model_; }  // inference only: run it with autograd off

 private:
  const Model& source_;
  std::unique_ptr<Model> model_;
};

// Permanently replaces the matrices of the model's layers by quantized ones. Matrices that no other model
// shares are freed.
void quantize(Model& model);

bool is_quantized(const Model& model);

// Bytes of the layers' matrices. held: as stored, scales included. of_experts: the part of it in experts, of
// which a pass reads those that its tokens use. unquantized: in the model's dtype.
struct MatrixBytes {
  int64_t held = 0, unquantized = 0, of_experts = 0;
};
MatrixBytes layer_matrix_bytes(const Model& model);

}  // namespace bough
