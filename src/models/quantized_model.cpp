#include "models/quantized_model.h"

#include <ATen/ops/empty.h>

#include "kernels/quantized_product/quantized_product.h"

namespace bough {

void quantize(Model& model) {
  for (Parameter* matrix : model.layer_matrices()) {
    if (matrix->quantized()) continue;
    const auto options = matrix->value.options();
    const auto quantized = at::empty(matrix->value.sizes(), options.dtype(at::kChar));
    matrix->scale = at::empty({matrix->value.size(0)}, options.dtype(at::kFloat));
    quantize_rows_(quantized, matrix->scale, matrix->value);
    matrix->value = quantized;
    matrix->main_grad.reset();
  }
}

QuantizedModel::QuantizedModel(const Model& source) : source_(source), model_(source.share()) {
  quantize(*model_);
}

void QuantizedModel::update() {
  const auto now = source_.share();  // a const model gives no access to its parameters; this copy does
  const auto matrices = model_->layer_matrices(), sources = now->layer_matrices();
  if (now->adapter_elements() > 0) return;  // the adapters' tensors are shared, and only they change
  for (size_t i = 0; i < matrices.size(); ++i)
    quantize_rows_(matrices[i]->value, matrices[i]->scale, sources[i]->value);
}

bool is_quantized(const Model& model) {
  const auto shared = model.share();
  const auto matrices = shared->layer_matrices();
  return !matrices.empty() && matrices.front()->quantized();
}

MatrixBytes layer_matrix_bytes(const Model& model) {
  const auto shared = model.share();
  MatrixBytes bytes;
  const auto held = [](const Parameter& matrix) {
    return static_cast<int64_t>(matrix.value.nbytes() + (matrix.quantized() ? matrix.scale.nbytes() : 0));
  };
  for (const Parameter* matrix : shared->expert_matrices()) bytes.of_experts += held(*matrix);
  for (const Parameter* matrix : shared->layer_matrices()) {
    bytes.held += held(*matrix);
    bytes.unquantized += matrix->value.numel() * static_cast<int64_t>(c10::elementSize(model.dtype()));
  }
  return bytes;
}

}  // namespace bough
