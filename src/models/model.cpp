#include "models/model.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "kernels/experts/experts.h"
#include "kernels/linear/linear.h"
#include "kernels/matrix_product/matrix_product.h"
#include "models/tensor_parallel.h"

namespace bough {

at::Tensor AttentionContext::route(int64_t layer, const at::Tensor& logits_TE, int64_t num_chosen) {
  static_cast<void>(layer);
  return choose_experts(logits_TE, num_chosen);
}

Model::Model(const ModelConfig& config, const at::TensorOptions& options, const ModelRanks& ranks)
    : config_(config),
      unsharded_config_(config),
      stage_{.num_layers = config.num_layers},
      dtype_(at::typeMetaToScalarType(options.dtype())),
      device_(options.device()) {
  if (ranks.tensor && ranks.tensor->size() > 1) {
    ranks_.tensor = ranks.tensor;
    config_ = shard_config(config_, ranks.tensor->rank(), ranks.tensor->size());
  }
  if (ranks.stages && ranks.stages->size() > 1) {
    BOUGH_CHECK(ranks.stages_back && ranks.stages_back->rank() == ranks.stages->rank(),
                "stages need a communicator for each direction, stages_back with the same rank as stages");
    ranks_.stages = ranks.stages;
    ranks_.stages_back = ranks.stages_back;
    stage_ = stage_of(config, ranks.stages->rank(), ranks.stages->size());
    config_ = stage_config(config_, stage_);
  }
}

at::Tensor Model::logits(const at::Tensor& hidden_RD) const {
  const at::Tensor own_RV = own_logits(hidden_RD);
  if (!ranks_.tensor) return own_RV;
  const Parameter::Part part{
      .name = {}, .begin = 0, .end = 0, .dimension = 1, .first = first_token(), .whole = config_.vocab_size};
  Parameter columns;
  columns.value = own_RV;
  return gather_pieces(own_RV, columns, part, *ranks_.tensor).to(own_RV.device());
}

at::Tensor Model::own_logits(const at::Tensor& hidden_RD) const {
  return linear_forward(hidden_RD, head(), nullptr, batch_invariant_, std::nullopt, logits_dtype());
}

at::ScalarType Model::logits_dtype() const {
  return head_type_ == HeadType::kAccumulator ? accumulator_type(dtype()) : dtype();
}

std::optional<std::string> Model::why_not_batch_invariant() const {
  if (!device().is_cpu()) return "it needs the device cpu";
  if (dtype() != at::kFloat && dtype() != at::kBFloat16) return "it needs the dtype fp32 or bf16";
  if (!has_tiles(dtype()))
    return dtype() == at::kFloat ? "in fp32 it needs a CPU with AVX2"
                                 : "in bf16 it needs a CPU with AVX512-BF16 or AMX; use fp32";
  return std::nullopt;
}

void Model::set_batch_invariant(bool on) {
  if (const auto reason = why_not_batch_invariant(); on && reason)
    throw UserError(str("batch_invariant: ", *reason));
  batch_invariant_ = on;
}

void Model::set_head_type(HeadType type) {
  if (type == HeadType::kAccumulator && dtype() != at::kBFloat16)
    throw UserError(str("head_dtype: got fp32 with the dtype ", c10::toString(dtype()),
                        ", where it has no effect; expected model, or the dtype bf16"));
  if (type == HeadType::kAccumulator && !device().is_cpu())
    throw UserError(
        str("head_dtype: got fp32 on ", device().str(),
            ", but logits in fp32 are built for the CPU only; expected model, or the device cpu"));
  head_type_ = type;
}

void Model::set_precisions(const Precisions& precisions) {
  set_router_type(precisions.router);
  set_head_type(precisions.head);
}

void Model::set_router_type(RouterType type) {
  if (type == RouterType::kModel && !config_.is_mixture())
    throw UserError(str("router_dtype: got model for ", config_.family->name,
                        ", which has no router; expected fp32, or a mixture of experts"));
  if (type == RouterType::kModel && dtype() != at::kBFloat16)
    throw UserError(str("router_dtype: got model with the dtype ", c10::toString(dtype()),
                        ", where it has no effect; expected fp32, or the dtype bf16"));
  router_type_ = type;
}

std::vector<Parameter*> Model::trained_parameters() {
  if (adapter_elements_ == 0) return parameters();
  std::vector<Parameter*> adapters;
  for (Parameter* matrix : adaptable_matrices())
    for (Parameter& parameter : matrix->adapter) adapters.push_back(&parameter);
  return adapters;
}

std::vector<Parameter*> Model::adaptable_matrices() {
  std::vector<Parameter*> matrices = layer_matrices();
  const std::vector<Parameter*> experts = expert_matrices();
  std::erase_if(matrices, [&](Parameter* each) { return std::ranges::find(experts, each) != experts.end(); });
  if (stage_.is_last() && config_.computes_logits)
    if (const Parameter& matrix = head(); matrix.value.defined())
      matrices.push_back(const_cast<Parameter*>(&matrix));  // the model itself is not const here
  return matrices;
}

Parameter* Model::trained_at_both_ends() {
  const bool has_it = stage_.size > 1 && (stage_.is_first() || stage_.is_last());
  if (!has_it || !config_.tie_word_embeddings || !config_.computes_logits) return nullptr;
  return adapter_elements_ == 0 ? parameters().front() : nullptr;
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
  BOUGH_CHECK(model.is_unsharded(), "only an unsharded model can be initialized; a shard is loaded");
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
