#include "models/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <initializer_list>
#include <limits>

#include "base/base_test_util.h"
#include "base/error.h"

namespace bough {
namespace {

// A Qwen3 config as transformers 5.17 writes it.
Json qwen3() {
  return Json::parse(R"({
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16",
    "attention_bias": false, "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu",
    "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 512,
    "max_window_layers": 28, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": null, "tie_word_embeddings": true, "use_cache": true, "use_sliding_window": false,
    "vocab_size": 64, "eos_token_id": 3})");
}
// A Llama config as transformers before 5 wrote it, without the optional keys.
Json llama() {
  return Json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16",
    "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512,
    "num_attention_heads": 4, "num_hidden_layers": 2, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": null,
    "vocab_size": 64,
    "attention_bias": true, "mlp_bias": false, "pretraining_tp": 1})");
}
Json qwen2() {
  Json json = llama();
  json["architectures"] = {"Qwen2ForCausalLM"};
  json["model_type"] = "qwen2";
  json["num_key_value_heads"] = 1;
  json["sliding_window"] = 131072;  // Qwen2.5 names a window but does not use it
  json["use_sliding_window"] = false;
  json.erase("attention_bias");
  return json;
}

Json gemma2() {
  Json json = llama();
  json.update({{"architectures", {"Gemma2ForCausalLM"}},
               {"model_type", "gemma2"},
               {"num_key_value_heads", 1},
               {"head_dim", 8},
               {"attention_bias", false},
               {"attn_logit_softcapping", nullptr},
               {"final_logit_softcapping", nullptr},
               {"sliding_window", 100}});
  json.erase("hidden_act");
  return json;
}

std::string refusal(const Json& json) {
  try {
    parse_model_config(json, "dir/config.json");
  } catch (const UserError& error) {
    return error.what();
  }
  return "(accepted)";
}
std::string refusal_with(Json json, const char* key, Json value) {
  json[key] = std::move(value);
  return refusal(json);
}

TEST(ModelConfig, ReadsQwen3) {
  const ModelConfig config = parse_model_config(qwen3(), "x");
  EXPECT_EQ(config.family, &families::qwen3);
  EXPECT_EQ(config.vocab_size, 64);
  EXPECT_EQ(config.hidden_size, 32);
  EXPECT_EQ(config.intermediate_size, 48);
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_EQ(config.num_heads, 4);
  EXPECT_EQ(config.num_kv_heads, 2);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.max_position_embeddings, 512);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.rope.theta, 1e6);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_FALSE(config.qkv_bias);
  EXPECT_EQ(config.torch_dtype, "bfloat16");
  EXPECT_EQ(config.source, qwen3());
}

TEST(ModelConfig, ReadsLlamaOfOlderVersions) {
  const ModelConfig config = parse_model_config(llama(), "x");
  EXPECT_EQ(config.family, &families::llama);
  EXPECT_EQ(config.num_kv_heads, 4);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.rope.theta, 5e5);
  EXPECT_FALSE(config.qk_norm);
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_TRUE(config.output_bias);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_EQ(config.torch_dtype, "float16");
}

TEST(ModelConfig, ReadsQwen2) {
  const ModelConfig config = parse_model_config(qwen2(), "x");
  EXPECT_EQ(config.family, &families::qwen2);
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_FALSE(config.output_bias);
  EXPECT_EQ(config.num_kv_heads, 1);
}

TEST(ModelConfig, TakesTransformersDefaults) {
  Json json = qwen3();
  for (const char* key :
       {"head_dim", "rope_parameters", "rms_norm_eps", "tie_word_embeddings", "architectures", "dtype"})
    json.erase(key);
  const ModelConfig config = parse_model_config(json, "x");
  EXPECT_EQ(config.family, &families::qwen3);  // found by model_type
  EXPECT_EQ(config.head_dim, 128);             // Qwen3's, not width / heads
  EXPECT_EQ(config.rope.theta, 1e4);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_EQ(config.torch_dtype, "float32");
  json["num_key_value_heads"] = nullptr;
  EXPECT_EQ(parse_model_config(json, "x").num_kv_heads, 4);
}

// Options that would change the result are refused by name.
TEST(ModelConfig, RefusesByName) {
  expect_names(refusal_with(qwen3(), "architectures", {"GptOssForCausalLM"}),
               {"dir/config.json", "architectures", "GptOssForCausalLM", "Qwen3ForCausalLM"});
  expect_names(refusal_with(qwen3(), "architectures", {"Gemma3ForConditionalGeneration"}),
               {"Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"});
  expect_names(refusal_with(qwen3(), "model_type", "qwen2"), {"model_type", "qwen2", "qwen3"});
  Json json = llama();
  json.erase("architectures");
  expect_names(refusal_with(json, "model_type", "gemma"), {"model_type", "gemma"});
  expect_names(refusal_with(llama(), "rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}}),
               {"rope_scaling", "low_freq_factor"});
  expect_names(refusal_with(llama(), "rope_scaling", {{"type", "linear"}}), {"rope_scaling", "factor"});
  expect_names(refusal_with(llama(), "rope_scaling", {{"type", "su"}, {"factor", 2.0}}),
               {"su", "not supported"});
  expect_names(refusal_with(llama(), "rope_scaling", {{"rope_type", "proportional"}}), {"proportional"});
  expect_names(refusal_with(llama(), "rope_scaling",
                            {{"rope_type", "longrope"}, {"short_factor", {1, 2}}, {"long_factor", {1, 2}}}),
               {"short_factor", "a list of 4"});
  expect_names(
      refusal_with(qwen3(), "rope_parameters", {{"rope_type", "linear"}, {"factor", 4}, {"beta_fast", 3}}),
      {"beta_fast", "linear"});
  expect_names(
      refusal_with(qwen3(), "rope_parameters", {{"rope_type", "default"}, {"mrope_section", {1, 2}}}),
      {"mrope_section"});
  expect_names(refusal_with(qwen3(), "rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}),
               {"full_attention"});
  expect_names(refusal_with(llama(), "partial_rotary_factor", 0.5), {"partial_rotary_factor", "0.5"});
  expect_names(refusal_with(qwen3(), "layer_types", {"full_attention", "sliding_attention"}),
               {"layer_types", "sliding_attention", "layer 1"});
  expect_names(refusal_with(qwen3(), "layer_types", {"full_attention"}), {"layer_types", "2 names"});
  expect_names(refusal_with(qwen3(), "hidden_act", "gelu"), {"hidden_act", "gelu"});
  expect_names(refusal_with(qwen3(), "mlp_bias", true), {"mlp_bias"});
  expect_names(refusal_with(gemma2(), "attn_logit_softcapping", 50.0), {"attn_logit_softcapping", "50"});
  expect_names(refusal_with(gemma2(), "final_logit_softcapping", 30.0), {"final_logit_softcapping", "30"});
  Json capped = gemma2();
  capped.erase("attn_logit_softcapping");  // the class's default is 50
  expect_names(refusal(capped), {"attn_logit_softcapping"});
  expect_names(refusal_with(gemma2(), "use_bidirectional_attention", true), {"use_bidirectional_attention"});
  expect_names(refusal_with(gemma2(), "sliding_window", nullptr), {"sliding_window"});
  expect_names(refusal_with(llama(), "attention_dropout", 0.1), {"attention_dropout", "0.1"});
  expect_names(refusal_with(llama(), "quantization_config", {{"quant_method", "gptq"}}),
               {"quantization_config"});
  expect_names(refusal_with(llama(), "is_causal", false), {"is_causal"});
  expect_names(refusal_with(llama(), "is_encoder_decoder", true), {"is_encoder_decoder"});
  expect_names(refusal_with(llama(), "per_layer_config", {{"0", {{"sliding_window", 3}}}}),
               {"per_layer_config"});
  EXPECT_EQ(refusal_with(qwen3(), "something_new", 1), "(accepted)");
  EXPECT_EQ(refusal_with(llama(), "rope_scaling", {{"rope_type", "default"}}), "(accepted)");
}

TEST(ModelConfig, RefusesImpossibleValues) {
  for (const char* key :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings"}) {
    for (const Json& value : std::initializer_list<Json>{
             0, -1, 2.5, "32", true, Json::array(), int64_t{1} << 40, std::numeric_limits<uint64_t>::max()})
      expect_names(refusal_with(qwen3(), key, value), {"dir/config.json", key, "expected"});
  }
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "num_key_value_heads"}) {
    Json json = qwen3();
    json.erase(key);
    expect_names(refusal(json), {key, "nothing"});
  }
  expect_names(refusal_with(qwen3(), "num_key_value_heads", 3), {"num_key_value_heads", "3", "divisor", "4"});
  expect_names(refusal_with(qwen3(), "head_dim", 15), {"head_dim", "15", "even"});
  expect_names(refusal_with(llama(), "hidden_size", 33), {"num_attention_heads", "33"});
  expect_names(refusal_with(qwen3(), "rms_norm_eps", -1e-6), {"rms_norm_eps"});
  expect_names(refusal_with(llama(), "rope_theta", 0), {"rope_theta"});
  expect_names(refusal_with(qwen3(), "rope_parameters", 3), {"rope_parameters"});
  expect_names(refusal_with(qwen3(), "tie_word_embeddings", "yes"), {"tie_word_embeddings", "true or false"});
  expect_names(refusal_with(qwen3(), "architectures", "Qwen3ForCausalLM"), {"architectures"});
  expect_names(refusal_with(qwen3(), "hidden_act", 1), {"hidden_act"});
  expect_names(refusal(Json::array()), {"dir/config.json", "object"});
  EXPECT_LT(refusal_with(qwen3(), "hidden_size", std::string(100000, 'x')).size(), 400u);
}

// Windows exist in Mistral's, Gemma's and Phi-3's classes, and in Qwen's layers from max_window_layers on.
TEST(ModelConfig, IsExactUpToTheWindow) {
  const auto longest = [](Json json, const Json& changes) {
    json.update(changes);
    return parse_model_config(json, "x").max_exact_length;
  };
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(longest(llama(), Json::object()), kAll);
  EXPECT_EQ(longest(qwen2(), Json::object()), kAll);
  EXPECT_EQ(longest(qwen2(), {{"use_sliding_window", true}}), kAll);  // windows begin at layer 28; it has 2
  EXPECT_EQ(longest(qwen2(), {{"use_sliding_window", true}, {"max_window_layers", 1}}), 131072);
  EXPECT_EQ(longest(gemma2(), Json::object()), 100);
  EXPECT_EQ(longest(gemma2(), {{"layer_types", {"full_attention", "full_attention"}}}), kAll);
  Json mistral = llama();
  mistral.update({{"architectures", {"MistralForCausalLM"}},
                  {"model_type", "mistral"},
                  {"num_key_value_heads", 2},
                  {"attention_bias", false}});
  EXPECT_EQ(longest(mistral, Json::object()), 4096);  // the class's default
  EXPECT_EQ(longest(mistral, {{"sliding_window", nullptr}}), kAll);
  EXPECT_EQ(longest(mistral, {{"sliding_window", 77}}), 77);
  // use_sliding_window is a key of Qwen's and SmolLM3's classes. The others accept it, and it has no effect.
  for (const bool uses : {false, true}) {
    EXPECT_EQ(longest(mistral, {{"sliding_window", 77}, {"use_sliding_window", uses}}), 77);
    EXPECT_EQ(longest(gemma2(), {{"use_sliding_window", uses}}), 100);
    EXPECT_EQ(longest(gemma2(), {{"layer_types", {"sliding_attention", "full_attention"}},
                                 {"use_sliding_window", uses}}),
              100);
    EXPECT_EQ(longest(llama(), {{"sliding_window", 77}, {"use_sliding_window", uses}}), kAll);
  }
  Json smollm3 = llama();  // its layers without a rotary embedding have the window
  smollm3.update({{"architectures", {"SmolLM3ForCausalLM"}},
                  {"model_type", "smollm3"},
                  {"num_key_value_heads", 2},
                  {"sliding_window", 77}});
  EXPECT_EQ(longest(smollm3, Json::object()), kAll);
  EXPECT_EQ(longest(smollm3, {{"use_sliding_window", true}}), kAll);  // the fourth layer is the first one
  EXPECT_EQ(longest(smollm3, {{"use_sliding_window", true}, {"no_rope_layers", {1, 0}}}), 77);
  EXPECT_EQ(longest(smollm3, {{"use_sliding_window", true}, {"no_rope_layers", {1, 1}}}), kAll);
  EXPECT_EQ(longest(smollm3, {{"use_sliding_window", true}, {"no_rope_layer_interval", 2}}), 77);
  EXPECT_EQ(longest(smollm3, {{"use_sliding_window", false}, {"no_rope_layers", {1, 0}}}), kAll);
  EXPECT_EQ(longest(llama(), {{"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2}}}}), 512);
  const Json longrope = {{"rope_type", "longrope"},
                         {"short_factor", {1, 1, 1, 1}},
                         {"long_factor", {2, 2, 2, 2}},
                         {"original_max_position_embeddings", 64}};
  EXPECT_EQ(longest(llama(), {{"rope_scaling", longrope}}), 64);
  Json scaled = llama();
  scaled["rope_scaling"] = longrope;
  const ModelConfig config = parse_model_config(scaled, "x");
  EXPECT_EQ(config.max_length(), 64);
  EXPECT_NE(config.max_length_reason().find("rope_scaling"), std::string::npos);
  EXPECT_NEAR(config.rope.attention_factor, std::sqrt(1 + std::log(8.0) / std::log(64.0)), 1e-12);
}

TEST(ModelConfig, CountsParameters) {
  ModelConfig config = parse_model_config(qwen3(), "x");
  EXPECT_EQ(config.num_parameters(), 64 * 32 + 32 + 2 * (32 * 128 + 64 * 32 + 3 * 32 * 48 + 64 + 32));
  config.tie_word_embeddings = false;
  EXPECT_EQ(config.num_parameters(), 2 * 64 * 32 + 32 + 2 * (32 * 128 + 64 * 32 + 3 * 32 * 48 + 64 + 32));
}

TEST(ModelConfig, WrittenConfigReadsBack) {
  for (const Json& json : {qwen3(), qwen2(), llama(), gemma2()}) {
    const ModelConfig config = parse_model_config(json, "x");
    const ModelConfig again = parse_model_config(write_model_config(config), "again");
    EXPECT_EQ(again.family, config.family);
    EXPECT_EQ(again.vocab_size, config.vocab_size);
    EXPECT_EQ(again.num_parameters(), config.num_parameters());
    EXPECT_EQ(again.num_kv_heads, config.num_kv_heads);
    EXPECT_EQ(again.head_dim, config.head_dim);
    EXPECT_EQ(again.max_position_embeddings, config.max_position_embeddings);
    EXPECT_EQ(again.rms_norm_eps, config.rms_norm_eps);
    EXPECT_EQ(again.rope.theta, config.rope.theta);
    EXPECT_EQ(again.tie_word_embeddings, config.tie_word_embeddings);
    EXPECT_EQ(again.qkv_bias, config.qkv_bias);
    EXPECT_EQ(again.output_bias, config.output_bias);
    EXPECT_EQ(again.torch_dtype, config.torch_dtype);
  }
}

// Every key that a family's config.json gets is read again by this family.
TEST(ModelConfig, EveryFamilyReadsWhatItWrites) {
  for (const Family* family : all_families()) {
    SCOPED_TRACE(family->class_name);
    EXPECT_EQ(&family_named(family->model_type), family);
    Json json = qwen3();
    for (const char* key : {"architectures", "layer_types", "max_position_embeddings"}) json.erase(key);
    json.update({{"model_type", family->model_type},
                 {"sliding_window", 100},
                 {"head_dim", 8},
                 {"num_experts", 6},
                 {"num_experts_per_tok", 2},
                 {"moe_intermediate_size", 20},
                 {"attn_logit_softcapping", nullptr},
                 {"final_logit_softcapping", nullptr}});
    const ModelConfig config = parse_model_config(json, "x");
    EXPECT_EQ(config.family, family);
    EXPECT_GE(config.max_position_embeddings, 2048);  // the class's default
    const Json written = write_model_config(config);
    EXPECT_EQ(written["architectures"], Json::array({family->class_name}));
    const ModelConfig again = parse_model_config(written, "again");
    EXPECT_EQ(again.family, family);
    EXPECT_EQ(again.layer_ropes, config.layer_ropes);
    EXPECT_EQ(again.num_parameters(), config.num_parameters());
    EXPECT_EQ(write_model_config(again), written);
  }
}

TEST(ModelConfig, LoadsFromDirectory) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "model_config_test";
  std::filesystem::remove_all(folder);
  EXPECT_THROW(load_model_config(folder), UserError);
  std::filesystem::create_directories(folder);
  EXPECT_THROW(load_model_config(folder), UserError);  // no config.json
  const auto write = [&](const char* name, const std::string& text) { std::ofstream(folder / name) << text; };
  write("config.json", "{\"vocab_size\": ");
  EXPECT_THROW(load_model_config(folder), UserError);
  write("config.json", qwen3().dump());
  EXPECT_EQ(load_model_config(folder).vocab_size, 64);
  EXPECT_THROW(load_model_config(folder / "config.json"), UserError);  // a file in place of a directory
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace bough
