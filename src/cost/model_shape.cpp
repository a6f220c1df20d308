#include "cost/model_shape.h"

#include "base/error.h"

namespace bough {

const char* dtype_name(at::ScalarType dtype) {
  BOUGH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kDouble, "a model of ",
              c10::toString(dtype));
  return dtype == at::kFloat ? "fp32" : dtype == at::kBFloat16 ? "bf16" : "fp64";
}

ModelShape model_shape(const ModelConfig& config, at::ScalarType dtype) {
  ModelShape shape;
  shape.name = "model";
  shape.num_layers = config.num_layers;
  shape.hidden_size = config.hidden_size;
  shape.intermediate_size = config.intermediate_size;
  shape.num_heads = config.num_heads;
  shape.num_kv_heads = config.num_kv_heads;
  shape.head_dim = config.head_dim;
  shape.vocab_size = config.vocab_size;
  shape.tied_head = config.tie_word_embeddings;
  shape.qk_norm = config.qk_norm;
  shape.qkv_bias = config.qkv_bias;
  shape.output_bias = config.output_bias;
  set_dtype(shape, dtype_name(dtype));
  return shape;
}

}  // namespace bough
