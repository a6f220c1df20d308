// Mixtures of experts: config.json, checkpoints, recorded experts, and what is refused. The numbers are
// compared with transformers in tests/parity/, and with the flat batch in train/executor_test.cpp.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "base/base_test_util.h"
#include "base/error.h"
#include "kernels/experts/experts.h"
#include "models/checkpoint.h"
#include "models/lora.h"
#include "models/pipeline_stage.h"
#include "models/tensor_parallel.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

Json config_json(const char* model_type) {
  return {{"model_type", model_type},
          {"vocab_size", 40},
          {"hidden_size", 16},
          {"intermediate_size", 24},
          {"num_hidden_layers", 3},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"head_dim", 4},
          {"max_position_embeddings", 128},
          {"num_experts", 4},
          {"num_experts_per_tok", 2},
          {"moe_intermediate_size", 8}};
}

ModelConfig config_of(const char* model_type, const Json& changes = Json::object()) {
  Json json = config_json(model_type);
  json.update(changes);
  ModelConfig config = parse_model_config(json, "dir/config.json");
  config.source = write_model_config(config);
  return config;
}

std::string refusal(const char* model_type, const char* key, Json value) {
  try {
    config_of(model_type, {{key, std::move(value)}});
  } catch (const UserError& error) {
    return error.what();
  }
  return "(accepted)";
}

template <class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const UserError& error) {
    return error.what();
  }
  return "(accepted)";
}

std::unique_ptr<Model> random_mixture(const ModelConfig& config, at::ScalarType dtype = at::kFloat) {
  auto model = make_model(config, dtype);
  initialise(*model, 5);
  return model;
}

TEST(Mixture, ReadsTheKeysOfEachFamily) {
  const ModelConfig mixtral = config_of("mixtral", {{"num_experts", nullptr}, {"num_local_experts", 6}});
  EXPECT_EQ(mixtral.num_experts, 6);
  EXPECT_EQ(mixtral.expert_intermediate_size, 24);
  EXPECT_TRUE(mixtral.renormalises_experts);
  EXPECT_EQ(mixtral.num_sparse_layers(), 3);
  const ModelConfig qwen = config_of("qwen3_moe", {{"mlp_only_layers", {0}}, {"decoder_sparse_step", 2}});
  EXPECT_EQ(qwen.expert_intermediate_size, 8);
  EXPECT_EQ(qwen.intermediate_size, 24);
  EXPECT_FALSE(qwen.renormalises_experts);
  EXPECT_EQ(qwen.dense_layers, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_TRUE(qwen.is_sparse(1));
  EXPECT_TRUE(config_of("qwen3_moe", {{"norm_topk_prob", true}}).renormalises_experts);
  EXPECT_EQ(config_of("qwen3_moe", {{"mlp_only_layers", {2, 2}}}).num_sparse_layers(), 2);
  EXPECT_EQ(config_of("olmoe", {{"clip_qkv", 3.5}}).clip_qkv, 3.5);
  EXPECT_EQ(config_of("olmoe").clip_qkv, 0);
  EXPECT_EQ(config_of("olmoe", {{"router_aux_loss_coef", 0.5}}).num_experts, 4) << "kept, not read";
  EXPECT_FALSE(config_of("qwen3").is_mixture()) << "keys that no class has are ignored";
}

TEST(Mixture, RefusesWhatWouldChangeTheResult) {
  for (const char* type : {"mixtral", "qwen3_moe", "olmoe"}) {
    SCOPED_TRACE(type);
    expect_names(refusal(type, "num_local_experts", 5), {"num_local_experts", "5", "num_experts, '4'"});
    expect_names(refusal(type, "num_experts", 1), {"num_experts_per_tok", "2", "at most num_experts, 1"});
    expect_names(refusal(type, "num_experts", 0), {"num_experts", "expected an integer from 1"});
    expect_names(refusal(type, "num_experts_per_tok", nullptr), {"num_experts_per_tok", "nothing"});
    expect_names(refusal(type, "n_shared_experts", 2), {"n_shared_experts", "every token uses"});
    expect_names(refusal(type, "shared_expert_intermediate_size", 64), {"shared_expert_intermediate_size"});
    expect_names(refusal(type, "n_group", 8), {"n_group", "groups"});
    expect_names(refusal(type, "use_routing_bias", true), {"use_routing_bias", "correction bias"});
    expect_names(refusal(type, "scoring_func", "sigmoid"), {"scoring_func", "sigmoid"});
    expect_names(refusal(type, "routed_scaling_factor", 2.5), {"routed_scaling_factor", "2.5"});
    expect_names(refusal(type, "router_jitter_noise", 0.1), {"router_jitter_noise", "noise"});
    expect_names(refusal(type, "n_shared_experts", 1), {"n_shared_experts"});
    expect_names(refusal(type, "topk_method", "noaux_tc"), {"topk_method", "noaux_tc"});
    EXPECT_EQ(refusal(type, "n_shared_experts", 0), "(accepted)");
    EXPECT_EQ(refusal(type, "routed_scaling_factor", 1.0), "(accepted)");
    EXPECT_EQ(refusal(type, "router_jitter_noise", 0.0), "(accepted)");
  }
  expect_names(refusal("qwen3_moe", "moe_intermediate_size", nullptr), {"moe_intermediate_size", "nothing"});
  expect_names(refusal("qwen3_moe", "mlp_only_layers", {3}), {"mlp_only_layers", "[3]", "from 0 to 2"});
  expect_names(refusal("qwen3_moe", "mlp_only_layers", 1), {"mlp_only_layers", "a list"});
  expect_names(refusal("qwen3_moe", "decoder_sparse_step", 0), {"decoder_sparse_step"});
  expect_names(refusal("olmoe", "clip_qkv", -1), {"clip_qkv", "-1"});
  expect_names(refusal("olmoe", "head_dim", 8), {"head_dim", "8", "16 / 4"});
}

class MixtureFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              str("mixture_", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  // Replaces the directory's tensors.
  void write(const NamedTensors& tensors) const { write_safetensors(folder_ / "model.safetensors", tensors); }
  std::string load_message() const {
    return message_of([&] { load_model(folder_, at::kFloat); });
  }
  fs::path folder_;
};

// The tensors of transformers' own modules.
NamedTensors fused(Model& model) {
  const ModelConfig& config = model.config();
  NamedTensors tensors;
  for (const Parameter* parameter : model.parameters())
    for (const Parameter::Part& part : parameter->parts)
      if (part.name.find(".experts.") == std::string::npos) {
        std::string name = part.name;
        if (const size_t at = name.find("block_sparse_moe"); at != std::string::npos)
          name.replace(at, std::string("block_sparse_moe").size(), "mlp");
        tensors.emplace_back(name, parameter->part_value(part));
      }
  const std::vector<Parameter*> experts = model.expert_matrices();
  for (size_t i = 0; i < experts.size(); ++i) {
    const at::Tensor& value = experts[i]->value;
    const std::string layer = experts[i]->parts[0].name.substr(0, std::string("model.layers.0.").size());
    tensors.emplace_back(layer + "mlp.experts." + (i % 2 == 0 ? "gate_up_proj" : "down_proj"),
                         value.view({config.num_experts, -1, value.size(1)}));
  }
  return tensors;
}

void expect_equal(Model& a, Model& b) {
  const NamedTensors left = named_weights(a), right = named_weights(b);
  ASSERT_EQ(left.size(), right.size());
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].first, right[i].first);
    EXPECT_TRUE(at::equal(left[i].second, right[i].second)) << left[i].first;
  }
}

TEST_F(MixtureFiles, ExpertsAreReadFromFusedTensorsToo) {
  for (const char* type : {"mixtral", "qwen3_moe", "olmoe"}) {
    SCOPED_TRACE(type);
    const auto model = random_mixture(config_of(type, {{"mlp_only_layers", {1}}}));
    save_model(folder_, *model);
    expect_equal(*model, *load_model(folder_, at::kFloat));
    write(fused(*model));
    expect_equal(*model, *load_model(folder_, at::kFloat));
  }
}

TEST_F(MixtureFiles, DamagedExpertsAreNamed) {
  const auto model = random_mixture(config_of("qwen3_moe"));
  save_model(folder_, *model);
  const NamedTensors whole = named_weights(*model), of_modules = fused(*model);
  NamedTensors tensors = whole;
  std::erase_if(tensors,
                [](const auto& named) { return named.first.ends_with("1.mlp.experts.2.up_proj.weight"); });
  write(tensors);
  expect_names(load_message(), {"1 missing", "model.layers.1.mlp.experts.2.up_proj.weight"});
  tensors = whole;
  for (auto& [name, tensor] : tensors)
    if (name.ends_with("0.mlp.experts.3.down_proj.weight")) tensor = tensor.t();
  write(tensors);
  expect_names(load_message(),
               {"model.layers.0.mlp.experts.3.down_proj.weight (got [8, 16], expected [16, 8])"});
  tensors = of_modules;
  for (auto& [name, tensor] : tensors)
    if (name.ends_with("2.mlp.experts.gate_up_proj")) tensor = tensor.narrow(0, 0, 3);
  write(tensors);
  expect_names(load_message(), {"model.layers.2.mlp.experts.gate_up_proj", "[3, 16, 16]", "[4, 16, 16]"});
  tensors = of_modules;
  for (const auto& named : whole)
    if (named.first.find("layers.0.mlp.experts.") != std::string::npos) tensors.push_back(named);
  write(tensors);
  expect_names(load_message(), {"2 extra", "model.layers.0.mlp.experts.gate_up_proj"});
}

// Attention in which each token attends to itself only. Records what the routers choose.
struct Recorder : AttentionContext {
  at::Tensor attend(int64_t, const at::Tensor& q_TNH, const at::Tensor&, const at::Tensor& v_TGH) override {
    return v_TGH.repeat_interleave(q_TNH.size(1) / v_TGH.size(1), 1);
  }
  at::Tensor route(int64_t layer, const at::Tensor& logits_TE, int64_t num_chosen) override {
    const auto found = given.find(layer);
    logits[layer] = logits_TE;
    return used[layer] = found == given.end() ? choose_experts(logits_TE, num_chosen) : found->second;
  }
  std::map<int64_t, at::Tensor> given, used, logits;
};

TEST(Mixture, RecordedExpertsReplaceTheRoutersChoice) {
  const at::NoGradGuard no_grad;
  const auto model = random_mixture(config_of("qwen3_moe", {{"mlp_only_layers", {1}}}));
  const auto tokens = at::arange(20, at::kLong);
  Recorder free;
  const auto y = model->forward(tokens, tokens, free);
  ASSERT_EQ(free.used.size(), 2u) << "layer 1 is dense";
  EXPECT_TRUE(free.used.at(0).equal(std::get<1>(free.logits.at(0).topk(2, 1))));
  EXPECT_EQ(free.logits.at(2).sizes(), (at::IntArrayRef{20, 4}));

  Recorder same;
  same.given = free.used;
  EXPECT_TRUE(model->forward(tokens, tokens, same).equal(y));
  Recorder other;
  other.given = free.used;
  other.given[0] = free.used.at(0).clone();
  const int64_t first = free.used.at(0)[7][0].item<int64_t>();
  other.given[0][7] = at::tensor({(first + 1) % 4, (first + 2) % 4}, at::kLong);
  const auto flipped = model->forward(tokens, tokens, other);
  const auto differs = (flipped - y).abs().sum(1) > 0;
  EXPECT_EQ(differs.sum().item<int64_t>(), 1);
  EXPECT_TRUE(differs[7].item<bool>());
}

TEST(Mixture, ExpertsHaveNoAdapters) {
  for (const char* type : {"mixtral", "qwen3_moe"}) {
    const auto model = random_mixture(config_of(type));
    const char* target = std::string(type) == "mixtral" ? "w2" : "down_proj";
    expect_names(message_of([&] { add_adapter(*model, {.rank = 2, .targets = {{target}}}, 1); }),
                 {"lora.targets", target, "experts have no adapters", "q_proj"});
    expect_names(message_of([&] { add_adapter(*model, {.rank = 2, .targets = {{"gate"}}}, 1); }),
                 {"lora.targets", "'gate'", "does not have", "o_proj"});
    add_adapter(*model, {.rank = 2}, 1);
    // q, k and v have an A of 2 x 16 each, and o_proj; the B have 16, 8, 8 and 16 rows.
    EXPECT_EQ(model->adapter_elements(), 3 * 2 * (4 * 16 + 16 + 8 + 8 + 16));
  }
}

TEST(Mixture, IsNotSharedByRanks) {
  const ModelConfig config = config_of("mixtral");
  expect_names(message_of([&] { shard_config(config, 0, 2); }),
               {"tensor parallelism", "2 ranks", "4 experts"});
  expect_names(message_of([&] { stage_of(config, 0, 2); }), {"pipeline parallelism", "2 stages", "Mixtral"});
}

TEST(Mixture, TheRoutersProductIsRoundedOnlyIfAsked) {
  const at::NoGradGuard no_grad;
  const auto model = random_mixture(config_of("olmoe"), at::kBFloat16);
  const auto tokens = at::arange(20, at::kLong);
  const auto logits = [&] {
    Recorder recorder;
    model->forward(tokens, tokens, recorder);
    return recorder.logits.at(0);
  };
  const auto exact = logits();
  EXPECT_EQ(exact.scalar_type(), at::kFloat);
  EXPECT_FALSE(exact.to(at::kBFloat16).to(at::kFloat).equal(exact));
  model->set_router_type(RouterType::kModel);
  const auto rounded = logits();
  EXPECT_TRUE(rounded.to(at::kBFloat16).to(at::kFloat).equal(rounded));
  EXPECT_EQ(model->share()->router_type(), RouterType::kModel);

  expect_names(message_of([&] { random_mixture(config_of("olmoe"))->set_router_type(RouterType::kModel); }),
               {"router_dtype", "Float", "no effect"});
  expect_names(
      message_of([&] { make_model(config_of("qwen3"), at::kBFloat16)->set_router_type(RouterType::kModel); }),
      {"router_dtype", "Qwen3", "no router"});
  const auto narrow = make_model(config_of("qwen3"), at::kBFloat16);
  narrow->set_head_type(HeadType::kAccumulator);
  EXPECT_EQ(narrow->share()->logits_dtype(), at::kFloat);
  expect_names(
      message_of([&] { make_model(config_of("qwen3"), at::kFloat)->set_head_type(HeadType::kAccumulator); }),
      {"head_dtype", "Float", "no effect"});
}

}  // namespace
}  // namespace bough
