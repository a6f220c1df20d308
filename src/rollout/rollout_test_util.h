// Helpers of this module's tests: small models, requests, and log-probabilities by a full forward pass of
// each sequence.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "kernels/common/device_test.h"
#include "kernels/parameter.h"
#include "models/model.h"
#include "rollout/embedded_engine.h"

namespace bough {

// The models are so small that threads only cost time, above all on a busy machine. Some tests ask for two
// threads. The thread sanitizer needs two threads to find anything.
#ifdef __SANITIZE_THREAD__
constexpr int kThreads = 2;
#else
constexpr int kThreads = 1;
#endif
class FewThreads : public ::testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(kThreads); }
};
inline ::testing::Environment* const kFewThreads = ::testing::AddGlobalTestEnvironment(new FewThreads);

// Returns the message of the E that f throws. If f throws nothing, the test fails and "" is returned.
template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

inline ModelConfig small_config(int64_t vocabulary = 97) {
  ModelConfig config;
  config.vocab_size = vocabulary;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 12;  // not a multiple of a SIMD vector
  config.max_position_embeddings = 256;
  config.qk_norm = true;
  return config;
}

// Three layers, of which the second one has no experts.
inline ModelConfig small_mixture_config() {
  ModelConfig config = small_config();
  config.family = &families::qwen3_moe;
  config.num_layers = 3;
  config.num_experts = 8;
  config.experts_per_token = 2;
  config.expert_intermediate_size = 24;
  config.renormalises_experts = true;
  config.dense_layers = {0, 1, 0};
  return config;
}

// Makes a model with random weights. Its matrices are ten times larger than at initialisation, so that
// distributions are far from uniform.
inline std::unique_ptr<Model> small_rollout_model(at::ScalarType dtype, uint64_t seed,
                                                  const ModelConfig& config = small_config(),
                                                  at::Device device = at::kCPU) {
  auto model = make_model(config, dtype);
  initialise(*model, seed);
  for (Parameter* parameter : model->parameters())
    if (parameter->value.dim() == 2) parameter->value.mul_(10.0);
  if (device.is_cpu()) return model;
  auto moved = make_model(config, dtype, device);
  for (size_t i = 0; i < moved->parameters().size(); ++i)
    moved->parameters()[i]->value.copy_(model->parameters()[i]->value);
  return moved;
}

// Causal attention of one sequence: softmax over all keys, with a mask.
class FullAttention : public AttentionContext {
 public:
  at::Tensor attend(int64_t, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override {
    const auto acc = accumulator_type(q_TNH.scalar_type());
    const int64_t repeat = q_TNH.size(1) / k_TGH.size(1), length = q_TNH.size(0);
    const auto q = q_TNH.to(acc).transpose(0, 1);
    const auto k = k_TGH.to(acc).repeat_interleave(repeat, 1).transpose(0, 1);
    const auto v = v_TGH.to(acc).repeat_interleave(repeat, 1).transpose(0, 1);
    auto scores = at::matmul(q, k.transpose(1, 2)) / std::sqrt(static_cast<double>(q_TNH.size(2)));
    scores = scores.masked_fill(at::ones({length, length}, q.options().dtype(at::kBool)).triu(1), -INFINITY);
    return at::matmul(at::softmax(scores, -1), v).transpose(0, 1).to(q_TNH.scalar_type());
  }
};

// Returns the logits [T, V] of a whole sequence, in fp64, on the CPU.
inline at::Tensor full_logits(const Model& model, const std::vector<int32_t>& tokens) {
  const at::NoGradGuard no_grad;
  FullAttention attention;
  const auto tokens_T =
      at::tensor(std::vector<int64_t>(tokens.begin(), tokens.end()), at::kLong).to(model.device());
  const auto hidden_TD = model.forward(tokens_T, at::arange(tokens_T.size(0), tokens_T.options()), attention);
  return model.logits(hidden_TD).to(at::kDouble).cpu();
}

// Returns the largest difference, over all tokens, between the engine's logprobs or raw_logprobs and those of
// a full forward pass. Infinity if a list has the wrong length.
inline double largest_log_prob_error(const Model& model, const GenerationResult& result, double temperature) {
  double worst = 0;
  for (const GeneratedSample& sample : result.samples) {
    std::vector<int32_t> tokens = result.prompt_ids;
    tokens.insert(tokens.end(), sample.token_ids.begin(), sample.token_ids.end());
    const auto logits = full_logits(model, tokens);
    const auto at_temperature = at::log_softmax(logits / temperature, -1), raw = at::log_softmax(logits, -1);
    if (sample.logprobs.size() != sample.token_ids.size() ||
        sample.raw_logprobs.size() != sample.token_ids.size() ||
        sample.versions.size() != sample.token_ids.size()) {
      return INFINITY;
    }
    for (size_t i = 0; i < sample.token_ids.size(); ++i) {
      const auto row = static_cast<int64_t>(result.prompt_ids.size() + i - 1);
      const double expected = at_temperature[row][sample.token_ids[i]].item<double>();
      const double expected_raw = raw[row][sample.token_ids[i]].item<double>();
      worst = std::max(worst, std::abs(expected - sample.logprobs[i]));
      worst = std::max(worst, std::abs(expected_raw - sample.raw_logprobs[i]));
    }
  }
  return worst;
}

inline std::vector<int32_t> random_tokens(uint64_t seed, int64_t length, int64_t vocabulary) {
  const CounterRandom random(seed, Purpose::test);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < length; ++i) {
    tokens.push_back(
        static_cast<int32_t>(random.below(static_cast<uint64_t>(vocabulary), 0, static_cast<uint64_t>(i))));
  }
  return tokens;
}

inline EmbeddedEngineOptions engine_options(int64_t max_running = 64, int64_t chunk = 512) {
  EmbeddedEngineOptions options;
  options.settings.max_concurrent_rollouts = max_running;
  options.settings.prefill_chunk_tokens = chunk;
  return options;
}

inline GenerationRequest request_of(uint64_t id, std::vector<int32_t> prompt, int64_t n_samples,
                                    int64_t max_new_tokens) {
  GenerationRequest request;
  request.id = id;
  request.prompt_ids = std::move(prompt);
  request.sampling.n_samples = n_samples;
  request.sampling.max_new_tokens = max_new_tokens;
  return request;
}

// Prompts of several lengths, two of which begin with the same 40 tokens. 1 to 4 samples each.
inline std::vector<GenerationRequest> mixed_requests(double temperature = 1.0) {
  std::vector<GenerationRequest> requests;
  const auto header = random_tokens(1, 40, 97);
  const int64_t lengths[] = {1, 15, 16, 17, 63, 32};
  for (uint64_t i = 0; i < 6; ++i) {
    auto prompt = random_tokens(10 + i, lengths[i], 97);
    if (i >= 4) prompt.insert(prompt.begin(), header.begin(), header.end());
    auto request =
        request_of(100 + i, prompt, 1 + static_cast<int64_t>(i) % 4, 20 + 3 * static_cast<int64_t>(i));
    request.sampling.temperature = temperature;
    request.seed = 7;
    requests.push_back(std::move(request));
  }
  return requests;
}

}  // namespace bough
