#include "models/model.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/matrix_product/matrix_product.h"
#include "models/tensor_parallel.h"

namespace bough {

Model::Model(const ModelConfig& config, Communicator* tensor_ranks)
    : whole_config_(config),
      tensor_ranks_(tensor_ranks && tensor_ranks->size() > 1 ? tensor_ranks : nullptr) {
  config_ = tensor_ranks_ ? shard_config(config, tensor_ranks_->rank(), tensor_ranks_->size()) : config;
}

at::Tensor Model::logits(const at::Tensor& hidden_RD) const {
  const at::Tensor own_RV = own_logits(hidden_RD);
  if (!tensor_ranks_) return own_RV;
  const Parameter::Part part{
      .name = {}, .begin = 0, .end = 0, .dimension = 1, .first = first_token(), .whole = config_.vocab_size};
  Parameter columns;
  columns.value = own_RV;
  return gather_pieces(own_RV, columns, part, *tensor_ranks_).to(own_RV.device());
}

at::Tensor Model::own_logits(const at::Tensor& hidden_RD) const {
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
  BOUGH_CHECK(!model.tensor_ranks(), "a rank's part of a model is loaded, not drawn");
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
