#include "tinker/resident_models.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>

#include "base/base_test_util.h"
#include "base/error.h"
#include "tinker/model_memory.h"
#include "train/small_model.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

const LoraSettings kWhole;

LoraSettings adapter_of(int64_t rank) {
  return {.rank = rank, .alpha = 32, .targets = {{"q_proj"}, {"up_proj"}, {"lm_head"}}};
}

ForwardBackwardRequest request_of(int32_t seed) {
  ForwardBackwardRequest request;
  request.loss_fn = "cross_entropy";
  for (int32_t i = 0; i < 3; ++i) {
    WireDatum datum{{1, 2, 3, 4 + (seed + i) % 9, 20 + i}, {}};
    WireTensor& targets = datum.inputs["target_tokens"];
    for (const int32_t token : datum.tokens) targets.values.push_back((token + seed) % 40);
    request.data.push_back(std::move(datum));
  }
  return request;
}

// Two gradients and a step.
void train(TrainingModel& model, int32_t seed) {
  for (const int32_t each : {seed, seed + 1}) {
    const ForwardBackwardRequest request = request_of(each);
    model.forward_backward({&request}, read_loss_settings(request));
  }
  model.optim_step({.learning_rate = 1e-2});
}

// Weights, gradients, and what the optimizer does next.
std::vector<at::Tensor> state_of(TrainingModel& model) {
  std::vector<at::Tensor> state;
  for (Parameter* parameter : model.model().trained_parameters()) {
    state.push_back(parameter->value.clone());
    state.push_back(parameter->main_grad.clone());
  }
  return state;
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!a[i].equal(b[i])) return false;
  return a.size() == b.size();
}

class ResidentModelsTest : public ::testing::Test {
 protected:
  ResidentModelsTest() { fs::create_directories(folder_); }
  ~ResidentModelsTest() override { fs::remove_all(folder_); }

  static std::string name_of(int32_t number) { return str("model-", number); }
  std::unique_ptr<TrainingModel> make(const LoraSettings& adapter, int32_t seed) {
    return std::make_unique<TrainingModel>(*base_, adapter, static_cast<uint64_t>(seed), TrainingPlans{});
  }

  const fs::path folder_ = fs::temp_directory_path() / str("bough_residents_", ::getpid());
  std::unique_ptr<Model> base_ = small_model(at::kFloat, 3);
  FakeClock clock_;
};

TEST_F(ResidentModelsTest, ManyModelsInALittleMemoryTrainAsAlone) {
  constexpr int32_t kModels = 40;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    base_ = small_model(type, 3);
    const int64_t bytes = need_of(*base_, adapter_of(4)).bytes();
    ResidentModels residents(3 * bytes, folder_, clock_);
    for (int32_t i = 0; i < kModels; ++i)
      residents.add(name_of(i), bytes, [&] { return make(adapter_of(4), i); });
    EXPECT_EQ(residents.parked_bytes(), (kModels - 3) * bytes);
    for (int32_t step = 0; step < 3; ++step)
      for (const int32_t part : {0, 1, 2})  // a model is parked with gradients, too
        for (int32_t i = 0; i < kModels; ++i) {
          TrainingModel& model = *residents.use(name_of(i));
          const ForwardBackwardRequest request = request_of(10 * step + i + part);
          if (part < 2) model.forward_backward({&request}, read_loss_settings(request));
          else model.optim_step({.learning_rate = 1e-2});
        }
    EXPECT_TRUE(fs::is_empty(folder_)) << "parked files have no names";
    for (int32_t i = 0; i < kModels; ++i) {
      const auto alone = make(adapter_of(4), i);
      for (int32_t step = 0; step < 3; ++step) train(*alone, 10 * step + i);
      EXPECT_TRUE(equal(state_of(*residents.use(name_of(i))), state_of(*alone))) << i;
    }
    for (int32_t i = 0; i < kModels; ++i) residents.remove(name_of(i));
    EXPECT_EQ(residents.parked_bytes(), 0);
    EXPECT_EQ(residents.use(name_of(0)), nullptr);
  }
}

TEST_F(ResidentModelsTest, AModelOfAllWeightsIsParkedLikeAnyOther) {
  const std::vector<at::Tensor> base_before = [&] {
    std::vector<at::Tensor> values;
    for (Parameter* parameter : base_->parameters()) values.push_back(parameter->value.clone());
    return values;
  }();
  const auto parked = make(kWhole, 0), alone = make(kWhole, 0);
  train(*parked, 1);
  parked->park(folder_);
  EXPECT_TRUE(parked->is_parked());
  parked->unpark();
  train(*parked, 5);
  train(*alone, 1);
  train(*alone, 5);
  EXPECT_TRUE(equal(state_of(*parked), state_of(*alone)));
  std::vector<at::Tensor> base_after;
  for (Parameter* parameter : base_->parameters()) base_after.push_back(parameter->value);
  EXPECT_TRUE(equal(base_before, base_after)) << "the base is shared with others";
}

TEST_F(ResidentModelsTest, TheModelThatWasUsedLongestAgoGoesFirstAndUnusedOnesGoByTime) {
  const int64_t bytes = need_of(*base_, adapter_of(2)).bytes();
  ResidentModels residents(2 * bytes, folder_, clock_);
  std::map<int32_t, TrainingModel*> models;
  const auto use = [&](int32_t number) {
    clock_.advance(std::chrono::seconds(1));
    models[number] = residents.use(name_of(number));
  };
  for (const int32_t number : {0, 1}) {
    residents.add(name_of(number), bytes, [&] { return make(adapter_of(2), number); });
    use(number);
  }
  use(0);
  residents.add(name_of(2), bytes, [&] { return make(adapter_of(2), 2); });
  use(2);
  EXPECT_TRUE(models[1]->is_parked());
  EXPECT_FALSE(models[0]->is_parked());
  clock_.advance(std::chrono::seconds(60));
  use(2);
  residents.park_unused(30);
  EXPECT_TRUE(models[0]->is_parked());
  EXPECT_FALSE(models[2]->is_parked());
}

TEST_F(ResidentModelsTest, AModelThatCannotBeParkedStaysAsItWas) {
  const auto model = make(adapter_of(2), 1);
  train(*model, 1);
  const std::vector<at::Tensor> before = state_of(*model);
  EXPECT_THROW(model->park(folder_ / "missing"), IoError);
  EXPECT_FALSE(model->is_parked());
  EXPECT_TRUE(equal(before, state_of(*model)));
}

TEST_F(ResidentModelsTest, AModelNeedsWhatItsTensorsTake) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kDouble})
    for (const LoraSettings& adapter : {adapter_of(5), kWhole}) {
      base_ = small_model(type, 3);
      const ModelNeed need = need_of(*base_, adapter);
      const auto model = make(adapter, 1);
      ModelNeed held;
      for (const Parameter* parameter : model->model().trained_parameters()) {
        held.weights += static_cast<int64_t>(parameter->value.nbytes());
        held.gradients += static_cast<int64_t>(parameter->main_grad.nbytes());
      }
      for (const at::Tensor* tensor : Optimizer(model->model(), {}, 0).state_tensors())
        held.optimizer += static_cast<int64_t>(tensor->nbytes());
      EXPECT_EQ(need.weights, held.weights);
      EXPECT_EQ(need.gradients, held.gradients);
      EXPECT_EQ(need.optimizer, held.optimizer);
      EXPECT_EQ(need.sampler, adapter.enabled() ? 0 : held.weights);
    }
}

TEST_F(ResidentModelsTest, ARefusalSaysWhatIsNeededWhatIsThereAndWhatHelps) {
  TrainingServiceSettings settings;
  const ServiceMemory automatic = plan_memory(settings, at::kCPU, 1000);
  EXPECT_EQ(automatic.models, 225);
  EXPECT_EQ(automatic.passes, 450);
  EXPECT_EQ(automatic.sampler, 112);
  settings.model_memory = {1 << 20};
  settings.memory = {3 << 20};
  const ServiceMemory memory = plan_memory(settings, at::kCPU, int64_t{1} << 30);
  EXPECT_EQ(memory.passes, 3 << 20);
  const ModelNeed fits = need_of(*base_, adapter_of(2)), large = need_of(*base_, adapter_of(1000));
  const ModelsHeld none{.count = 0, .bytes = 0, .parking = 1 << 30, .place = "tinker"};
  EXPECT_EQ(why_no_memory(fits, adapter_of(2), memory, none), "");
  const std::string too_large = why_no_memory(large, adapter_of(1000), memory, none);
  const int64_t rank = (1 << 20) / need_of(*base_, adapter_of(1)).bytes();
  for (const std::string& part :
       {str("a rank of at most ", rank, " fits"), std::string("1 MiB (model_memory"),
        std::string("optimizer"), std::string("1 GiB were free")})
    EXPECT_NE(too_large.find(part), std::string::npos) << part << " in: " << too_large;
  EXPECT_EQ(why_no_memory(need_of(*base_, adapter_of(rank)), adapter_of(rank), memory, none), "");
  const ModelsHeld full{.count = 9, .bytes = 1 << 20, .parking = 10, .place = "tinker"};
  EXPECT_NE(why_no_memory(fits, adapter_of(2), memory, full).find("finish sessions"), std::string::npos);
  EXPECT_NE(why_no_memory(large, kWhole, memory, none).find("train an adapter instead"), std::string::npos);
}

}  // namespace
}  // namespace bough
