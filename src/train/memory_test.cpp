#include "train/memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "kernels/common/cpu_allocator.h"
#include "train/executor.h"

namespace bough {
namespace {

ModelConfig config_of(int64_t width, int64_t layers, int64_t vocab) {
  ModelConfig config;
  config.vocab_size = vocab;
  config.hidden_size = width;
  config.intermediate_size = 3 * width;
  config.num_layers = layers;
  config.num_heads = width / 16;
  config.num_kv_heads = width / 32;
  config.head_dim = 16;
  config.max_position_embeddings = 4096;
  config.tie_word_embeddings = true;
  config.qk_norm = true;
  return config;
}

// A trunk of 600 tokens, trained throughout, with eight branches of 300.
std::vector<std::vector<int32_t>> deep_tree(int32_t vocab) {
  std::vector<std::vector<int32_t>> sequences;
  for (int32_t s = 0; s < 8; ++s) {
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < 900; ++i) ids.push_back((i < 600 ? i * 5 : i * 7 + s * 11 + 1) % vocab);
    sequences.push_back(std::move(ids));
  }
  return sequences;
}

TEST(Memory, MeasuredPeakStaysBelowTheEstimateAndFallsWithThePassSize) {
  install_cpu_allocator();
  LossSettings settings;
  settings.loss = "pg";
  const auto loss = make_loss(settings);
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const auto config = config_of(64, 3, 500);
    auto model = make_model(config, type);
    initialise(*model, 1);
    model->allocate_gradients();
    const auto sequences = deep_tree(500);
    std::vector<TokenSpan> spans(sequences.begin(), sequences.end());
    const std::vector<uint8_t> mask(900, 1);
    auto batch = make_batch(spans, std::vector<std::span<const uint8_t>>(8, mask), 1.0);
    batch.fields.advantages_R = at::ones({batch.num_rows()}, at::kFloat);
    batch.fields.weights_R = at::ones({batch.num_rows()}, at::kFloat);
    int64_t larger_pass = INT64_MAX;
    for (const int64_t limit : {512, 128, 32}) {
      const auto plan = make_plan("path", plan_request(batch, limit));
      const auto estimate = estimate_memory(config, type, simulate(plan));
      const int64_t before = cpu_allocated_bytes();
      reset_cpu_peak_bytes();
      Executor(*model).forward_backward(plan, batch, *loss);
      // What belongs to the batch, whatever the plan: values of all rows and the loss's own tensors.
      const int64_t rows = batch.num_rows() * 2 * 4 + std::min<int64_t>(limit, 512) * 8 * 64 * 4;
      const int64_t peak = cpu_peak_bytes() - before;
      EXPECT_LE(peak, estimate.total() + rows) << c10::toString(type) << " B " << limit;
      EXPECT_GE(peak, estimate.stack + estimate.activations / 2)
          << "an estimate that says nothing, B " << limit;
      EXPECT_LT(peak, larger_pass) << "B " << limit;
      larger_pass = peak;
    }
  }
}

}  // namespace
}  // namespace bough
