#include "models/model.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/matrix_product/matrix_product.h"

namespace bough {

at::Tensor Model::logits(const at::Tensor& hidden_RD) const {
  return batch_invariant_ ? batch_invariant_product(hidden_RD, head().value.t())
                          : matrix_product(hidden_RD, head().value.t());
}

std::optional<std::string> Model::why_not_batch_invariant() const {
  if (!device().is_cpu()) return "it needs the device cpu";
  if (dtype() != at::kFloat && dtype() != at::kBFloat16) return "it needs the dtype fp32 or bf16";
  if (!has_tiles(dtype()))
    return dtype() == at::kFloat ? "in fp32 it needs a CPU with AVX-512"
                                 : "in bf16 it needs a CPU with AVX512-BF16 or AMX; use fp32";
  return std::nullopt;
}

void Model::set_batch_invariant(bool on) {
  if (const auto reason = why_not_batch_invariant(); on && reason)
    throw UserError(str("batch_invariant: ", *reason));
  batch_invariant_ = on;
}

std::vector<Parameter*> Model::trained_parameters() {
  std::vector<Parameter*> adapters;
  for (Parameter* matrix : layer_matrices())
    for (Parameter& parameter : matrix->adapter) adapters.push_back(&parameter);
  return adapters.empty() ? parameters() : adapters;
}

void Model::allocate_gradients() {
  for (Parameter* parameter : trained_parameters())
    if (!parameter->main_grad.defined())
      parameter->main_grad =
          at::zeros_like(parameter->value, parameter->value.options().dtype(accumulator_type(dtype())));
}

void Model::zero_gradients() {
  for (Parameter* parameter : trained_parameters())
    if (parameter->main_grad.defined()) parameter->main_grad.zero_();
}

void initialise(Model& model, uint64_t seed) {
  constexpr double kInitializerRange = 0.02;  // transformers' initializer_range
  auto generator = at::detail::createCPUGenerator(seed);
  for (Parameter* parameter : model.parameters())
    for (const auto& part : parameter->parts) {
      auto value = parameter->part_value(part);
      if (part.name.ends_with(".bias")) value.zero_();
      else if (part.name.find("norm.weight") != std::string::npos)
        value.fill_(1 - model.config().norm_weight_offset);
      else
        value.copy_(at::randn(value.sizes(), generator, at::TensorOptions().dtype(at::kFloat)) *
                    kInitializerRange);
    }
}

}  // namespace bough
