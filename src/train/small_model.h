// A model of a few thousand weights, for tests that do not depend on the architecture.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>

#include <memory>

#include "models/model.h"

namespace bough {

// Random weights of order 1, which depend only on the arguments. The model has norms, biases, fused
// projections and a tied lm_head.
inline std::unique_ptr<Model> small_model(at::ScalarType type, uint64_t seed = 0, int64_t hidden_size = 16,
                                          at::Device device = at::kCPU) {
  ModelConfig config;
  config.family = &families::qwen2;
  config.vocab_size = 40;
  config.hidden_size = hidden_size;
  config.intermediate_size = 24;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 8;
  config.max_position_embeddings = 128;
  config.tie_word_embeddings = true;
  config.qkv_bias = true;
  auto model = make_model(config, type, device);
  auto generator = at::detail::createCPUGenerator(seed);
  for (Parameter* parameter : model->parameters())
    parameter->value.copy_(
        at::randn(parameter->value.sizes(), generator, at::TensorOptions().dtype(at::kDouble)));
  return model;
}

}  // namespace bough
