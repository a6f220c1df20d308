// A model that generates with 8-bit weights: the matrices of its layers are int8 with a scale for each row
// (kernels/quantized_product). Embedding, head, norms and biases stay as they are, shared with the model it
// is made from.
//
// Which scheme, and why: symmetric, because weights are centred; a scale a row, because it then stands
// outside the sum, so that integers are multiplied as they are; the head not, because its error goes into the
// logits undamped.
#pragma once

#include <cstdint>
#include <memory>

#include "models/model.h"

namespace bough {

class QuantizedModel {
 public:
  // Quantizes in the constructor. `source` must outlive this object.
  explicit QuantizedModel(const Model& source);

  // Quantizes the source's weights again, in place, after they have changed.
  void update();

  const Model& model() const { return *model_; }  // runs where no graph is recorded

 private:
  const Model& source_;
  std::unique_ptr<Model> model_;
};

// Replaces the matrices of the model's layers by quantized ones, for good; the memory of those that no other
// model shares is released.
void quantize(Model& model);

bool is_quantized(const Model& model);

// Bytes of the layers' matrices as the model has them, scales included, and as they are in its own dtype.
struct MatrixBytes {
  int64_t held = 0, unquantized = 0;
};
MatrixBytes layer_matrix_bytes(const Model& model);

}  // namespace bough
