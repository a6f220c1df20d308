// The decoder that Qwen3, Qwen2.5 and Llama 3 share.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "models/model.h"

namespace bough {

std::unique_ptr<Model> make_decoder(const ModelConfig& config, const at::TensorOptions& options);

}  // namespace bough
