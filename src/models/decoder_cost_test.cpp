#include "models/decoder_cost.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "models/model.h"

namespace bough {
namespace {

TEST(ModelShape, CountsTheParametersOfEveryArchitecture) {
  for (const bool tied : {false, true})
    for (const char* family : {"qwen3", "qwen2", "llama", "mistral", "gemma2", "gemma3_text", "smollm3",
                               "phi3", "olmo2", "mixtral", "qwen3_moe", "olmoe"})
      for (const bool biases : {false, true}) {
        SCOPED_TRACE(testing::Message() << family << (biases ? " with biases" : ""));
        const std::string name = family;
        Json json = {{"model_type", name},
                     {"vocab_size", 50},
                     {"hidden_size", 24},
                     {"intermediate_size", 40},
                     {"num_hidden_layers", 3},
                     {"num_attention_heads", 4},
                     {"num_key_value_heads", 2},
                     {"head_dim", 6},
                     {"num_experts", 5},
                     {"num_experts_per_tok", 2},
                     {"moe_intermediate_size", 16},
                     {"mlp_only_layers", {1}},
                     {"max_position_embeddings", 64},
                     {"attn_logit_softcapping", nullptr},
                     {"final_logit_softcapping", nullptr},
                     {"tie_word_embeddings", tied},
                     {"attention_bias", biases}};
        if (name == "llama" || name == "smollm3") json["mlp_bias"] = biases;
        const ModelConfig config = parse_model_config(json, "x");
        const auto shape = model_shape(config, "bf16");
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
  const auto bytes = [](const char* type) {
    const auto shape = model_shape({}, type);
    return std::pair(shape.element_bytes, shape.accumulator_bytes);
  };
  EXPECT_EQ(bytes("fp32"), std::pair(int64_t{4}, int64_t{4}));
  EXPECT_EQ(bytes("bf16"), std::pair(int64_t{2}, int64_t{4}));
  EXPECT_EQ(bytes("fp64"), std::pair(int64_t{8}, int64_t{8}));
}

TEST(ModelShape, NamedShapesHaveTheParametersOfTheirCheckpoints) {
  // The numbers are those of the safetensors files on the Hub. Tied weights count once.
  const auto parameters = [](const char* name) { return named_model_shape(name, "bf16").num_parameters(); };
  EXPECT_EQ(parameters("qwen3-0.6b"), 596'049'920);
  EXPECT_EQ(parameters("qwen3-1.7b"), 1'720'574'976);
  EXPECT_EQ(parameters("qwen3-4b"), 4'022'468'096);
  EXPECT_EQ(parameters("qwen3-8b"), 8'190'735'360);
  EXPECT_EQ(parameters("qwen3-14b"), 14'768'307'200);
  EXPECT_EQ(parameters("small"), 27'272'704);
}

TEST(ModelShape, WorkOfTheSmallShapeByHand) {
  const auto shape = named_model_shape("small", "fp32");
  // A layer has q, k, v 512 x 1024, output 512 x 512, gate and up 512 x 3072, down 1536 x 512.
  EXPECT_EQ(shape.linear_flops_per_token(), 2.0 * 8 * (524288 + 262144 + 1572864 + 786432));
  EXPECT_EQ(shape.flops_per_pair(), 8.0 * 2 * 2 * 512);
  EXPECT_EQ(shape.scores_per_pair(), 64);
  EXPECT_EQ(shape.flops_per_head_row(), 2.0 * 512 * 4096);
  // A layer has two norms, two residual sums, q, k and v of 1024 in all, and gate, up and their product. The
  // embedding and the last norm are added.
  EXPECT_EQ(shape.elements_per_token(), 8 * (2 * 2 * 512 + 2 * 3 * 512 + 2 * 1024 + 3 * 1536) + 4 * 512);
  EXPECT_EQ(shape.parameter_bytes(), 27'272'704 * 8);
  EXPECT_EQ(named_model_shape("small", "bf16").parameter_bytes(), 27'272'704 * 6);
  EXPECT_EQ(named_model_shape("small", "fp64").accumulator_bytes, 8);
}

TEST(ModelShape, WorkOfAMixtureByHand) {
  auto shape = named_model_shape("small", "fp32");
  const double dense = shape.linear_flops_per_token(), of_layer = 2.0 * 3 * 512 * 1536;
  shape.num_experts = 8;
  shape.experts_per_token = 2;
  shape.expert_intermediate_size = 700;
  shape.dense_layers = {0, 0, 1, 0, 0, 0, 0, 0};
  // Seven layers have a router of 512 x 8, and two experts of three matrices 512 x 700 each.
  EXPECT_EQ(shape.linear_flops_per_token(), dense - 7 * of_layer + 7 * 2.0 * (512 * 8 + 2 * 3 * 512 * 700));
  EXPECT_EQ(shape.expert_flops_per_token(), 7 * 2.0 * 2 * 3 * 512 * 700);
  EXPECT_EQ(shape.last_flops_per_token(), 2.0 * 512 * (1536 + 7 * 2 * 700));
  EXPECT_EQ(shape.num_parameters(), 27'272'704 + 7 * (512 * 8 + 8 * 3 * 512 * 700 - 3 * 512 * 1536));
  EXPECT_EQ(shape.distinct_experts(1), 2);
  EXPECT_EQ(shape.distinct_experts(2), 3.5);  // 8 (1 - (6/8)^2)
  EXPECT_NEAR(shape.distinct_experts(1000), 8, 1e-9);
}

// With adapters of rank 8 on q_proj and the lm_head. Backward of W takes one product, that of an adapter two,
// and half of its forward again.
TEST(ModelShape, AnAdapterOfTheHeadCountsInTheRowsOfTheHead) {
  auto shape = named_model_shape("small", "fp32");
  const double layers = shape.linear_flops_per_token(), row = shape.flops_per_head_row();
  EXPECT_EQ(shape.trained_flops_per_head_row(), row);
  const double of_layers = 8 * 8 * (512 + 512), of_head = 8 * (512 + 4096);
  shape.adapter_elements = static_cast<int64_t>(of_layers + of_head);
  shape.head_adapter_elements = static_cast<int64_t>(of_head);
  EXPECT_EQ(shape.linear_flops_per_token(), layers + 2 * of_layers);
  EXPECT_EQ(shape.trained_linear_flops_per_token(), layers / 2 + 2.5 * of_layers);
  EXPECT_EQ(shape.flops_per_head_row(), row + 2 * of_head);
  EXPECT_EQ(shape.trained_flops_per_head_row(), row / 2 + 2.5 * of_head);
}

TEST(ModelShape, UnknownNamesAreRefusedWithTheKnownOnes) {
  try {
    named_model_shape("qwen3-7b", "fp32");
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("'qwen3-7b'"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("qwen3-14b"), std::string::npos) << error.what();
  }
  EXPECT_THROW(named_model_shape("small", "fp16"), UserError);
}

}  // namespace
}  // namespace bough
