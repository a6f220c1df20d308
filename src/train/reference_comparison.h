// Parts of the system oracle (engine.md 4): random models and batches, and the comparison of a plan's results
// with those of the flat batch (each sequence computed separately). For tests only.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "models/safetensors.h"
#include "train/executor.h"
#include "train/flat_reference.h"
#include "tree/random_tree.h"

namespace bough {

inline constexpr int32_t kVocab = 50;
inline constexpr const char* kStrategies[] = {"dense", "path", "blocks"};

// PyTorch uses one thread: models this small run faster so, and some tests have a rank per thread.
inline const bool one_thread = (at::set_num_threads(1), true);

// `make test-slow` sets BOUGH_SLOW. Tests that call this function are named *Slow*.
inline bool is_slow_suite() {
  const char* value = std::getenv("BOUGH_SLOW");
  return value && std::string_view(value) == "1";
}

inline ModelConfig random_config(uint64_t seed) {
  ModelConfig config;
  config.family = &families::qwen3;
  config.vocab_size = kVocab;
  config.hidden_size = 24;
  config.intermediate_size = 40;
  config.num_layers = 2 + static_cast<int64_t>(seed % 2);
  config.num_kv_heads = 1 + static_cast<int64_t>(seed / 2 % 2);
  config.num_heads = config.num_kv_heads * (1 + static_cast<int64_t>(seed / 4 % 3));
  config.head_dim = 8;
  config.max_position_embeddings = 4096;
  config.tie_word_embeddings = seed / 12 % 2 == 0;
  config.qk_norm = seed % 3 == 0;
  config.qkv_bias = seed % 3 == 1;
  config.output_bias = seed % 3 == 2;
  // Options of some model families, in combinations that no family has.
  std::mt19937_64 random(seed);
  const auto draw = [&] { return random() % 3 == 0; };
  config.qk_norm_over_width = config.qk_norm && draw();
  config.mlp_bias = draw();
  config.norm_weight_offset = draw() ? 1 : 0;
  config.post_norms = draw();
  config.pre_norms = !(config.post_norms && draw());
  config.activation = draw() ? GateActivation::kGeluTanh : GateActivation::kSilu;
  config.scale_embedding = draw();
  config.query_scale = draw() ? 5 : 0;
  config.rotary_dim = draw() ? 6 : 0;
  config.local_rope.theta = 100;
  // In a layer without positions, the exact gradient of the key bias is zero, and a test would compare
  // rounding errors. So a model with a key bias gets no such layer.
  const uint64_t num_kinds = config.qkv_bias ? 2 : 3;
  if (draw())
    for (int64_t layer = 0; layer < config.num_layers; ++layer)
      config.layer_ropes.push_back(static_cast<LayerRope>(random() % num_kinds));
  config.clip_qkv = draw() ? 1.2 : 0;
  return config;
}

// The same, with experts in all layers or in some.
inline ModelConfig random_mixture_config(uint64_t seed) {
  ModelConfig config = random_config(seed);
  std::mt19937_64 random(seed + 2000);
  config.mlp_bias = false;
  config.num_experts = 1 + static_cast<int64_t>(random() % 6);
  config.experts_per_token = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(config.num_experts));
  config.expert_intermediate_size = 20;
  config.renormalises_experts = random() % 2 == 0;
  if (random() % 3 == 0)
    for (int64_t layer = 0; layer < config.num_layers; ++layer)
      config.dense_layers.push_back(layer == 0 ? 0 : random() % 2);
  return config;
}

// The weights are large enough that attention is far from uniform and norms matter.
inline std::unique_ptr<Model> random_model(const ModelConfig& config, uint64_t seed, at::ScalarType type,
                                           double scale = 0.3, at::Device device = at::kCPU) {
  auto model = make_model(config, type, device);
  auto generator = at::detail::createCPUGenerator(seed);
  for (Parameter* parameter : model->parameters()) {
    const auto noise = at::randn(parameter->value.sizes(), generator, at::TensorOptions().dtype(at::kDouble));
    const bool norm = parameter->parts[0].name.find("norm.weight") != std::string::npos;
    parameter->value.copy_(norm ? 1 - model->config().norm_weight_offset + scale * noise : scale * noise);
  }
  return model;
}
inline std::unique_ptr<Model> random_model(uint64_t seed, at::ScalarType type, double scale = 0.3,
                                           at::Device device = at::kCPU) {
  return random_model(random_config(seed), seed, type, scale, device);
}

// A batch and the trajectories that it refers to.
struct RandomBatch {
  std::vector<Trajectory> trajectories;
  TrainBatch batch;
};

inline Trajectory trajectory_of(std::vector<int32_t> ids, std::vector<uint8_t> mask,
                                double temperature = 1.0) {
  Trajectory trajectory;
  trajectory.input_ids = std::move(ids);
  trajectory.loss_mask = std::move(mask);
  trajectory.temperature = temperature;
  return trajectory;
}

// Trained tokens come in runs, so that plan blocks without a loss (prompts, tool outputs) occur between
// trained ones.
inline std::unique_ptr<RandomBatch> random_batch(uint64_t seed, int64_t max_tokens) {
  auto r = std::make_unique<RandomBatch>();
  std::mt19937_64 random(seed + 1000);
  for (const auto& sequence : random_sequences(seed, max_tokens, kVocab)) {
    std::vector<uint8_t> mask(sequence.size());
    uint8_t value = random() % 2;
    for (auto& m : mask) {
      if (random() % 12 == 0) value ^= 1;
      m = value;
    }
    if (random() % 8 == 0) std::fill(mask.begin(), mask.end(), 0);
    r->trajectories.push_back(trajectory_of(sequence, std::move(mask), seed % 2 ? 1.0 : 0.7));
  }
  r->batch = make_batch(r->trajectories, {}, at::kDouble);
  const int64_t rows = r->batch.num_rows();
  auto generator = at::detail::createCPUGenerator(seed);
  const auto normal = [&] { return at::randn({rows}, generator, at::TensorOptions().dtype(at::kDouble)); };
  r->batch.fields.advantages_R = normal();
  r->batch.fields.behaviour_log_probs_R = -4 + 0.3 * normal();
  r->batch.fields.proximal_log_probs_R = -4 + 0.3 * normal();
  r->batch.fields.reference_log_probs_R = -4 + 0.3 * normal();
  r->batch.fields.weights_R = at::full({rows}, 1.0 / std::max<int64_t>(1, rows), at::kDouble);
  r->batch.fields.versions_R = at::zeros({rows}, at::kInt);
  r->batch.fields.rows_R = at::arange(rows, at::kLong);
  return r;
}

// Adds random log-probabilities of a teacher, the engine and pi_old for five top-k tokens per loss row, and
// of a teacher for the sampled token.
inline void add_top_k_tokens(RandomBatch& r, uint64_t seed) {
  const int64_t rows = r.batch.num_rows(), count = 5;
  auto generator = at::detail::createCPUGenerator(seed + 7);
  const auto type = at::TensorOptions().dtype(at::kDouble);
  r.batch.top_k_ids_RK = at::rand({rows, kVocab}, generator, type)
                             .argsort(/*dim=*/int64_t{1}, /*descending=*/false)
                             .narrow(1, 0, count)
                             .contiguous();
  const auto log_probs = [&] {
    return at::randn({rows, kVocab}, generator, type).log_softmax(1).narrow(1, 0, count).contiguous();
  };
  r.batch.fields.teacher_log_probs_R = -4 + 0.3 * at::randn({rows}, generator, type);
  r.batch.fields.teacher_top_k_RK = log_probs();
  r.batch.fields.behaviour_top_k_RK = log_probs();
  r.batch.fields.proximal_top_k_RK = log_probs();
}

inline LossRows to_type(LossRows rows, at::ScalarType type) {
  for (at::Tensor* field : {&rows.advantages_R, &rows.behaviour_log_probs_R, &rows.proximal_log_probs_R,
                            &rows.reference_log_probs_R, &rows.weights_R})
    *field = field->to(type);
  return rows;
}

inline std::unique_ptr<Loss> full_loss() {
  LossSettings settings;
  settings.loss = "ppo";
  settings.entropy_coef = 0.1;
  settings.kl_loss_coef = 0.05;
  return make_loss(settings);
}

// Returns the maximum over parameters of ||g - ref|| / scale, with scale = max(||ref||, 1e-6 · sum over
// sequences of ||ref_seq||, 1e-5 · the largest parameter's ||ref||). The last term is for gradients that are
// nearly 0 by structure: attention to one key, to keys with equal values, or saturated. There the flat
// batch's gradient too is mostly rounding errors of terms that cancel. At a tolerance of 1e-10, the term
// allows an error of 1e-15 of the largest gradient, a few units in its last place.
inline double gradient_error(const NamedTensors& gradients, FlatResult& flat) {
  double largest = 0;
  for (const auto& [name, gradient] : gradients)
    largest = std::max(largest, flat.gradients.at(name).norm().item<double>());
  double worst = 0;
  for (const auto& [name, gradient] : gradients) {
    const auto& reference = flat.gradients.at(name);
    const double scale =
        std::max({reference.norm().item<double>(), 1e-6 * flat.sequence_norms[name], 1e-5 * largest});
    const double error = (gradient.to(at::kCPU, at::kDouble) - reference).norm().item<double>();
    if (error > 0) worst = std::max(worst, scale > 0 ? error / scale : INFINITY);
  }
  return worst;
}
inline double gradient_error(const std::vector<Parameter*>& parameters, FlatResult& flat) {
  NamedTensors gradients;
  for (const Parameter* parameter : parameters)
    for (const auto& part : parameter->parts) gradients.emplace_back(part.name, parameter->part_grad(part));
  return gradient_error(gradients, flat);
}
inline double gradient_error(Model& model, FlatResult& flat) {
  return gradient_error(model.trained_parameters(), flat);
}

// Gives each block a random recompute policy. Gradients must not change.
inline Plan with_random_keeps(Plan plan, uint64_t seed) {
  constexpr RecomputePolicy kOfInterior[] = {
      RecomputePolicy::kKeysValues,        RecomputePolicy::kAttention,
      RecomputePolicy::kLayerInputs,       RecomputePolicy::kLayerInputsAndAttention,
      RecomputePolicy::kLayerInputsOnHost, RecomputePolicy::kActivations};
  std::mt19937_64 random(seed);
  for (auto& planned : plan.trees)
    for (auto& block : planned.blocks)
      block.keep = kOfInterior[block.interior ? random() % 6 : 2 + random() % 4];
  return plan;
}

inline void expect_exact(Model& model, FlatResult& flat, const RandomBatch& r, const Plan& plan,
                         const Loss& loss, const std::string& what, int64_t least_run = 0,
                         bool verify_recompute = true) {
  model.allocate_gradients();
  model.zero_gradients();
  Executor executor(model,
                    {.head_chunk_rows = 7, .verify_recompute = verify_recompute, .least_run = least_run});
  const auto result = executor.execute(plan, r.batch, loss);
  ASSERT_NEAR(result.loss, flat.loss, 1e-10 * std::max(1.0, std::abs(flat.loss))) << what;
  if (r.batch.num_rows() > 0) {
    ASSERT_LE((result.values.log_probs_R - flat.log_probs_R).abs().max().item<double>(), 1e-10) << what;
    ASSERT_LE((result.values.entropies_R - flat.entropies_R).abs().max().item<double>(), 1e-10) << what;
  }
  ASSERT_LE(gradient_error(model, flat), 1e-10) << what;
}

}  // namespace bough
