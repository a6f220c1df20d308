#include "models/quantized_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "base/error.h"

namespace bough {
namespace {

// kAll adds the options that only some families have. kExperts makes the second layer sparse.
enum class Options { kNone, kAll, kExperts };
ModelConfig tiny_config(Options options = Options::kNone) {
  ModelConfig config;
  config.vocab_size = 31;
  config.hidden_size = 24;
  config.intermediate_size = 40;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 6;
  config.max_position_embeddings = 64;
  config.qkv_bias = true;
  if (options == Options::kExperts) {
    config.num_experts = 5;
    config.experts_per_token = 2;
    config.expert_intermediate_size = 20;
    config.dense_layers = {1, 0};
  }
  if (options == Options::kAll) {
    config.mlp_bias = config.output_bias = config.post_norms = config.scale_embedding = true;
    config.qk_norm = config.qk_norm_over_width = true;
    config.norm_weight_offset = 1;
    config.activation = GateActivation::kGeluTanh;
    config.rotary_dim = 4;
  }
  return config;
}

std::unique_ptr<Model> tiny_model(at::ScalarType dtype, Options options = Options::kNone) {
  auto model = make_model(tiny_config(options), dtype);
  initialise(*model, 3);
  return model;
}

// Attention in which each token attends to itself only.
struct OwnValue : AttentionContext {
  at::Tensor attend(int64_t, const at::Tensor& q_TNH, const at::Tensor&, const at::Tensor& v_TGH) override {
    return v_TGH.repeat_interleave(q_TNH.size(1) / v_TGH.size(1), 1);
  }
};

at::Tensor hidden(const Model& model) {
  OwnValue attention;
  const auto tokens = at::arange(10, at::kLong);
  return model.forward(tokens, tokens, attention);
}

TEST(QuantizedModel, EqualsAModelWithRoundedMatricesAndLeavesItsSourceUnchanged) {
  const at::NoGradGuard no_grad;
  for (const auto& [dtype, options] : {std::pair(at::kFloat, Options::kNone),
                                       {at::kFloat, Options::kAll},
                                       {at::kFloat, Options::kExperts},
                                       {at::kDouble, Options::kAll},
                                       {at::kBFloat16, Options::kNone}}) {
    const auto model = tiny_model(dtype, options), rounded = tiny_model(dtype, options);
    const auto before = hidden(*model);
    const QuantizedModel quantized(*model);
    EXPECT_TRUE(is_quantized(quantized.model()));
    EXPECT_FALSE(is_quantized(*model));
    EXPECT_TRUE(at::equal(hidden(*model), before));
    const auto matrices = rounded->layer_matrices();
    ASSERT_EQ(matrices.size(), 8u);
    for (Parameter* matrix : matrices) {
      const auto scale = std::get<0>(matrix->value.to(at::kFloat).abs().max(1, true)) / 127;
      matrix->value.copy_((matrix->value.to(at::kFloat) / scale).round_() * scale);
    }
    const auto got = hidden(quantized.model()), expected = hidden(*rounded);
    const double error = (got - expected).to(at::kDouble).abs().max().item<double>();
    EXPECT_LT(error, dtype == at::kBFloat16 ? 0.05 : 1e-4);
    EXPECT_GT((got - before).abs().max().item<double>(), 1e-4);
  }
}

TEST(QuantizedModel, FollowsItsSourceAfterUpdate) {
  const at::NoGradGuard no_grad;
  const auto model = tiny_model(at::kFloat), other = tiny_model(at::kFloat);
  QuantizedModel quantized(*model);
  const auto before = hidden(quantized.model());
  for (Model* changed : {model.get(), other.get()})
    for (Parameter* parameter : changed->parameters()) parameter->value.mul_(1.25).add_(0.01);
  EXPECT_GT((hidden(quantized.model()) - before).abs().max().item<double>(), 1e-3)
      << "norms and embedding are shared";
  quantized.update();
  EXPECT_TRUE(at::equal(hidden(quantized.model()), hidden(QuantizedModel(*other).model())));
}

TEST(QuantizedModel, InPlaceReleasesTheMatricesAndReportsHeldBytes) {
  const at::NoGradGuard no_grad;
  const auto model = tiny_model(at::kFloat), same = tiny_model(at::kFloat);
  const MatrixBytes before = layer_matrix_bytes(*model);
  EXPECT_EQ(before.held, before.unquantized);
  int64_t elements = 0, rows = 0;
  for (const Parameter* matrix : model->layer_matrices()) {
    elements += matrix->value.numel();
    rows += matrix->value.size(0);
  }
  EXPECT_EQ(before.held, 4 * elements);
  const auto released = model->layer_matrices().front()->value;
  quantize(*model);
  EXPECT_EQ(released.use_count(), 1u) << "the model still holds what it had";
  const MatrixBytes after = layer_matrix_bytes(*model);
  EXPECT_EQ(after.held, elements + 4 * rows);
  EXPECT_EQ(after.unquantized, before.held);
  EXPECT_TRUE(at::equal(hidden(*model), hidden(QuantizedModel(*same).model())));
}

TEST(QuantizedModel, HasNoGradient) {
  const auto model = tiny_model(at::kFloat);
  quantize(*model);
  try {
    hidden(*model);
    FAIL() << "a graph was recorded";
  } catch (const InternalError& error) {
    EXPECT_NE(std::string(error.what()).find("no gradient"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace bough
