// Adapters in generation: for each kind of WeightChannel, the engine samples with the trainer's current
// adapter.
#include "models/lora.h"

#include <unistd.h>

#include <filesystem>
#include <map>

#include "models/quantized_model.h"
#include "rollout/adapter_engines.h"
#include "rollout/copied_weights.h"
#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

LoraSettings lora_settings() {
  LoraSettings settings;
  settings.rank = 4;
  settings.alpha = 6;
  settings.targets = {{"all-linear"}, {"lm_head"}};
  return settings;
}

// Changes the adapter as a training step does. Its second factor B is 0 before the first step.
void change_adapter(Model& model, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  for (Parameter* parameter : model.trained_parameters()) {
    const auto noise = at::randn(parameter->value.sizes(), generator, at::TensorOptions().dtype(at::kDouble));
    parameter->value.add_(noise.mul_(0.2));
  }
}

double limit_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-9 : dtype == at::kFloat ? 1e-4 : 0.3;
}

// Expects that the engine's log-probabilities are those of `now`, and not those of `before`.
void expect_engine_follows(EmbeddedEngine& engine, const Model& now, const Model& before) {
  double worst = 0, from_before = 0;
  for (const GenerationResult& result : engine.generate(mixed_requests())) {
    worst = std::max(worst, largest_log_prob_error(now, result, 1.0));
    from_before = std::max(from_before, largest_log_prob_error(before, result, 1.0));
  }
  EXPECT_LT(worst, limit_of(now.dtype()));
  EXPECT_GT(from_before, 0.1);
}

TEST(LoraGeneration, AnAdapterWithZeroBEqualsTheBaseBitForBit) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto base = small_rollout_model(dtype, 3);
    const auto model = base->share();
    const auto tokens = random_tokens(5, 40, 97);
    add_adapter(*model, lora_settings(), 1);
    EXPECT_TRUE(at::equal(full_logits(*model, tokens), full_logits(*base, tokens))) << dtype;
    change_adapter(*model, 2);
    EXPECT_FALSE(at::equal(full_logits(*model, tokens), full_logits(*base, tokens))) << dtype;
    EXPECT_TRUE(at::equal(full_logits(*without_adapter(*model), tokens), full_logits(*base, tokens)))
        << dtype;
  }
}

TEST(LoraGeneration, AnEngineUsesTheAdapterOfItsSharedModel) {
  const auto model = small_rollout_model(at::kFloat, 3);
  add_adapter(*model, lora_settings(), 1);
  const auto base = without_adapter(*model);
  EmbeddedEngine engine(*model, engine_options(7, 24));
  SharedWeights weights(model.get());
  change_adapter(*model, 2);
  weights.publish(1);
  engine.update_weights(*weights.take());
  expect_engine_follows(engine, *model, *base);
}

TEST(LoraGeneration, PublishedAdaptersReachAnEngineWithItsOwnModel) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const bool is_quantized : {false, true}) {
      const auto model = small_rollout_model(dtype, 3);
      add_adapter(*model, lora_settings(), 1);
      const auto generating = copy_of(*model);
      auto options = engine_options(7, 24);
      if (is_quantized) options.settings.quantization = "int8";
      EmbeddedEngine engine(*generating, std::move(options));
      CopiedWeights weights(*model, *generating, /*in_place=*/is_quantized);
      for (int32_t version = 1; version <= 2; ++version) {
        const auto before = copy_of(*model);
        change_adapter(*model, static_cast<uint64_t>(version));
        weights.publish(version);
        engine.update_weights(*weights.take());
        if (is_quantized) {
          const QuantizedModel now(*model), then(*before);
          expect_engine_follows(engine, now.model(), then.model());
        } else {
          expect_engine_follows(engine, *model, *before);
        }
      }
      // The base weights share memory. Only adapters are copied.
      EXPECT_EQ(model->embedding().value.data_ptr(), generating->embedding().value.data_ptr());
    }
}

TEST(LoraGeneration, TwoAdaptersShareOneBase) {
  const auto base = small_rollout_model(at::kDouble, 3);
  const auto one = base->share(), two = base->share();
  add_adapter(*one, lora_settings(), 1);
  add_adapter(*two, lora_settings(), 2);
  change_adapter(*one, 3);
  change_adapter(*two, 4);
  EmbeddedEngine engine(*two, engine_options(7, 24));
  expect_engine_follows(engine, *two, *one);
  EXPECT_EQ(one->embedding().value.data_ptr(), two->embedding().value.data_ptr());
}

TEST(LoraGeneration, RequestsNameTheirAdapter) {
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) / str("bough_adapters_", getpid());
  const auto base = small_rollout_model(at::kFloat, 3);
  const auto one = base->share(), two = base->share();
  std::map<std::string, std::filesystem::path> adapters;
  for (Model* model : {one.get(), two.get()}) {
    const std::string name = model == one.get() ? "one" : "two";
    add_adapter(*model, lora_settings(), 1);
    change_adapter(*model, model == one.get() ? 3 : 4);
    adapters[name] = folder / name;
    save_adapter(adapters[name], *model, "base");
  }
  AdapterEngines engines(*base, adapters, engine_options(7, 24));
  const std::map<std::string, const Model*> models = {
      {"", base.get()}, {"one", one.get()}, {"two", two.get()}};
  std::map<uint64_t, std::string> asked;
  for (const auto& [name, model] : models)
    for (GenerationRequest& request : mixed_requests()) {
      request.id = asked.size() + 1;
      request.adapter = name;
      asked[request.id] = name;
      engines.submit(std::move(request));
    }
  EXPECT_EQ(engines.running().size(), asked.size());
  GenerationRequest again = mixed_requests().front();
  again.id = 1;
  again.adapter = "two";
  EXPECT_THROW(engines.submit(again), UserError) << "in flight, for another";
  again.id = 1000;
  again.adapter = "three";
  EXPECT_THROW(engines.submit(again), UserError);
  const std::vector<GenerationResult> results = engines.drain();
  EXPECT_EQ(results.size(), asked.size());
  for (const GenerationResult& result : results)
    for (const auto& [name, model] : models) {
      const double error = largest_log_prob_error(*model, result, 1.0);
      if (name == asked.at(result.id)) EXPECT_LT(error, 1e-4) << name;
      else EXPECT_GT(error, 0.01) << asked.at(result.id) << " is " << name;
    }
  EXPECT_GT(engines.statistics().new_tokens, 0);
  EXPECT_FALSE(engines.cancel(1));
  std::filesystem::remove_all(folder);
}

// Free memory shrinks with every engine that has taken its pages.
TEST(AdapterEngines, DivideTheFreeMemoryOnce) {
  int calls = 0;
  const auto free = [&] { return int64_t{80} << (30 - 10 * calls++); };
  const at::Device gpu(at::kCUDA);
  EXPECT_EQ(kv_memory_of_each({}, gpu, 4, free).count, int64_t{17} << 30);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(kv_memory_of_each({int64_t{1} << 20}, gpu, 4, free).count, 1 << 18);
  EXPECT_TRUE(kv_memory_of_each({}, at::kCPU, 4, free).is_auto());
  EXPECT_EQ(calls, 1) << "only auto on a GPU depends on the free memory";
}

}  // namespace
}  // namespace bough
