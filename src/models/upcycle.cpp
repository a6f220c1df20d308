#include "models/upcycle.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>

#include <map>
#include <string>

#include "base/error.h"
#include "models/checkpoint.h"

namespace bough {

namespace {

ModelConfig mixture_of(const ModelConfig& dense, const UpcycleOptions& options) {
  const std::string family = dense.family->name;
  if ((dense.family != &families::llama && dense.family != &families::mistral) || dense.qkv_bias ||
      dense.output_bias || dense.mlp_bias || dense.activation != GateActivation::kSilu)
    throw UserError(str("got a ", family,
                        " model; expected a Llama or Mistral without biases, whose layers a Mixtral has"));
  if (options.experts_per_token > options.num_experts)
    throw UserError(str("--experts-per-token: got ", options.experts_per_token, ", expected at most ",
                        options.num_experts, " (--experts)"));
  if (dense.intermediate_size % options.num_experts != 0)
    throw UserError(str("--experts: got ", options.num_experts, ", expected a divisor of ",
                        dense.intermediate_size, ", the model's intermediate_size"));
  ModelConfig mixture = dense;
  mixture.family = &families::mixtral;
  mixture.num_experts = options.num_experts;
  mixture.experts_per_token = options.experts_per_token;
  mixture.intermediate_size = mixture.expert_intermediate_size =
      dense.intermediate_size / options.num_experts;
  mixture.renormalises_experts = true;
  Json json = write_model_config(mixture);
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id", "sliding_window"})
    if (dense.source.is_object() && dense.source.contains(key)) json[key] = dense.source[key];
  mixture.source = json;
  return mixture;
}

}  // namespace

std::unique_ptr<Model> upcycle(Model& dense, const UpcycleOptions& options) {
  const ModelConfig config = mixture_of(dense.config(), options);
  auto mixture = make_model(config, dense.dtype());
  std::map<std::string, at::Tensor> from;
  for (const auto& [name, tensor] : named_weights(dense)) from[name] = tensor;
  const Experts& names = config.family->experts;
  auto generator = at::detail::createCPUGenerator(options.seed);
  const int64_t size = config.expert_intermediate_size;
  for (const auto& [name, tensor] : named_weights(*mixture)) {
    const size_t block = name.find(std::string(".") + names.block + ".");
    if (block == std::string::npos) {
      tensor.copy_(from.at(name));
      continue;
    }
    const std::string layer = name.substr(0, block),
                      rest = name.substr(block + std::string(names.block).size() + 2);
    if (rest == "gate.weight") {
      tensor.copy_(at::randn(tensor.sizes(), generator, at::TensorOptions().dtype(at::kDouble))
                       .mul_(options.router_noise));
      continue;
    }
    const size_t dot = rest.find('.', std::string("experts.").size());
    const int64_t first = size * std::stoll(rest.substr(std::string("experts.").size()));
    const std::string matrix = rest.substr(dot + 1);
    const auto of_dense = [&](const char* projection) {
      return from.at(str(layer, ".mlp.", projection, ".weight"));
    };
    if (matrix == str(names.gate, ".weight")) tensor.copy_(of_dense("gate_proj").narrow(0, first, size));
    else if (matrix == str(names.up, ".weight")) tensor.copy_(of_dense("up_proj").narrow(0, first, size));
    else if (matrix == str(names.down, ".weight"))
      tensor.copy_(of_dense("down_proj").narrow(1, first, size) * static_cast<double>(config.num_experts));
    else BOUGH_CHECK(false, "unexpected tensor ", name);
  }
  return mixture;
}

}  // namespace bough
