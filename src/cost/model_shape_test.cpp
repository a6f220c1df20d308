#include "cost/model_shape.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "models/model.h"

namespace bough {
namespace {

TEST(ModelShape, CountsTheParametersOfEveryArchitecture) {
  for (const bool tied : {false, true})
    for (const auto architecture : {Architecture::kQwen3, Architecture::kQwen2, Architecture::kLlama}) {
      ModelConfig config;
      config.architecture = architecture;
      config.vocab_size = 50;
      config.hidden_size = 24;
      config.intermediate_size = 40;
      config.num_layers = 3;
      config.num_heads = 4;
      config.num_kv_heads = 2;
      config.head_dim = 8;
      config.max_position_embeddings = 64;
      config.tie_word_embeddings = tied;
      config.qk_norm = architecture == Architecture::kQwen3;
      config.qkv_bias = architecture != Architecture::kQwen3;
      config.output_bias = architecture == Architecture::kLlama;
      const auto shape = model_shape(config, at::kBFloat16);
      const auto model = make_model(config, at::kBFloat16);
      model->allocate_gradients();
      int64_t count = 0, bytes = 0;
      for (const auto* parameter : model->parameters()) {
        count += parameter->value.numel();
        bytes += static_cast<int64_t>(parameter->value.nbytes() + parameter->main_grad.nbytes());
      }
      EXPECT_EQ(shape.num_parameters(), count);
      EXPECT_EQ(shape.parameter_bytes(), bytes);
    }
}

TEST(ModelShape, KnowsElementsAndAccumulators) {
  const auto bytes = [](at::ScalarType type) {
    const auto shape = model_shape({}, type);
    return std::pair(shape.element_bytes, shape.accumulator_bytes);
  };
  EXPECT_EQ(bytes(at::kFloat), std::pair(int64_t{4}, int64_t{4}));
  EXPECT_EQ(bytes(at::kBFloat16), std::pair(int64_t{2}, int64_t{4}));
  EXPECT_EQ(bytes(at::kDouble), std::pair(int64_t{8}, int64_t{8}));
}

}  // namespace
}  // namespace bough
