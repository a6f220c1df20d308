// Generation from a mixture of experts on CUDA, compared with the CPU and with full forward passes.
#include <cstdlib>

#include "kernels/experts/experts.h"
#include "models/expert_routes.h"
#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

ModelConfig mixture_with_wide_heads() {
  ModelConfig config = small_mixture_config();
  config.head_dim = 64;
  return config;
}

EmbeddedEngineOptions recording(int64_t max_running) {
  EmbeddedEngineOptions options = engine_options(max_running, /*chunk=*/24);
  options.settings.return_routed_experts = true;
  return options;
}

// Returns the results, and what the engine wrote to stderr.
std::pair<std::vector<GenerationResult>, std::string> generate(
    EmbeddedEngine& engine, const std::vector<GenerationRequest>& requests) {
  testing::internal::CaptureStderr();
  auto results = engine.generate(requests);
  return {std::move(results), testing::internal::GetCapturedStderr()};
}

using CudaMixture = OnCuda;

// With few pages, samples are preempted and computed again with their recorded experts.
TEST_F(CudaMixture, GreedyTokensAndExpertsInFp32AreTheCpus) {
  const auto config = mixture_with_wide_heads();
  const auto on_cpu = small_rollout_model(at::kFloat, 3, config),
             on_cuda = small_rollout_model(at::kFloat, 3, config, at::kCUDA);
  for (const int64_t pages : {300, 14}) {
    const auto results_of = [&](const Model& model) {
      EmbeddedEngineOptions options = recording(8);
      options.settings.kv_memory.count =
          pages * KvStorage::bytes_per_page(config, at::kFloat, {}, model.device());
      EmbeddedEngine engine(model, options);
      auto results = engine.generate(mixed_requests(/*temperature=*/0));
      EXPECT_EQ(engine.statistics().preemptions > 0, pages < 300);
      EXPECT_GT(engine.statistics().replayed_experts, 0);
      return results;
    };
    const auto expected = results_of(*on_cpu), got = results_of(*on_cuda);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i)
      for (size_t s = 0; s < got[i].samples.size(); ++s) {
        const GeneratedSample &sample = got[i].samples[s], &wanted = expected[i].samples[s];
        EXPECT_EQ(sample.token_ids, wanted.token_ids) << "request " << i << " sample " << s;
        EXPECT_EQ(sample.routed_experts.num_rows(),
                  std::ssize(got[i].prompt_ids) + std::ssize(sample.token_ids) - 1);
        EXPECT_TRUE(sample.routed_experts == wanted.routed_experts) << "request " << i << " sample " << s;
      }
  }
}

class RecordedAttention : public FullAttention {
 public:
  explicit RecordedAttention(at::Tensor recorded_TLK) : routes(std::move(recorded_TLK)) {}
  at::Tensor route(int64_t layer, const at::Tensor& logits_TE, int64_t num_chosen) override {
    live.push_back(choose_experts(logits_TE, num_chosen).cpu());
    return routes.route(layer, logits_TE, num_chosen);
  }
  ExpertRoutes routes;
  std::vector<at::Tensor> live;  // what the routers would have chosen
};

// Compares a sample with one pass over its tokens that uses the recorded experts.
struct SampleErrors {
  double log_prob = 0;  // the largest error
  int64_t routes = 0,
          differ = 0;  // recorded experts of a token in a layer; those that the router would not choose
};
void compare_with_recorded(const Model& model, const GenerationResult& result, SampleErrors& errors) {
  const at::NoGradGuard no_grad;
  for (const GeneratedSample& sample : result.samples) {
    std::vector<int64_t> tokens(result.prompt_ids.begin(), result.prompt_ids.end());
    tokens.insert(tokens.end(), sample.token_ids.begin(), sample.token_ids.end() - 1);
    const RoutedExperts& routed = sample.routed_experts;
    ASSERT_EQ(routed.num_rows(), std::ssize(tokens));
    const at::Tensor recorded_TLK =
        at::tensor(std::vector<int64_t>(routed.experts.begin(), routed.experts.end()), at::kLong)
            .view({std::ssize(tokens), routed.num_layers, routed.num_chosen});
    RecordedAttention attention(recorded_TLK.to(model.device()));
    const at::Tensor tokens_T = at::tensor(tokens, at::kLong).to(model.device());
    const at::Tensor hidden_TD =
        model.forward(tokens_T, at::arange(tokens_T.size(0), tokens_T.options()), attention);
    const at::Tensor log_probs_TV = at::log_softmax(model.logits(hidden_TD).to(at::kDouble), -1).cpu();
    for (size_t i = 0; i < sample.token_ids.size(); ++i) {
      const auto row = static_cast<int64_t>(result.prompt_ids.size() + i) - 1;
      errors.log_prob =
          std::max(errors.log_prob,
                   std::abs(log_probs_TV[row][sample.token_ids[i]].item<double>() - sample.logprobs[i]));
    }
    for (int64_t layer = 0; layer < routed.num_layers; ++layer) {
      const at::Tensor live_TK = attention.live[static_cast<size_t>(layer)],
                       recorded_TK = recorded_TLK.select(1, layer);
      errors.routes += recorded_TK.size(0);
      errors.differ +=
          std::get<0>(live_TK.sort(1)).ne(std::get<0>(recorded_TK.sort(1))).any(1).sum().item<int64_t>();
    }
  }
}

// A graph that recorded the experts of another pass would make most records differ from the routers' choice.
TEST_F(CudaMixture, WithAndWithoutGraphsRecordsAndLogProbabilitiesAreThoseOfAFullPass) {
  const auto config = mixture_with_wide_heads();
  const bool is_grouped = groups_on_device(at::kCUDA, at::kBFloat16, config.num_experts, config.hidden_size,
                                           config.expert_intermediate_size);
  std::vector<GenerationRequest> requests;
  for (uint64_t id = 0; id < 3; ++id)
    requests.push_back(request_of(id, random_tokens(id, 5 + static_cast<int64_t>(id) * 21, 97), 3, 10));
  for (const auto type : {at::kFloat, at::kBFloat16})
    for (const char* const graphs : {"1", "0"}) {
      SCOPED_TRACE(testing::Message() << c10::toString(type) << ", BOUGH_CUDA_GRAPHS=" << graphs);
      setenv("BOUGH_CUDA_GRAPHS", graphs, 1);
      const auto model = small_rollout_model(type, 6, config, at::kCUDA);
      testing::internal::CaptureStderr();
      EmbeddedEngine engine(*model, recording(9));
      const std::string said = testing::internal::GetCapturedStderr();
      const bool has_graphs = type == at::kBFloat16 && is_grouped;
      EXPECT_EQ(said.find("CUDA graphs: not used") == std::string::npos, has_graphs || *graphs == '0')
          << said;
      const auto [results, log] = generate(engine, requests);
      EXPECT_EQ(log.find("could not be recorded"), std::string::npos) << log;
      SampleErrors errors;
      for (const GenerationResult& result : results) compare_with_recorded(*model, result, errors);
      EXPECT_LT(errors.log_prob, type == at::kFloat ? 1e-4 : 0.5);
      EXPECT_EQ(errors.routes, 2 * 3 * (5 + 26 + 47 + 3 * 9));
      EXPECT_LE(static_cast<double>(errors.differ), (type == at::kFloat ? 1e-3 : 0.1) * errors.routes);
    }
  unsetenv("BOUGH_CUDA_GRAPHS");
}

}  // namespace
}  // namespace bough
