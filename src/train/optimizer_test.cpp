#include "train/optimizer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <map>

#include "base/error.h"
#include "models/checkpoint.h"
#include "train/small_model.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

OptimizerSettings lively_settings() {
  OptimizerSettings settings;
  settings.lr = 0.01;
  settings.weight_decay = 0.1;
  settings.beta2 = 0.95;
  settings.lr_scheduler_type = "cosine";
  settings.warmup_steps_proportion = 0.2;
  return settings;
}

void add_gradients(Model& model, uint64_t seed, double scale = 1) {
  auto generator = at::detail::createCPUGenerator(seed);
  for (Parameter* parameter : model.parameters())
    parameter->main_grad.add_(
        at::randn(parameter->value.sizes(), generator, at::TensorOptions().dtype(at::kDouble)).mul_(scale));
}

std::map<std::string, at::Tensor> copies(const NamedTensors& tensors) {
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, tensor] : tensors) result[name] = tensor.clone();
  return result;
}

void expect_equal_weights(Model& left, Model& right) {
  const auto expected = copies(named_weights(right));
  for (const auto& [name, tensor] : named_weights(left)) EXPECT_TRUE(tensor.equal(expected.at(name))) << name;
}

// AdamW by hand, in fp64, one element of one tensor at a time. It equals torch.optim.AdamW after
// torch.nn.utils.clip_grad_norm_, except for the 1e-6 that clip_grad_norm_ adds to the norm.
class HandWritten {
 public:
  HandWritten(Model& model, const OptimizerSettings& settings) : settings_(settings) {
    for (const auto& [name, tensor] : named_weights(model)) {
      auto& p = parameters_[name];
      p.decayed = name.find("norm") == std::string::npos && name.find("bias") == std::string::npos;
      const auto flat = tensor.to(at::kDouble).flatten();
      p.w.assign(flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel());
      p.m.assign(p.w.size(), 0);
      p.v.assign(p.w.size(), 0);
    }
  }

  double step(Model& model, double lr) {
    ++num_steps_;
    std::map<std::string, at::Tensor> gradients;
    double sum = 0;
    for (const auto& [name, tensor] : named_gradients(model)) {
      gradients[name] = tensor.to(at::kDouble).flatten().clone();
      for (int64_t i = 0; i < tensor.numel(); ++i) sum += std::pow(gradients[name].data_ptr<double>()[i], 2);
    }
    const double norm = std::sqrt(sum);
    const double clip = settings_.gradient_clipping;
    const double scale = clip > 0 && norm > clip ? clip / norm : 1;
    for (auto& [name, p] : parameters_)
      for (size_t i = 0; i < p.w.size(); ++i) {
        const double g = scale * gradients.at(name).data_ptr<double>()[i];
        if (p.decayed) p.w[i] -= lr * settings_.weight_decay * p.w[i];
        p.m[i] += (1 - settings_.beta1) * (g - p.m[i]);
        p.v[i] = settings_.beta2 * p.v[i] + (1 - settings_.beta2) * g * g;
        const double m_hat = p.m[i] / (1 - std::pow(settings_.beta1, num_steps_));
        const double v_hat = p.v[i] / (1 - std::pow(settings_.beta2, num_steps_));
        p.w[i] -= lr * m_hat / (std::sqrt(v_hat) + settings_.eps);
      }
    return norm;
  }

  double largest_difference(Model& model) const {
    double largest = 0;
    for (const auto& [name, tensor] : named_weights(model)) {
      const auto flat = tensor.to(at::kDouble).flatten();
      const auto& w = parameters_.at(name).w;
      for (size_t i = 0; i < w.size(); ++i)
        largest = std::max(largest, std::abs(flat.data_ptr<double>()[i] - w[i]));
    }
    return largest;
  }

 private:
  struct Values {
    bool decayed;
    std::vector<double> w, m, v;
  };
  OptimizerSettings settings_;
  std::map<std::string, Values> parameters_;
  int num_steps_ = 0;
};

TEST(Optimizer, FollowsAdamWWrittenByHand) {
  for (const double decay : {0.0, 0.1})
    for (const double clip : {0.0, 1.0, 1e9})
      for (const auto type : {at::kDouble, at::kFloat}) {
        auto model = small_model(type);
        auto settings = lively_settings();
        settings.weight_decay = decay;
        settings.gradient_clipping = clip;
        Optimizer optimizer(*model, settings, 10);
        HandWritten expected(*model, settings);
        const auto schedule = make_schedule(settings, 10);
        for (int64_t step = 0; step < 6; ++step) {
          add_gradients(*model, static_cast<uint64_t>(step), step % 2 ? 3 : 0.01);
          const double norm = expected.step(*model, schedule.learning_rate(step));
          const auto report = optimizer.step();
          EXPECT_NEAR(report.grad_norm, norm, 1e-12 * norm);
          EXPECT_EQ(report.lr, schedule.learning_rate(step));
          EXPECT_FALSE(report.skipped);
          // Weights are of order 1. In fp32 each of them is rounded once per step.
          EXPECT_LT(expected.largest_difference(*model),
                    (type == at::kDouble ? 1e-14 : 3e-7) * double(step + 1));
        }
        for (const auto& [name, gradient] : named_gradients(*model))
          EXPECT_EQ(gradient.count_nonzero().item<int64_t>(), 0) << name;
        optimizer.check_integrity();
      }
}

// Updates far smaller than the distance between bf16 numbers at the weight must add up in the master.
TEST(Optimizer, MastersKeepWhatBf16Loses) {
  auto model = small_model(at::kBFloat16);
  auto exact = small_model(at::kFloat);
  for (Parameter* p : model->parameters()) p->value.fill_(1);
  for (Parameter* p : exact->parameters()) p->value.fill_(1);
  auto settings = lively_settings();
  settings.lr = 1e-4;  // bf16 numbers at 1 are 4e-3 apart
  settings.lr_scheduler_type = "constant";
  settings.warmup_steps_proportion = 0;
  settings.weight_decay = 0;
  Optimizer optimizer(*model, settings, 100), exact_optimizer(*exact, settings, 100);
  for (int step = 0; step < 100; ++step) {
    for (Parameter* p : model->parameters()) p->main_grad.fill_(1);
    for (Parameter* p : exact->parameters()) p->main_grad.fill_(1);
    optimizer.step();
    exact_optimizer.step();
  }
  optimizer.check_integrity();
  for (Parameter* p : model->parameters()) EXPECT_NEAR(p->value.flatten()[0].item<double>(), 0.99, 4e-3);
  for (size_t i = 0; i < model->parameters().size(); ++i)
    EXPECT_TRUE(model->parameters()[i]->value.equal(exact->parameters()[i]->value.to(at::kBFloat16)));
}

TEST(Optimizer, SkipsStepsWhoseGradientIsNotFinite) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                           -std::numeric_limits<double>::infinity()}) {
    auto model = small_model(at::kBFloat16), twin = small_model(at::kBFloat16);
    auto settings = lively_settings();
    settings.lr_scheduler_type = "constant";
    settings.warmup_steps_proportion = 0;
    Optimizer optimizer(*model, settings, 10), twin_optimizer(*twin, settings, 10);
    for (uint64_t step = 0; step < 4; ++step) {
      if (step == 2) {
        add_gradients(*model, 77);
        model->parameters().back()->main_grad.view({-1})[3] = bad;
        const auto before = copies(named_weights(*model));
        const auto report = optimizer.step();
        EXPECT_TRUE(report.skipped);
        EXPECT_FALSE(std::isfinite(report.grad_norm));
        for (const auto& [name, tensor] : named_weights(*model)) EXPECT_TRUE(tensor.equal(before.at(name)));
        for (const auto& [name, gradient] : named_gradients(*model))
          EXPECT_EQ(gradient.count_nonzero().item<int64_t>(), 0);
      }
      add_gradients(*model, step);
      add_gradients(*twin, step);
      optimizer.step();
      twin_optimizer.step();
    }
    // The moments and the bias correction did not change.
    expect_equal_weights(*model, *twin);
    EXPECT_EQ(optimizer.num_steps(), 5);
    EXPECT_EQ(optimizer.num_skipped(), 1);
    optimizer.check_integrity();
  }
}

TEST(Optimizer, TheScheduleAdvancesOverSkippedSteps) {
  auto model = small_model(at::kFloat);
  const auto settings = lively_settings();
  Optimizer optimizer(*model, settings, 10);
  model->parameters()[0]->main_grad.fill_(std::numeric_limits<float>::infinity());
  EXPECT_TRUE(optimizer.step().skipped);
  add_gradients(*model, 1);
  EXPECT_EQ(optimizer.step().lr, make_schedule(settings, 10).learning_rate(1));
}

TEST(Optimizer, DoesNotDependOnThreads) {
  std::vector<std::unique_ptr<Model>> models;
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    models.push_back(small_model(at::kFloat));
    Optimizer optimizer(*models.back(), lively_settings(), 10);
    for (uint64_t step = 0; step < 3; ++step) {
      add_gradients(*models.back(), step);
      optimizer.step();
    }
  }
  at::set_num_threads(before);
  expect_equal_weights(*models[0], *models[1]);
  expect_equal_weights(*models[0], *models[2]);
}

class OptimizerFiles : public ::testing::Test {
 protected:
  OptimizerFiles()
      : directory_(fs::path(::testing::TempDir()) / ("optimizer_" + std::to_string(::getpid()))) {
    fs::create_directories(directory_);
  }
  ~OptimizerFiles() override { fs::remove_all(directory_); }

  fs::path directory_;
};

TEST_F(OptimizerFiles, LoadingGoesOnBitForBit) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    auto model = small_model(type), resumed = small_model(type, 99);
    Optimizer optimizer(*model, lively_settings(), 10), resumed_optimizer(*resumed, lively_settings(), 10);
    for (uint64_t step = 0; step < 8; ++step) {
      if (step == 4) {
        model->parameters()[0]->main_grad.fill_(std::numeric_limits<double>::quiet_NaN());
        optimizer.step();
        optimizer.save(directory_);
        if (type != at::kBFloat16) {  // bf16 values are restored from the masters
          const auto weights = copies(named_weights(*model));
          for (const auto& [name, tensor] : named_weights(*resumed)) tensor.copy_(weights.at(name));
        }
        resumed_optimizer.load(directory_);
        resumed_optimizer.check_integrity();
        expect_equal_weights(*resumed, *model);
        EXPECT_EQ(resumed_optimizer.num_steps(), 5);
        EXPECT_EQ(resumed_optimizer.num_skipped(), 1);
      }
      add_gradients(*model, step);
      if (step >= 4) add_gradients(*resumed, step);
      const auto report = optimizer.step();
      if (step >= 4) {
        EXPECT_EQ(resumed_optimizer.step().lr, report.lr);
      }
    }
    expect_equal_weights(*resumed, *model);
  }
}

TEST_F(OptimizerFiles, RefusesFilesOfOtherModelsAndDamagedOnes) {
  auto model = small_model(at::kFloat);
  Optimizer optimizer(*model, lively_settings(), 10);
  const auto expect_refusal = [&](const std::string& word) {
    try {
      optimizer.load(directory_);
      ADD_FAILURE() << "loaded; expected an error with " << word;
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("optimizer.safetensors"), std::string::npos) << error.what();
    }
    EXPECT_EQ(optimizer.num_steps(), 0);
  };
  expect_refusal("check the path");
  auto other = small_model(at::kBFloat16);
  Optimizer(*other, {}, 1).save(directory_);
  expect_refusal("expected the");  // the file has masters, an fp32 model has none
  auto wider = small_model(at::kFloat, 0, 24);
  Optimizer(*wider, {}, 1).save(directory_);
  expect_refusal("expected Float");
  write_safetensors(directory_ / "optimizer.safetensors", named_weights(*model));
  expect_refusal("format");
  Optimizer(*model, {}, 1).save(directory_);
  fs::resize_file(directory_ / "optimizer.safetensors",
                  fs::file_size(directory_ / "optimizer.safetensors") - 100);
  expect_refusal("");
  write_safetensors(directory_ / "optimizer.safetensors", {}, {},
                    {{"format", "bough-adamw-1"}, {"num_steps", "-3"}});
  expect_refusal("num_steps");
}

Schedule schedule(Schedule::Shape shape, double min_ratio = 0) {
  return {.peak = 2, .shape = shape, .min_ratio = min_ratio, .num_warmup_steps = 4, .num_steps = 12};
}

TEST(Schedule, WarmsUpInWholeStepsAndTheFirstMoves) {
  for (const auto shape : {Schedule::Shape::kConstant, Schedule::Shape::kLinear, Schedule::Shape::kCosine}) {
    const auto s = schedule(shape, 0.1);
    EXPECT_DOUBLE_EQ(s.learning_rate(0), 0.5);
    EXPECT_DOUBLE_EQ(s.learning_rate(2), 1.5);
    EXPECT_DOUBLE_EQ(s.learning_rate(3), 2);
    EXPECT_DOUBLE_EQ(s.learning_rate(4), 2);
  }
}

TEST(Schedule, DecaysToTheRatioAndStaysThere) {
  EXPECT_DOUBLE_EQ(schedule(Schedule::Shape::kConstant).learning_rate(1000), 2);
  const auto linear = schedule(Schedule::Shape::kLinear, 0.25);
  EXPECT_DOUBLE_EQ(linear.learning_rate(8), 2 * (0.25 + 0.75 / 2));
  EXPECT_DOUBLE_EQ(linear.learning_rate(12), 0.5);
  EXPECT_DOUBLE_EQ(linear.learning_rate(1000), 0.5);
  const auto cosine = schedule(Schedule::Shape::kCosine, 0.25);
  EXPECT_DOUBLE_EQ(cosine.learning_rate(6), 2 * (0.25 + 0.75 * (1 + std::sqrt(0.5)) / 2));
  EXPECT_DOUBLE_EQ(cosine.learning_rate(8), 2 * (0.25 + 0.75 / 2));
  EXPECT_DOUBLE_EQ(cosine.learning_rate(12), 0.5);
  EXPECT_DOUBLE_EQ(cosine.learning_rate(13), 0.5);
  EXPECT_GT(cosine.learning_rate(11), 0.5);  // so with min_ratio 0 the last planned step still has a rate > 0
}

TEST(Schedule, RunsOfNoOrOnlyWarmUpSteps) {
  const Schedule none{.peak = 1, .shape = Schedule::Shape::kCosine};
  EXPECT_DOUBLE_EQ(none.learning_rate(0), 1);
  const Schedule all{.peak = 1, .shape = Schedule::Shape::kCosine, .num_warmup_steps = 5, .num_steps = 5};
  EXPECT_DOUBLE_EQ(all.learning_rate(4), 1);
}

TEST(Schedule, FromSettings) {
  OptimizerSettings settings;
  settings.lr = 3e-4;
  settings.warmup_steps_proportion = 0.29;
  settings.lr_scheduler_type = "cosine";
  settings.min_lr_ratio = 0.5;
  const auto s = make_schedule(settings, 100);
  EXPECT_EQ(s.num_warmup_steps, 29);  // 0.29 · 100 is 28.999… in binary floating point
  EXPECT_EQ(s.num_steps, 100);
  EXPECT_EQ(s.shape, Schedule::Shape::kCosine);
  EXPECT_EQ(s.peak, 3e-4);
  EXPECT_EQ(s.min_ratio, 0.5);
  EXPECT_THROW(schedule_shape("cosin"), UserError);
}

}  // namespace
}  // namespace bough
