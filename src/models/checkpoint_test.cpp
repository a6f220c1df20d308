#include "models/checkpoint.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>
#include <initializer_list>
#include <set>

#include "base/base_test_util.h"
#include "base/error.h"
#include "base/file.h"
#include "text/stop_tokens.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

ModelConfig small_config(const Family& family, bool tied) {
  ModelConfig config;
  config.family = &family;
  config.vocab_size = 40;
  config.hidden_size = 16;
  config.intermediate_size = 24;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 6;
  config.max_position_embeddings = 128;
  config.tie_word_embeddings = tied;
  return parse_model_config(write_model_config(config), "small");
}

std::unique_ptr<Model> random_model(const ModelConfig& config, at::ScalarType dtype = at::kFloat) {
  auto model = make_model(config, dtype);
  for (Parameter* parameter : model->parameters())
    parameter->value.copy_(at::randn(parameter->value.sizes()));
  return model;
}

class Checkpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              str("checkpoint_", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.insert(entry.path().filename().string());
    return names;
  }
  std::string refusal() const {
    try {
      load_model(folder_, at::kFloat);
    } catch (const UserError& error) {
      return error.what();
    }
    return "(accepted)";
  }
  // Saves a model of `config` after `change` has changed its tensors.
  template <class Change>
  void save_changed(const ModelConfig& config, Change change) const {
    auto model = random_model(config);
    save_model(folder_, *model);
    NamedTensors tensors = named_weights(*model);
    change(tensors);
    write_safetensors(folder_ / "model.safetensors", tensors);
  }
  fs::path folder_;
};

void expect_same(Model& a, Model& b) {
  const NamedTensors left = named_weights(a), right = named_weights(b);
  ASSERT_EQ(left.size(), right.size());
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_EQ(left[i].first, right[i].first);
    EXPECT_TRUE(at::equal(left[i].second, right[i].second)) << left[i].first;
  }
}

TEST_F(Checkpoint, SavesAndLoadsEveryArchitecture) {
  for (const Family* family : {&families::qwen3, &families::qwen2, &families::llama})
    for (const bool tied : {false, true}) {
      auto model = random_model(small_config(*family, tied));
      save_model(folder_, *model);
      expect_same(*model, *load_model(folder_, at::kFloat));
      EXPECT_EQ(files(), (std::set<std::string>{"config.json", "model.safetensors"}));
      EXPECT_EQ(SafetensorsFile(folder_ / "model.safetensors").entries().contains("lm_head.weight"), !tied);
    }
}

TEST_F(Checkpoint, ConvertsDtypes) {
  const ModelConfig config = small_config(families::qwen3, true);
  auto model = random_model(config);
  save_model(folder_, *model, {.dtype = at::kBFloat16});
  EXPECT_EQ(load_model_config(folder_).torch_dtype, "bfloat16");
  auto rounded = load_model(folder_, at::kDouble);
  EXPECT_EQ(rounded->dtype(), at::kDouble);
  for (const auto& [name, tensor] : named_weights(*rounded))
    for (const auto& [other, original] : named_weights(*model))
      if (name == other) {
        EXPECT_TRUE(at::equal(tensor, original.to(at::kBFloat16).to(at::kDouble))) << name;
      }
}

// Only the new shards remain, for any previous number of shards.
TEST_F(Checkpoint, ShardsReplaceEachOther) {
  const ModelConfig config = small_config(families::llama, false);
  for (const int64_t bytes : {int64_t{5000}, int64_t{1} << 40, int64_t{1}, int64_t{9000}, int64_t{5000}}) {
    auto model = random_model(config);
    save_model(folder_, *model, {.max_shard_bytes = bytes});
    expect_same(*model, *load_model(folder_, at::kFloat));
    size_t num_shards = 0;
    for (const std::string& name : files()) num_shards += name.ends_with(".safetensors");
    if (bytes == 1) {
      EXPECT_EQ(num_shards, named_weights(*model).size());
    }
    if (bytes == int64_t{1} << 40) {
      EXPECT_EQ(files(), (std::set<std::string>{"config.json", "model.safetensors"}));
    }
    if (bytes == 5000) {
      std::set<std::string> in_map;
      const Json index = read_json(folder_ / "model.safetensors.index.json");
      for (const auto& [tensor, file] : index["weight_map"].items()) in_map.insert(file.get<std::string>());
      EXPECT_EQ(in_map.size(), num_shards);
      EXPECT_EQ(index["metadata"]["total_size"], config.num_parameters() * 4);
    }
  }
}

TEST_F(Checkpoint, KeepsConfigAndOtherFiles) {
  Json source = write_model_config(small_config(families::qwen3, true));
  source.erase("dtype");
  source["torch_dtype"] = "bfloat16";
  source["my_key"] = {1, 2};
  auto model = random_model(parse_model_config(source, "x"));
  const fs::path base = folder_ / "base", saved = folder_ / "saved";
  make_directories(base);
  make_directories(saved);
  write_file_atomically(base / "tokenizer.json", "{}");
  write_file_atomically(base / "merges.txt", "");
  write_file_atomically(base / "generation_config.json", R"({"eos_token_id": 5})");
  write_file_atomically(saved / "README.md", "mine");
  save_model(saved, *model, {.copy_from = base});
  source["torch_dtype"] = "float32";
  EXPECT_EQ(read_json(saved / "config.json"), source);
  EXPECT_EQ(read_file(saved / "README.md"), "mine");
  EXPECT_EQ(read_file(saved / "tokenizer.json"), "{}");
  EXPECT_TRUE(fs::exists(saved / "merges.txt"));
  EXPECT_EQ(load_stop_tokens(saved, std::nullopt), std::vector<int32_t>{5});
  save_model(saved, *model, {.copy_from = base, .generation_config = {{"eos_token_id", 9}}});
  EXPECT_EQ(load_stop_tokens(saved, std::nullopt), std::vector<int32_t>{9});
  save_model(saved, *model, {.copy_from = saved});  // saves onto itself
  EXPECT_EQ(load_stop_tokens(saved, std::nullopt), std::vector<int32_t>{9});
}

// A saved model ends answers at the same tokens in other programs, which read generation_config.json only.
TEST_F(Checkpoint, WritesAllStopTokensIntoGenerationConfig) {
  const fs::path base = folder_ / "base", saved = folder_ / "saved";
  make_directories(base / "additional_chat_templates");
  ModelConfig config = small_config(families::llama, true);
  config.vocab_size = 260;
  config.source = Json();
  auto model = random_model(config);
  save_model(base, *model, {.generation_config = {{"eos_token_id", 256}, {"top_k", 20}}});
  write_file_atomically(base / "tokenizer.json", byte_level_tokenizer_json());
  write_file_atomically(base / "tokenizer_config.json", byte_level_tokenizer_config_json());
  write_file_atomically(base / "additional_chat_templates" / "tool_use.jinja", "tools");
  save_model(saved, *model, {.copy_from = base});
  EXPECT_EQ(read_json(saved / "generation_config.json"), (Json{{"eos_token_id", {256, 258}}, {"top_k", 20}}));
  EXPECT_EQ(read_file(saved / "additional_chat_templates" / "tool_use.jinja"), "tools");
  fs::remove(base / "generation_config.json");
  save_model(saved, *model, {.copy_from = base});
  EXPECT_EQ(read_json(saved / "generation_config.json"), (Json{{"eos_token_id", 258}}));
}

TEST_F(Checkpoint, NamesMissingExtraAndWrongShapes) {
  const ModelConfig config = small_config(families::qwen3, false);
  save_changed(config, [](NamedTensors& tensors) {
    std::erase_if(tensors, [](const auto& named) { return named.first.ends_with("k_proj.weight"); });
  });
  expect_names(refusal(), {"2 missing", "model.layers.0.self_attn.k_proj.weight",
                           "model.layers.1.self_attn.k_proj.weight"});
  save_changed(config, [](NamedTensors& tensors) {
    for (auto& [name, tensor] : tensors)
      if (name == "model.layers.1.mlp.up_proj.weight") tensor = tensor.t();
    tensors.emplace_back("model.layers.2.mlp.up_proj.weight", at::zeros({2}));
  });
  expect_names(refusal(),
               {"1 of the wrong shape", "model.layers.1.mlp.up_proj.weight (got [16, 24], expected [24, 16])",
                "1 extra", "model.layers.2.mlp.up_proj.weight"});
  save_changed(config, [](NamedTensors& tensors) { tensors[3].second = tensors[3].second.to(at::kInt); });
  expect_names(refusal(), {"1 of the wrong shape or type", "Int"});
  save_changed(config, [](NamedTensors& tensors) { tensors.erase(tensors.begin(), tensors.begin() + 10); });
  expect_names(refusal(), {"10 missing", "…"});
}

TEST_F(Checkpoint, FailedLoadLeavesTheModel) {
  const ModelConfig config = small_config(families::llama, true);
  save_changed(config, [](NamedTensors& tensors) { tensors.pop_back(); });
  auto model = random_model(config);
  std::vector<at::Tensor> before;
  for (const Parameter* parameter : model->parameters()) before.push_back(parameter->value.clone());
  EXPECT_THROW(load_weights(folder_, *model), UserError);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(model->parameters()[i]->value, before[i]));
}

TEST_F(Checkpoint, IgnoresAnEqualTiedHeadAndInvFreqOnly) {
  const ModelConfig tied = small_config(families::llama, true);
  const auto add = [](const char* name, std::vector<int64_t> shape) {
    return [=](NamedTensors& tensors) { tensors.emplace_back(name, at::zeros(shape)); };
  };
  const auto copy_head = [](double difference) {
    return [=](NamedTensors& tensors) {
      for (const auto& [name, tensor] : tensors)
        if (name == "model.embed_tokens.weight") {
          tensors.emplace_back("lm_head.weight", tensor + difference);
          break;
        }
    };
  };
  save_changed(tied, copy_head(0));
  EXPECT_EQ(refusal(), "(accepted)");
  save_changed(tied, copy_head(1));
  expect_names(refusal(), {"config.json", "tie_word_embeddings", "got true", "model.safetensors",
                           "lm_head.weight", "model.embed_tokens.weight", "to false", "delete"});
  ModelConfig backbone = load_model_config(folder_);  // a critic's: it computes no logits
  backbone.computes_logits = false;
  load_weights(folder_, *make_model(backbone, at::kFloat));
  save_changed(tied, add("lm_head.weight", {41, 16}));
  expect_names(refusal(), {"1 extra", "lm_head.weight"});
  save_changed(tied, add("model.layers.0.self_attn.rotary_emb.inv_freq", {3}));
  EXPECT_EQ(refusal(), "(accepted)");
  save_changed(tied, add("model.layers.0.self_attn.q_norm.weight", {6}));
  expect_names(refusal(), {"1 extra", "q_norm"});
}

// A writer that stores shared tensors once may keep either name (safetensors' save_model).
TEST_F(Checkpoint, ReadsATiedMatrixUnderTheHeadsName) {
  auto model = random_model(small_config(families::qwen2, true));
  save_model(folder_, *model);
  NamedTensors tensors = named_weights(*model);
  for (auto& [name, tensor] : tensors)
    if (name == "model.embed_tokens.weight") name = "lm_head.weight";
  write_safetensors(folder_ / "model.safetensors", tensors);
  expect_same(*model, *load_model(folder_, at::kFloat));
  save_changed(small_config(families::qwen2, false), [](NamedTensors& untied) {
    std::erase_if(untied, [](const auto& named) { return named.first == "lm_head.weight"; });
  });
  expect_names(refusal(), {"1 missing: lm_head.weight", "set tie_word_embeddings to true"});
}

// The tensors say how a model is stored, whatever the key dtype of config.json says.
TEST_F(Checkpoint, StoredTypeIsThatOfTheTensors) {
  auto model = random_model(small_config(families::llama, false));
  save_model(folder_, *model, {.dtype = at::kBFloat16});
  EXPECT_EQ(stored_type(folder_), at::kBFloat16);
  write_safetensors(folder_ / "model.safetensors", named_weights(*model));
  EXPECT_EQ(load_model_config(folder_).torch_dtype, "bfloat16");
  EXPECT_EQ(stored_type(folder_), at::kFloat);
  NamedTensors mixed = named_weights(*model);
  for (auto& [name, tensor] : mixed) tensor = tensor.to(tensor.dim() == 1 ? at::kHalf : at::kBFloat16);
  write_safetensors(folder_ / "model.safetensors", mixed);
  EXPECT_EQ(stored_type(folder_), at::kFloat);
}

TEST_F(Checkpoint, RefusesBrokenDirectories) {
  const ModelConfig config = small_config(families::qwen2, false);
  EXPECT_THROW(load_model(folder_, at::kFloat), UserError);
  save_model(folder_, *random_model(config), {.max_shard_bytes = 5000});
  const std::string index = read_file(folder_ / "model.safetensors.index.json");
  const auto with_index = [&](const std::string& text) {
    write_file_atomically(folder_ / "model.safetensors.index.json", text);
    return refusal();
  };
  ASSERT_EQ(with_index(index), "(accepted)");
  expect_names(with_index("{}"), {"index.json", "weight_map"});
  expect_names(with_index("[]"), {"index.json", "weight_map"});
  expect_names(with_index(R"({"weight_map": {"a": "../x"}})"), {"'a'", "../x"});
  expect_names(with_index(R"({"weight_map": {"a": "/etc/passwd"}})"), {"'a'", "/etc/passwd"});
  expect_names(with_index(R"({"weight_map": {"a": 3}})"), {"'a'"});
  expect_names(with_index(R"({"weight_map": {"a": "gone.safetensors"}})"), {"gone.safetensors"});
  Json changed = Json::parse(index);
  changed["weight_map"]["model.layers.7.x"] = "model-00001-of-00006.safetensors";
  for (const auto& [tensor, file] : changed["weight_map"].items())
    changed["weight_map"]["model.layers.7.x"] = file;
  expect_names(with_index(changed.dump()), {"model.layers.7.x"});
  fs::remove(folder_ / "model.safetensors.index.json");
  expect_names(refusal(), {"model.safetensors", "neither"});
}

// A config of a model of 10^17 bytes over the weights of a small model is an error, not an allocation.
TEST_F(Checkpoint, RefusesHugeConfigWithoutAllocating) {
  save_model(folder_, *random_model(small_config(families::qwen3, true)));
  Json json = read_json(folder_ / "config.json");
  json["vocab_size"] = 2'000'000'000;
  json["hidden_size"] = 10'000'000;
  write_file_atomically(folder_ / "config.json", json.dump());
  expect_names(refusal(), {"model.embed_tokens.weight (got [40, 16], expected [2000000000, 10000000])"});
}

TEST_F(Checkpoint, FullDiskLeavesTheWeightsThatWereThere) {
  ModelConfig config = small_config(families::qwen3, true);
  config.hidden_size = 512;
  config.intermediate_size = 60;  // 123 kB, over the limit, after shards that are below it
  config.source = Json();
  auto model = random_model(config);
  save_model(folder_, *model);
  auto other = random_model(config);
  rlimit old_limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit{100'000, old_limit.rlim_max};
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_THROW(save_model(folder_, *other), IoError);
  EXPECT_THROW(save_model(folder_, *other, {.max_shard_bytes = 90'000}), IoError);
  setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(files(), (std::set<std::string>{"config.json", "model.safetensors"}));
  expect_same(*model, *load_model(folder_, at::kFloat));
}

TEST_F(Checkpoint, GradientsGoUnderTheSameNames) {
  auto model = random_model(small_config(families::qwen3, true));
  model->allocate_gradients();
  const NamedTensors weights = named_weights(*model), gradients = named_gradients(*model);
  ASSERT_EQ(weights.size(), gradients.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    EXPECT_EQ(gradients[i].first, weights[i].first);
    EXPECT_EQ(gradients[i].second.sizes(), weights[i].second.sizes());
  }
}

}  // namespace
}  // namespace bough
