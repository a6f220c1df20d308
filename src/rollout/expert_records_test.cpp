#include "rollout/expert_records.h"

#include <gtest/gtest.h>

#include "models/expert_routes.h"
#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

EmbeddedEngineOptions recording_options(int64_t max_running = 64, int64_t chunk = 512) {
  EmbeddedEngineOptions options = engine_options(max_running, chunk);
  options.settings.return_routed_experts = true;
  return options;
}

// Sets kv_memory to `pages` pages.
void limit_pages(EmbeddedEngineOptions& options, const Model& model, int64_t pages) {
  options.settings.kv_memory.count = pages * KvStorage::bytes_per_page(model.config(), model.dtype());
}

class RoutedAttention : public FullAttention {
 public:
  explicit RoutedAttention(at::Tensor recorded_TLK = {}) : routes(std::move(recorded_TLK)) {}
  at::Tensor route(int64_t layer, const at::Tensor& logits_TE, int64_t num_chosen) override {
    return routes.route(layer, logits_TE, num_chosen);
  }
  ExpertRoutes routes;
};

// The experts of a whole sequence in one pass.
RoutedExperts experts_of_full_pass(const Model& model, const std::vector<int32_t>& tokens) {
  const at::NoGradGuard no_grad;
  RoutedAttention attention;
  const auto tokens_T = at::tensor(std::vector<int64_t>(tokens.begin(), tokens.end()), at::kLong);
  model.forward(tokens_T, at::arange(tokens_T.size(0), tokens_T.options()), attention);
  const at::Tensor used_TLK = attention.routes.used_TLK();
  RoutedExperts routed{.num_layers = used_TLK.size(1), .num_chosen = used_TLK.size(2), .experts = {}};
  for (int64_t i = 0; i < used_TLK.numel(); ++i)
    routed.experts.push_back(static_cast<uint16_t>(used_TLK.const_data_ptr<int64_t>()[i]));
  return routed;
}

// Log-probabilities of a sequence's tokens from index 1 on, in one pass. recorded: the experts of the leading
// tokens; the router chooses those of the others.
at::Tensor log_probs_of(const Model& model, const std::vector<int32_t>& tokens,
                        const RoutedExperts& recorded) {
  const at::NoGradGuard no_grad;
  at::Tensor recorded_TLK = at::full({std::ssize(tokens), 2, 2}, -1, at::kLong);
  for (int64_t i = 0; i < std::ssize(recorded.experts); ++i)
    recorded_TLK.view({-1})[i] = recorded.experts[static_cast<size_t>(i)];
  RoutedAttention attention(recorded_TLK);
  const auto tokens_T = at::tensor(std::vector<int64_t>(tokens.begin(), tokens.end()), at::kLong);
  const auto hidden_TD = model.forward(tokens_T, at::arange(tokens_T.size(0), tokens_T.options()), attention);
  const auto log_probs = at::log_softmax(model.logits(hidden_TD).narrow(0, 0, tokens_T.size(0) - 1), -1);
  return log_probs.gather(1, tokens_T.narrow(0, 1, tokens_T.size(0) - 1).unsqueeze(1)).squeeze(1);
}

std::vector<int32_t> tokens_of(const GenerationResult& result, size_t sample) {
  std::vector<int32_t> tokens = result.prompt_ids;
  const auto& sampled = result.samples[sample].token_ids;
  tokens.insert(tokens.end(), sampled.begin(), sampled.end());
  return tokens;
}

// Expects of every sample the experts of all tokens but the last, as one pass over the sequence chooses them.
void expect_experts_of_full_passes(const Model& model, const std::vector<GenerationResult>& results) {
  for (const GenerationResult& result : results)
    for (size_t s = 0; s < result.samples.size(); ++s) {
      RoutedExperts expected = experts_of_full_pass(model, tokens_of(result, s));
      expected.truncate(expected.num_rows() - 1);
      const RoutedExperts& got = result.samples[s].routed_experts;
      EXPECT_EQ(got.num_layers, 2);
      EXPECT_EQ(got.num_rows(), expected.num_rows()) << "request " << result.id << " sample " << s;
      EXPECT_TRUE(got == expected) << "request " << result.id << " sample " << s;
    }
}

TEST(ExpertRecords, AreThoseOfAFullPass) {
  const auto model = small_rollout_model(at::kDouble, 3, small_mixture_config());
  EmbeddedEngine engine(*model, recording_options());
  expect_experts_of_full_passes(*model, engine.generate(mixed_requests()));
  EXPECT_GT(engine.statistics().cached_tokens, 0);
}

TEST(ExpertRecords, AreCompleteWithPreemptionsAndPromptsInChunks) {
  const auto model = small_rollout_model(at::kDouble, 3, small_mixture_config());
  EmbeddedEngineOptions options = recording_options(/*max_running=*/8, /*chunk=*/7);
  limit_pages(options, *model, 14);
  EmbeddedEngine engine(*model, options);
  expect_experts_of_full_passes(*model, engine.generate(mixed_requests()));
  EXPECT_GT(engine.statistics().preemptions, 0);
  EXPECT_GT(engine.statistics().replayed_experts, 0);
}

TEST(ExpertRecords, AreNotMadeWithoutTheSetting) {
  const auto model = small_rollout_model(at::kDouble, 3, small_mixture_config());
  EmbeddedEngine engine(*model, engine_options());
  EXPECT_TRUE(engine.generate(mixed_requests())[0].samples[0].routed_experts.empty());
}

TEST(ExpertRecords, OfAModelWithoutExpertsAreRefused) {
  const auto model = small_rollout_model(at::kDouble, 3);
  const std::string message = message_of<UserError>([&] { EmbeddedEngine(*model, recording_options()); });
  EXPECT_NE(message.find("return_routed_experts"), std::string::npos) << message;
}

// Changes the routers behind the engine's back: every choice from now on differs from the recorded one, so a
// token has its record only if the record was replayed.
void change_routers(Model& model) {
  for (Parameter* parameter : model.parameters())
    if (parameter->parts[0].name.ends_with(".gate.weight")) parameter->value.neg_();
}

// Tokens that are sampled after their prefix was computed again have the log-probabilities of the recorded
// experts, not of those that the changed routers would choose.
TEST(ExpertRecords, AreReplayedWhenASampleIsComputedAgain) {
  const auto model = small_rollout_model(at::kDouble, 3, small_mixture_config());
  EmbeddedEngineOptions options = recording_options();
  limit_pages(options, *model, 10);
  EmbeddedEngine engine(*model, options);
  const auto prompt = random_tokens(5, 37, 97);
  engine.submit(request_of(1, prompt, 2, 12));
  for (int i = 0; i < 6; ++i) engine.step();
  const auto before = engine.running();
  ASSERT_EQ(before[0].samples.size(), 2u);
  engine.park();
  engine.generate({request_of(2, random_tokens(6, 140, 97), 1, 2)});  // takes all pages
  change_routers(*model);
  engine.unpark();
  const auto result = engine.drain()[0];
  for (size_t s = 0; s < 2; ++s) {
    const RoutedExperts& known = before[0].samples[s].sample.routed_experts;
    RoutedExperts got = result.samples[s].routed_experts;
    EXPECT_EQ(got.num_rows(), 37 + 12 - 1);
    EXPECT_EQ(known.num_rows(), 37 + 6 - 1);
    const auto tokens = tokens_of(result, s);
    const auto last_of = [&](const at::Tensor& log_probs) { return log_probs.narrow(0, 37 + 6 - 1, 6); };
    const at::Tensor sampled =
        last_of(at::cat({at::zeros({36}, at::kDouble), at::tensor(result.samples[s].logprobs, at::kDouble)}));
    EXPECT_LE((last_of(log_probs_of(*model, tokens, got)) - sampled).abs().max().item<double>(), 1e-10) << s;
    EXPECT_GE((last_of(log_probs_of(*model, tokens, {})) - sampled).abs().max().item<double>(), 1e-3) << s;
    got.truncate(known.num_rows());
    EXPECT_TRUE(got == known) << s;
  }
}

TEST(ExpertRecords, AfterNewWeightsTokensAreRoutedAfresh) {
  const auto model = small_rollout_model(at::kDouble, 3, small_mixture_config());
  EmbeddedEngine engine(*model, recording_options());
  engine.submit(request_of(1, random_tokens(5, 37, 97), 2, 12));
  for (int i = 0; i < 6; ++i) engine.step();
  change_routers(*model);
  engine.update_weights({.version = 1, .model = model.get()});
  const auto result = engine.drain();
  expect_experts_of_full_passes(*model, result);
  EXPECT_EQ(engine.statistics().rerouted_experts, 37 + 2 * (37 + 6 - 1));
}

// The records of a prefix outlive its pages: another request with the prefix, whose pages are gone, replays
// it.
TEST(ExpertRecords, OutliveThePagesOfAPrefix) {
  const auto model = small_rollout_model(at::kDouble, 3, small_mixture_config());
  EmbeddedEngineOptions options = recording_options();
  limit_pages(options, *model, 8);
  EmbeddedEngine engine(*model, options);
  const auto prefix = random_tokens(5, 48, 97);
  const auto first = engine.generate({request_of(1, prefix, 1, 2)})[0];
  engine.generate({request_of(2, random_tokens(6, 100, 97), 1, 2)});  // needs the pages of the first
  change_routers(*model);
  const int64_t cached = engine.statistics().cached_tokens;
  auto longer = prefix;
  longer.push_back(7);
  const auto second = engine.generate({request_of(3, longer, 1, 2)})[0];
  EXPECT_EQ(engine.statistics().cached_tokens, cached) << "the pages are still there";
  RoutedExperts known = first.samples[0].routed_experts, got = second.samples[0].routed_experts;
  EXPECT_EQ(got.num_rows(), 50);
  known.truncate(48);
  got.truncate(48);
  EXPECT_TRUE(got == known);
}

TEST(ExpertRecords, OfAPartialRolloutContinueInAnotherEngine) {
  const auto model = small_rollout_model(at::kDouble, 3, small_mixture_config());
  EmbeddedEngine engine(*model, recording_options());
  const GenerationRequest request = request_of(1, random_tokens(5, 37, 97), 2, 12);
  engine.submit(request);
  for (int i = 0; i < 6; ++i) engine.step();
  GenerationRequest resumed = request;
  const std::vector<RunningRequest> running = engine.running();
  for (const PartialRollout& partial : running[0].samples)
    resumed.partial.push_back(partial_rollout_from_json(partial_rollout_to_json(partial)));
  EmbeddedEngine other(*model, recording_options());
  const auto result = other.generate({resumed});
  expect_experts_of_full_passes(*model, result);
  EXPECT_GT(other.statistics().replayed_experts, 0);
}

TEST(ExpertRecords, AreReturnedForCancelledSamples) {
  const auto model = small_rollout_model(at::kDouble, 3, small_mixture_config());
  EmbeddedEngine engine(*model, recording_options());
  engine.submit(request_of(1, random_tokens(5, 20, 97), 1, 12));
  for (int i = 0; i < 4; ++i) engine.step();
  engine.cancel(1);
  expect_experts_of_full_passes(*model, engine.step());
}

}  // namespace
}  // namespace bough
