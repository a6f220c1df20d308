// Executor, optimizer and trainer on every available device (engine.md 4), compared with the flat batch in
// fp64, with a second run, and with the CPU.
#include <ATen/Parallel.h>
#include <ATen/ops/stack.h>

#include <algorithm>

#include "kernels/common/device.h"
#include "kernels/common/device_test.h"
#include "train/critic.h"
#include "train/gradient_step.h"
#include "train/optimizer.h"
#include "train/random_records.h"
#include "train/reference_comparison.h"
#include "train/small_model.h"
#include "train/trainer.h"

namespace bough {
namespace {

class TrainingOn : public OnDevice {};
BOUGH_ON_DEVICES(TrainingOn);

std::vector<at::Tensor> gradients_of(Model& model) {
  std::vector<at::Tensor> gradients;
  for (Parameter* parameter : model.parameters()) gradients.push_back(parameter->main_grad.clone());
  return gradients;
}

ExecutionResult take_gradient(Model& model, const RandomBatch& r, const char* strategy, const Loss& loss) {
  model.allocate_gradients();
  model.zero_gradients();
  const Plan plan = with_random_keeps(make_plan(strategy, plan_request(r.batch, 32)), 1);
  return Executor(model, {.head_chunk_rows = 7, .verify_recompute = true}).execute(plan, r.batch, loss);
}

// The error of all gradients together, relative to the flat batch's in fp64.
double whole_error(Model& model, FlatResult& flat) {
  double error = 0, norm = 0;
  for (Parameter* parameter : model.parameters())
    for (const auto& part : parameter->parts) {
      const at::Tensor& expected = flat.gradients.at(part.name);
      const at::Tensor got = parameter->part_grad(part).to(at::kCPU, at::kDouble);
      error += got.sub(expected).square().sum().item<double>();
      norm += expected.square().sum().item<double>();
    }
  return std::sqrt(error / norm);
}

TEST_P(TrainingOn, EveryPlanHasTheFlatBatchsGradientsInFp64AndFp32AndRepeatsItsBits) {
  const auto loss = full_loss();
  for (const auto& [type, bound] : {std::pair{at::kDouble, 1e-10}, std::pair{at::kFloat, 1e-5}})
    for (uint64_t seed = 0; seed < (type == at::kFloat ? 20 : 4); ++seed) {
      auto r = random_batch(seed, 300);
      // With weights of scale 0.3 the loss is so steep that even the flat batch in fp32 has an error of 1e-5.
      // The scale is therefore 0.15.
      const auto model = random_model(seed, type, 0.15, device());
      FlatResult flat = FlatReference(*model).run(r->batch, *loss);
      r->batch.fields = to_type(r->batch.fields, type);
      for (const char* strategy : kStrategies) {
        const ExecutionResult result = take_gradient(*model, *r, strategy, *loss);
        EXPECT_LE(gradient_error(*model, flat), bound) << strategy << " seed " << seed << " " << type;
        EXPECT_NEAR(result.loss, flat.loss, bound * std::max(1.0, std::abs(flat.loss)));
        const std::vector<at::Tensor> first = gradients_of(*model);
        take_gradient(*model, *r, strategy, *loss);
        const std::vector<at::Tensor> second = gradients_of(*model);
        for (size_t i = 0; i < first.size(); ++i)
          ASSERT_TRUE(first[i].equal(second[i])) << strategy << " seed " << seed << " parameter " << i;
      }
    }
}

// The error of a tree's bf16 gradient is no larger than that of the flat batch in bf16 on the same device.
TEST_P(TrainingOn, Bf16ErrsNoMoreThanTheFlatBatchDoes) {
  const auto loss = full_loss();
  double flat_error = 0, tree_error = 0;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    auto r = random_batch(seed, 300);
    const auto model = random_model(seed, at::kBFloat16, 0.15, device());
    FlatResult flat = FlatReference(*model).run(r->batch, *loss);
    r->batch.fields = to_type(r->batch.fields, at::kFloat);
    const auto error_of = [&](const char* strategy) {
      take_gradient(*model, *r, strategy, *loss);
      return whole_error(*model, flat);
    };
    flat_error += error_of("dense") / 5;
    tree_error += std::max(error_of("path"), error_of("blocks")) / 5;
  }
  EXPECT_LT(flat_error, 0.05);
  EXPECT_LE(tree_error, 1.1 * flat_error);
}

// All plans and the flat batch in fp64 use the recorded experts, because in bf16 a router's choice is not
// that in fp64. The sizes of the experts are those of at::_grouped_mm.
TEST_P(TrainingOn, AMixturesPlansHaveTheFlatBatchsGradients) {
  const auto loss = full_loss();
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    double flat_error = 0, tree_error = 0;
    for (uint64_t seed = 0; seed < 5; ++seed) {
      auto r = random_batch(seed, 300);
      ModelConfig config = random_mixture_config(seed);
      config.expert_intermediate_size = 24;
      // With one expert of weight 1, the router's exact gradient is 0, and rounding errors would be compared.
      config.num_experts = 4 + static_cast<int64_t>(seed);
      config.experts_per_token = 2;
      const auto model = random_model(config, seed, type, 0.15, device());
      set_records(r->trajectories, config);
      FlatReference reference(*model);
      reference.replay(records_of(r->trajectories));
      FlatResult flat = reference.run(r->batch, *loss);
      TrainBatch marked = r->batch;
      mark_tokens(marked, pointers_of(r->trajectories), {.experts = true});
      marked.fields = to_type(marked.fields, accumulator_type(type));
      for (const char* strategy : {"dense", "path", "blocks"}) {
        model->allocate_gradients();
        model->zero_gradients();
        const Plan plan = with_random_keeps(make_plan(strategy, plan_request(marked, 32)), 1);
        Executor(*model, {.head_chunk_rows = 7, .verify_recompute = true, .replays_experts = true})
            .execute(plan, marked, *loss);
        if (type != at::kBFloat16) {
          const double error = type == at::kDouble ? gradient_error(*model, flat) : whole_error(*model, flat);
          EXPECT_LE(error, type == at::kDouble ? 1e-10 : 1e-5) << strategy << " seed " << seed;
          continue;
        }
        double& error = strategy == std::string("dense") ? flat_error : tree_error;
        error += whole_error(*model, flat) / (&error == &flat_error ? 5 : 10);
      }
    }
    EXPECT_LT(flat_error, 0.05);
    EXPECT_LE(tree_error, 1.1 * flat_error);
  }
}

class OptimizerOn : public TrainingOn {
 protected:
  void expect_steps_of_the_cpu(bool offload);
};
BOUGH_ON_DEVICES(OptimizerOn);

void OptimizerOn::expect_steps_of_the_cpu(bool offload) {
  OptimizerSettings settings;
  settings.lr = 0.01;
  settings.weight_decay = 0.1;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const auto model = small_model(type, 0, 16, device()), expected = small_model(type);
    Optimizer reference(*expected, settings, 10);
    settings.offload = offload;
    Optimizer optimizer(*model, settings, 10);
    settings.offload = false;
    for (uint64_t step = 0; step < 6; ++step) {
      auto generator = at::detail::createCPUGenerator(step);
      for (size_t i = 0; i < model->parameters().size(); ++i) {
        const at::Tensor noise = at::randn(model->parameters()[i]->value.sizes(), generator,
                                           at::TensorOptions().dtype(at::kFloat));
        model->parameters()[i]->main_grad.copy_(noise);
        expected->parameters()[i]->main_grad.copy_(noise);
      }
      const double norm = optimizer.step().grad_norm, expected_norm = reference.step().grad_norm;
      EXPECT_NEAR(norm, expected_norm, 1e-6 * expected_norm);
      for (size_t i = 0; i < model->parameters().size(); ++i) {
        const at::Tensor difference = model->parameters()[i]->value.to(at::kCPU, at::kDouble) -
                                      expected->parameters()[i]->value.to(at::kDouble);
        // Masters on device and CPU may round to neighboring bf16 numbers. The bound 0.04 allows this
        // distance.
        EXPECT_LE(difference.abs().max().item<double>(), type == at::kFloat ? 1e-6 : 0.04) << i;
        EXPECT_EQ(model->parameters()[i]->main_grad.count_nonzero().item<int64_t>(), 0) << i;
      }
    }
    optimizer.check_integrity();
  }
}

TEST_P(OptimizerOn, StepsAreTheCpus) {
  expect_steps_of_the_cpu(/*offload=*/false);
}
TEST_P(OptimizerOn, StepsOfAnOffloadedStateAreTheCpus) {
  expect_steps_of_the_cpu(/*offload=*/true);
}

// Values, value loss, gradient. The critic has its own backbone or runs in the policy's plan execution.
TEST_P(TrainingOn, ACriticsGradientIsTheCpusAndRepeatsItsBits) {
  const auto policy_loss = full_loss();
  auto r = random_batch(3, 300);
  const int64_t num_rows = r->batch.num_rows();
  const auto numbers = [&](int64_t count, uint64_t seed) {
    auto generator = at::detail::createCPUGenerator(seed);
    return at::randn({count}, generator, at::TensorOptions().dtype(at::kDouble));
  };
  r->batch.old_values_R = numbers(num_rows, 1);
  r->batch.returns_R = numbers(num_rows, 2);
  struct Step {
    ValueExecution execution;
    at::Tensor values_R;
    std::vector<at::Tensor> gradients;
  };
  const auto step_on = [&](at::Device where, bool share_backbone) {
    const auto model = random_model(3, at::kDouble, 0.15, where);
    CriticSettings settings;
    settings.share_backbone = share_backbone;
    settings.eps_clip = 0.5;
    ActorSettings actor;
    actor.tree.tree_training_mode = "blocks";
    actor.mb_spec.max_tokens_per_mb = 32;
    Critic critic(*model, settings, actor, 10);
    for (Parameter* parameter : critic.head().parameters())
      parameter->value.copy_(numbers(parameter->value.numel(), 3).view(parameter->value.sizes()));
    Step step;
    step.values_R = critic.values(r->batch);
    model->allocate_gradients();
    const Plan plan = critic.plan(r->batch);
    if (share_backbone) {
      ValueBlockHead beside = critic.beside_policy(r->batch);
      Executor(*model).execute(plan, r->batch, *policy_loss, &beside);
      step.execution = critic.result_of(beside);
    } else {
      step.execution = critic.add_gradient(plan, r->batch);
    }
    step.gradients = gradients_of(*model);
    for (Parameter* parameter : critic.head().parameters())
      step.gradients.push_back(parameter->main_grad.clone());
    return step;
  };
  for (const bool share_backbone : {false, true}) {
    const Step got = step_on(device(), share_backbone), again = step_on(device(), share_backbone),
               expected = step_on(at::kCPU, share_backbone);
    EXPECT_TRUE(got.values_R.is_cpu() && got.execution.values_R.is_cpu());
    EXPECT_TRUE(at::allclose(got.values_R, expected.values_R, 1e-10, 1e-10));
    EXPECT_TRUE(at::allclose(got.execution.values_R, expected.values_R, 1e-10, 1e-10));
    EXPECT_NEAR(got.execution.loss, expected.execution.loss, 1e-10 * std::abs(expected.execution.loss));
    ASSERT_EQ(got.execution.metrics.size(), expected.execution.metrics.size());
    for (const auto& [name, sum] : expected.execution.metrics)
      EXPECT_NEAR(got.execution.metrics.at(name).value(), sum.value(),
                  1e-10 * std::max(1.0, std::abs(sum.value())))
          << name;
    ASSERT_EQ(got.gradients.size(), expected.gradients.size());
    for (size_t i = 0; i < got.gradients.size(); ++i) {
      EXPECT_TRUE(got.gradients[i].equal(again.gradients[i])) << i;
      EXPECT_LE((got.gradients[i].cpu() - expected.gradients[i]).norm().item<double>(),
                1e-10 * std::max(1.0, expected.gradients[i].norm().item<double>()))
          << i;
    }
  }
}

TEST_P(TrainingOn, ATrainersStepsAreTheCpus) {
  std::vector<Trajectory> batch;
  for (int32_t i = 0; i < 8; ++i) {
    Trajectory& row = batch.emplace_back();
    row.group = i < 4 ? "a" : "b";
    row.input_ids = {1, 2, 3, 4, 5 + i / 4, 10 + i % 4, 20 + i % 3, 30};
    row.loss_mask = {0, 0, 0, 0, 0, 1, 1, 1};
    row.logprobs = {0, 0, 0, 0, 0, -3.5f, -3.4f, -3.3f};
    row.advantage = {i % 2 ? 1.0f : -0.9f};
  }
  const SteadyClock clock;
  ActorSettings settings;
  settings.ppo_n_minibatches = 2;
  settings.optimizer.lr = 1e-3;
  settings.optimizer.warmup_steps_proportion = 0;
  const auto model = small_model(at::kFloat, 0, 16, device()), expected = small_model(at::kFloat);
  Trainer trainer(*model, {}, settings, 10, clock), reference(*expected, {}, settings, 10, clock);
  for (int step = 0; step < 3; ++step) {
    const MetricValues got = trainer.train_step(batch), wanted = reference.train_step(batch);
    for (const char* name : {"loss/policy", "optim/grad_norm", "mismatch/importance_weight_mean"})
      EXPECT_NEAR(got.at(name), wanted.at(name), 1e-4 * std::max(1.0, std::abs(wanted.at(name)))) << name;
  }
}

}  // namespace
}  // namespace bough
