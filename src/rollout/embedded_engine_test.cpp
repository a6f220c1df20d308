#include "rollout/embedded_engine.h"

#include <algorithm>
#include <map>

#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

// A model that needs no weights. The next token depends on the last token only, but attention is still
// called. Token t is followed by t + 1 (modulo the vocabulary) with a probability of about 1 - 1e-6.
class CountingModel : public Model {
 public:
  explicit CountingModel(ModelConfig config) : Model(std::move(config)) {
    weights_.value = at::eye(config_.vocab_size, at::kFloat).mul_(20.0);
  }
  at::Tensor forward(const at::Tensor& tokens_T, const at::Tensor&,
                     AttentionContext& attention) const override {
    ++num_passes;
    largest_pass = std::max(largest_pass, tokens_T.size(0));
    const int64_t T = tokens_T.size(0);
    for (int64_t l = 0; l < config_.num_layers; ++l) {
      const auto kv = at::ones({T, config_.num_kv_heads, config_.head_dim});
      attention.attend(l, at::ones({T, config_.num_heads, config_.head_dim}), kv, kv);
    }
    return at::one_hot((tokens_T + 1).remainder(config_.vocab_size), config_.vocab_size).to(at::kFloat);
  }
  std::vector<Parameter*> parameters() override { return {&weights_}; }
  const Parameter& embedding() const override { return weights_; }
  const Parameter& head() const override { return weights_; }
  std::unique_ptr<Model> share() const override { return std::make_unique<CountingModel>(*this); }
  std::vector<Parameter*> layer_matrices() override { return {}; }
  void untie_head() override {}

  mutable int64_t num_passes = 0, largest_pass = 0;

 private:
  Parameter weights_;
};

ModelConfig counting_config() {
  ModelConfig config = small_config(50);
  config.hidden_size = 50;
  return config;
}

std::vector<int32_t> all_tokens(const std::vector<GenerationResult>& results) {
  std::vector<int32_t> tokens;
  for (const GenerationResult& result : results) {
    for (const GeneratedSample& sample : result.samples) {
      tokens.push_back(-static_cast<int32_t>(sample.finish_reason) - 1);
      tokens.insert(tokens.end(), sample.token_ids.begin(), sample.token_ids.end());
    }
  }
  return tokens;
}

TEST(EmbeddedEngine, LogProbabilitiesEqualAFullForward) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto model = small_rollout_model(dtype, 3);
    for (const double temperature : {0.7, 1.0, 1.3}) {
      for (const auto path : {AttentionPath::kFastest, AttentionPath::kReference}) {
        auto options = engine_options(7, 24);
        options.attention = path;
        EmbeddedEngine engine(*model, options);
        for (const GenerationResult& result : engine.generate(mixed_requests(temperature))) {
          EXPECT_LT(largest_log_prob_error(*model, result, temperature), dtype == at::kDouble ? 1e-9 : 1e-4)
              << "temperature " << temperature << ", request " << result.id << ", " << dtype;
        }
      }
    }
  }
}

TEST(EmbeddedEngine, GreedyIsTheArgmaxOfAFullForward) {
  const auto model = small_rollout_model(at::kDouble, 4);
  EmbeddedEngine engine(*model, engine_options());
  auto requests = mixed_requests(0.0);
  for (const GenerationResult& result : engine.generate(requests)) {
    for (const GeneratedSample& sample : result.samples) {
      std::vector<int32_t> tokens = result.prompt_ids;
      tokens.insert(tokens.end(), sample.token_ids.begin(), sample.token_ids.end());
      const auto best = full_logits(*model, tokens).argmax(-1);
      for (size_t i = 0; i < sample.token_ids.size(); ++i) {
        ASSERT_EQ(best[static_cast<int64_t>(result.prompt_ids.size() + i) - 1].item<int64_t>(),
                  sample.token_ids[i]);
      }
    }
  }
}

TEST(EmbeddedEngine, TokensDoNotDependOnConcurrencyOrderThreadsOrMemory) {
  const auto model = small_rollout_model(at::kDouble, 5);
  EmbeddedEngine reference_engine(*model, engine_options());
  const auto reference = all_tokens(reference_engine.generate(mixed_requests()));
  ASSERT_GT(reference.size(), 300u);
  for (const int64_t max_running : {1, 3, 11}) {
    for (const int64_t chunk : {1, 7, 300}) {
      EmbeddedEngine engine(*model, engine_options(max_running, chunk));
      EXPECT_EQ(all_tokens(engine.generate(mixed_requests())), reference)
          << max_running << " at once, chunk " << chunk;
    }
  }
  at::set_num_threads(2);
  EmbeddedEngine two_threads(*model, engine_options());
  EXPECT_EQ(all_tokens(two_threads.generate(mixed_requests())), reference) << "two threads";
  at::set_num_threads(kThreads);

  auto reversed = mixed_requests();
  std::reverse(reversed.begin(), reversed.end());
  EmbeddedEngine engine(*model, engine_options(5));
  auto results = engine.generate(std::move(reversed));
  std::reverse(results.begin(), results.end());
  EXPECT_EQ(all_tokens(results), reference) << "reversed";

  // The memory holds about three sequences, so samples are preempted and recomputed.
  auto options = engine_options(16, 40);
  options.settings.kv_memory.count = 26 * KvStorage::bytes_per_page(model->config(), at::kDouble);
  EmbeddedEngine small_engine(*model, options);
  EXPECT_EQ(all_tokens(small_engine.generate(mixed_requests())), reference) << "little memory";
  EXPECT_GT(small_engine.statistics().preemptions, 0);
  EXPECT_NO_THROW(small_engine.check_integrity());
}

TEST(EmbeddedEngine, SeedsAndSamplesDiffer) {
  const auto model = small_rollout_model(at::kFloat, 5);
  EmbeddedEngine engine(*model, engine_options());
  auto requests = mixed_requests();
  const auto first = all_tokens(engine.generate(requests));
  EXPECT_EQ(all_tokens(engine.generate(requests)), first) << "the same engine again, prefixes cached";
  for (GenerationRequest& request : requests) request.seed = 8;
  EXPECT_NE(all_tokens(engine.generate(requests)), first);
  const auto group = engine.generate({request_of(1, {5, 6, 7}, 4, 20)});
  for (size_t i = 1; i < 4; ++i) EXPECT_NE(group[0].samples[i].token_ids, group[0].samples[0].token_ids);
}

TEST(EmbeddedEngine, APromptIsComputedOnceForItsGroupAndACommonHeaderOnce) {
  const CountingModel model(counting_config());
  EmbeddedEngine engine(model, engine_options(64, 512));
  const auto header = random_tokens(1, 64, 50);
  std::vector<GenerationRequest> requests;
  for (uint64_t i = 0; i < 4; ++i) {
    auto prompt = header;
    for (int32_t j = 0; j < 9; ++j)
      prompt.push_back(static_cast<int32_t>((i * 11 + static_cast<uint64_t>(j)) % 50));
    requests.push_back(request_of(i, prompt, 8, 5));
  }
  engine.generate(std::move(requests));
  const EngineStatistics statistics = engine.statistics();
  EXPECT_EQ(statistics.new_tokens, 4 * 8 * 5);
  EXPECT_EQ(statistics.prefill_tokens, 64 + 4 * 9) << "64 = 4 full pages, shared by all";
  EXPECT_EQ(statistics.cached_tokens, 3 * 64);
  EXPECT_GT(statistics.seconds, 0);
}

TEST(EmbeddedEngine, WithLongestPrefixAConversationThatGoesOnPrecedesAPromptThatCameFirst) {
  const CountingModel model(counting_config());
  for (const bool longest_prefix : {false, true}) {
    EmbeddedEngineOptions options = engine_options(1, 512);
    if (!longest_prefix) options.settings.admission = "first_come";
    EmbeddedEngine engine(model, options);
    auto turn = random_tokens(1, 40, 50);
    engine.generate({request_of(1, turn, 1, 20)});
    const auto answer =
        random_tokens(2, 9, 50);  // the turn's tokens are not in it: only the prompt is cached
    turn.insert(turn.end(), answer.begin(), answer.end());
    engine.submit(request_of(2, random_tokens(3, 40, 50), 1, 5));
    engine.submit(request_of(3, turn, 1, 5));
    const auto results = engine.drain();
    ASSERT_EQ(results.size(), 2u);
    EXPECT_EQ(results.front().id, longest_prefix ? 3u : 2u);
  }
}

TEST(EmbeddedEngine, WithLongestPrefixNoPromptWaitsForever) {
  const CountingModel model(counting_config());
  EmbeddedEngine engine(model, engine_options(1, 512));
  const auto common = random_tokens(1, 40, 50);
  engine.generate({request_of(1, common, 1, 20)});
  engine.submit(request_of(2, random_tokens(3, 40, 50), 1, 5));
  for (uint64_t id = 3; id < 20; ++id) {
    auto prompt = common;
    prompt.push_back(static_cast<int32_t>(id));
    engine.submit(request_of(id, prompt, 1, 5));
  }
  std::vector<uint64_t> ended;
  for (const GenerationResult& result : engine.drain()) ended.push_back(result.id);
  ASSERT_EQ(ended.size(), 18u);
  EXPECT_EQ(ended[Scheduler::kMostOvertaking], 2u) << "one slot: four others precede it";
}

TEST(EmbeddedEngine, PrefillComesInChunksBesideDecode) {
  const CountingModel model(counting_config());
  EmbeddedEngine engine(model, engine_options(8, 16));
  engine.submit(request_of(1, random_tokens(1, 5, 50), 2, 30));
  engine.step();
  engine.submit(request_of(2, random_tokens(2, 100, 50), 1, 3));
  const auto results = engine.drain();
  EXPECT_EQ(results.size(), 2u);
  EXPECT_EQ(model.largest_pass, 16 + 2) << "a chunk and one token of each running sample";
  EXPECT_EQ(results.front().id, 2u) << "the long prompt does not wait for the first request";
}

TEST(EmbeddedEngine, StopsAtStopTokensAndLengths) {
  const CountingModel model(counting_config());
  auto options = engine_options();
  options.stop_tokens = {20};
  EmbeddedEngine engine(model, options);
  auto stops = request_of(1, {17}, 2, 10);
  auto stops_at_once = request_of(2, {19}, 1, 10);
  auto ignores = request_of(3, {17}, 1, 10);
  ignores.sampling.ignore_eos = true;
  auto own_stop = request_of(4, {17}, 1, 10);
  own_stop.sampling.ignore_eos = true;
  own_stop.sampling.stop_token_ids = {22};
  auto at_least = request_of(5, {17}, 1, 10);
  at_least.sampling.min_new_tokens = 3;
  at_least.sampling.greedy = true;
  const auto results = engine.generate({stops, stops_at_once, ignores, own_stop, at_least});
  EXPECT_EQ(results[0].samples[1].token_ids, (std::vector<int32_t>{18, 19, 20}));
  EXPECT_EQ(results[0].samples[1].finish_reason, FinishReason::kStop);
  EXPECT_EQ(results[1].samples[0].token_ids, (std::vector<int32_t>{20})) << "the stop token is kept";
  EXPECT_EQ(results[1].samples[0].logprobs.size(), 1u);
  EXPECT_EQ(results[2].samples[0].token_ids.size(), 10u);
  EXPECT_EQ(results[2].samples[0].finish_reason, FinishReason::kLength);
  EXPECT_EQ(results[3].samples[0].token_ids.back(), 22);
  // After 18 and 19 comes 20, a stop token. It must not be sampled before there are three tokens.
  EXPECT_EQ(results[4].samples[0].token_ids[1], 19);
  EXPECT_NE(results[4].samples[0].token_ids[2], 20);
  EXPECT_GT(results[4].samples[0].token_ids.size(), 3u);

  ModelConfig config = counting_config();
  config.max_position_embeddings = 8;
  const CountingModel short_model(config);
  EmbeddedEngine short_engine(short_model, engine_options());
  const auto full =
      short_engine.generate({request_of(1, {1, 2, 3}, 1, 100), request_of(2, {1, 2, 3, 4, 5, 6, 7}, 1, 9)});
  EXPECT_EQ(full[0].samples[0].token_ids.size(), 5u) << "positions 3 to 7";
  EXPECT_EQ(full[1].samples[0].token_ids.size(), 1u);
}

TEST(EmbeddedEngine, StopStringsEndASampleAcrossTokenBorders) {
  const CountingModel model(counting_config());
  auto options = engine_options();
  options.token_bytes = [](int32_t token) { return std::string("<") + std::to_string(token) + ">"; };
  EmbeddedEngine engine(model, options);
  auto request = request_of(1, {3}, 2, 20);
  request.sampling.stop = {"nothing", "6><7"};
  auto inside = request_of(2, {3}, 1, 20);
  inside.sampling.stop = {"5>"};
  auto prompt_only = request_of(3, {3, 4, 5}, 1, 4);
  prompt_only.sampling.stop = {"<5>"};
  auto late = request_of(4, {3}, 1, 20);
  late.sampling.stop = {"<5>", "<8><9>"};
  late.sampling.min_new_tokens = 6;  // tokens 4 ... 9
  const auto results = engine.generate({request, inside, prompt_only, late});
  EXPECT_EQ(results[0].samples[0].token_ids, (std::vector<int32_t>{4, 5, 6, 7}));
  EXPECT_EQ(results[0].samples[0].finish_reason, FinishReason::kStopString);
  EXPECT_EQ(results[0].samples[1].token_ids.size(), 4u);
  EXPECT_EQ(results[1].samples[0].token_ids.back(), 5);
  EXPECT_EQ(results[2].samples[0].finish_reason, FinishReason::kLength) << "the prompt is not searched";
  EXPECT_EQ(results[3].samples[0].token_ids.back(), 9) << "not before min_new_tokens";
}

TEST(EmbeddedEngine, RequestsThatCannotBeServedAreRefused) {
  const CountingModel model(counting_config());
  auto options = engine_options();
  options.settings.kv_memory.count = 4 * KvStorage::bytes_per_page(model.config(), at::kFloat);
  EmbeddedEngine engine(model, options);
  const auto refusal = [&](GenerationRequest request) {
    return message_of<UserError>([&] { engine.submit(std::move(request)); });
  };
  EXPECT_NE(refusal(request_of(1, {}, 1, 5)).find("empty"), std::string::npos);
  EXPECT_NE(refusal(request_of(1, {1, 50}, 1, 5)).find("position 1"), std::string::npos);
  EXPECT_NE(refusal(request_of(1, {-1}, 1, 5)).find("vocabulary"), std::string::npos);
  EXPECT_NE(refusal(request_of(1, std::vector<int32_t>(256, 1), 1, 5)).find("limited to 256 tokens"),
            std::string::npos);
  EXPECT_NE(refusal(request_of(1, {1}, 0, 5)).find("n_samples"), std::string::npos);
  EXPECT_NE(refusal(request_of(1, {1}, 1, 0)).find("max_new_tokens"), std::string::npos);
  EXPECT_NE(refusal(request_of(1, {1}, 1, 100)).find("kv_memory"), std::string::npos);
  EXPECT_NE(refusal(request_of(uint64_t{1} << 44, {1}, 1, 5)).find("2^44"), std::string::npos);
  auto request = request_of(1, {1}, 1, 5);
  request.sampling.stop = {"x"};
  EXPECT_NE(refusal(request).find("tokenizer"), std::string::npos);
  request = request_of(1, {1}, 1, 5);
  request.sampling.temperature = NAN;
  EXPECT_NE(refusal(request).find("temperature"), std::string::npos);
  request.sampling.temperature = 1;
  request.sampling.top_p = 1.5;
  EXPECT_NE(refusal(request).find("top_p"), std::string::npos);
  request.sampling.top_p = 1;
  request.sampling.stop_token_ids = {50};
  EXPECT_NE(refusal(request).find("stop token"), std::string::npos);
  EXPECT_TRUE(engine.idle()) << "nothing was queued";
  EXPECT_THROW(engine.generate({request_of(1, {1}, 1, 5), request_of(2, {}, 1, 5)}), UserError);
  EXPECT_TRUE(engine.idle()) << "nor by generate";
  EXPECT_THROW(engine.generate({request_of(1, {1}, 1, 5), request_of(1, {2}, 1, 5)}), UserError)
      << "the same id";
  options.settings.kv_memory.count = 10;
  EXPECT_THROW(EmbeddedEngine(model, options), UserError);
}

TEST(EmbeddedEngine, NewWeightsApplyFromTheNextTokenAndOldOnesAreKept) {
  const auto old_model = small_rollout_model(at::kDouble, 8), new_model = small_rollout_model(at::kDouble, 9);
  auto model = small_rollout_model(at::kDouble, 8);
  EmbeddedEngine engine(*model, engine_options(8, 30));
  engine.submit(request_of(1, random_tokens(2, 37, 97), 3, 24));
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(engine.step().empty());
  const auto from = new_model->parameters(), to = model->parameters();
  for (size_t i = 0; i < to.size(); ++i) to[i]->value.copy_(from[i]->value);
  const int64_t computed = engine.statistics().prefill_tokens;
  const auto another = small_rollout_model(at::kDouble, 77);
  EXPECT_THROW(engine.update_weights({5, another.get()}), InternalError) << "it shares one model's weights";
  engine.update_weights({5, model.get()});
  EXPECT_NO_THROW(engine.check_integrity());
  const auto results = engine.drain();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(engine.version(), 5);
  for (const GeneratedSample& sample : results[0].samples) {
    const auto first_new =
        std::find(sample.versions.begin(), sample.versions.end(), 5) - sample.versions.begin();
    EXPECT_GE(first_new, 8);
    EXPECT_LE(first_new, 10);
    std::vector<int32_t> tokens = results[0].prompt_ids;
    tokens.insert(tokens.end(), sample.token_ids.begin(), sample.token_ids.end());
    const auto old_log_probs = at::log_softmax(full_logits(*old_model, tokens), -1);
    const auto new_log_probs = at::log_softmax(full_logits(*new_model, tokens), -1);
    for (size_t i = 0; i < sample.token_ids.size(); ++i) {
      const auto& log_probs = static_cast<int64_t>(i) < first_new ? old_log_probs : new_log_probs;
      EXPECT_EQ(sample.versions[i], static_cast<int64_t>(i) < first_new ? 0 : 5);
      EXPECT_NEAR(sample.logprobs[i],
                  log_probs[36 + static_cast<int64_t>(i)][sample.token_ids[i]].item<double>(), 1e-9);
    }
  }
  // The prompt is recomputed once, and each sample's generated tokens are recomputed.
  EXPECT_LE(engine.statistics().prefill_tokens - computed, 37 + 3 * 10);
}

// A run that is stopped after any number of passes and continued in another engine gives the same tokens.
// fp64, so that rounding changes no sampled token.
TEST(EmbeddedEngine, RunningSamplesContinueInAnotherEngine) {
  const auto model = small_rollout_model(at::kDouble, 6);
  EmbeddedEngine uninterrupted(*model, engine_options(8, 24));
  const auto expected = uninterrupted.generate(mixed_requests());
  int64_t num_partial = 0, num_ended = 0;
  for (const int64_t passes : {0, 1, 7, 25, 40}) {
    EmbeddedEngine first(*model, engine_options(8, 24)), second(*model, engine_options(8, 24));
    for (GenerationRequest& request : mixed_requests()) first.submit(request);
    std::map<uint64_t, GenerationResult> results;
    for (int64_t i = 0; i < passes; ++i)
      for (GenerationResult& result : first.step()) results[result.id] = std::move(result);
    std::map<uint64_t, std::vector<PartialRollout>> partial;
    for (RunningRequest& running : first.running()) partial[running.id] = std::move(running.samples);
    for (GenerationRequest& request : mixed_requests()) {
      if (results.contains(request.id)) continue;
      ASSERT_TRUE(partial.contains(request.id));
      request.partial = partial[request.id];
      for (const PartialRollout& sample : request.partial) {
        ++num_partial;
        num_ended += sample.has_ended;
      }
      second.submit(request);
    }
    second.check_integrity();
    for (GenerationResult& result : second.drain()) results[result.id] = std::move(result);
    ASSERT_EQ(results.size(), expected.size());
    for (const GenerationResult& result : expected)
      for (size_t i = 0; i < result.samples.size(); ++i) {
        const GeneratedSample& sample = results.at(result.id).samples[i];
        EXPECT_EQ(sample.token_ids, result.samples[i].token_ids) << "after " << passes << " passes";
        EXPECT_EQ(sample.finish_reason, result.samples[i].finish_reason);
        EXPECT_EQ(sample.logprobs.size(), sample.token_ids.size());
      }
  }
  EXPECT_GT(num_partial, 10);
  EXPECT_GT(num_ended, 0);

  GenerationRequest damaged = request_of(1, {3, 4}, 2, 5);
  damaged.partial.push_back({{.token_ids = {7}}, false});
  EXPECT_THROW(uninterrupted.submit(damaged), UserError) << "without log-probabilities";
}

// The weights change at every pass. Each sample gets a new token between two updates.
TEST(EmbeddedEngine, AnInterruptedSampleGetsATokenBeforeTheNextInterruption) {
  const auto model = small_rollout_model(at::kFloat, 6);
  EmbeddedEngine engine(*model, engine_options(4, 8));  // 8 tokens a pass: recomputing takes several passes
  for (uint64_t id = 0; id < 3; ++id) engine.submit(request_of(id, random_tokens(id, 40, 97), 2, 20));
  int32_t version = 0;
  int64_t passes = 0, refused = 0;
  while (!engine.idle() && passes < 5000) {
    if (engine.ready_for_weights()) engine.update_weights({.version = ++version, .model = model.get()});
    else ++refused;
    engine.step();
    ++passes;
  }
  EXPECT_LT(passes, 5000) << "a sample never gets a token";
  EXPECT_GT(refused, 0);
  EXPECT_GT(engine.statistics().recomputed_tokens, 0);
}

TEST(EmbeddedEngine, CancelReturnsTheTokensSoFar) {
  const CountingModel model(counting_config());
  EmbeddedEngine engine(model, engine_options(3, 512));
  engine.submit(request_of(1, {3}, 5, 20));
  engine.submit(request_of(2, {3}, 1, 3));
  for (int i = 0; i < 4; ++i) engine.step();
  EXPECT_TRUE(engine.cancel(1));
  EXPECT_FALSE(engine.cancel(1));
  EXPECT_FALSE(engine.cancel(77));
  const auto now = engine.step();
  ASSERT_EQ(now.size(), 1u);
  EXPECT_EQ(now[0].id, 1u);
  EXPECT_EQ(now[0].samples.size(), 5u);
  for (const GeneratedSample& sample : now[0].samples)
    EXPECT_EQ(sample.finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(now[0].samples[0].token_ids.size(), 4u);
  EXPECT_EQ(now[0].samples[4].token_ids.size(), 0u) << "three at once: the last never began";
  const auto rest = engine.drain();
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0].samples[0].token_ids, (std::vector<int32_t>{4, 5, 6}));
  EXPECT_TRUE(engine.step().empty()) << "idle";
}

TEST(EmbeddedEngine, TokensAreStreamedAsTheyAreSampled) {
  const auto model = small_rollout_model(at::kFloat, 3);
  EmbeddedEngine engine(*model, engine_options());
  std::map<std::pair<uint64_t, int64_t>, std::vector<StreamedToken>> streamed;
  auto requests = mixed_requests();
  for (auto& request : requests)
    request.on_token = [&](const StreamedToken& token) {
      streamed[{token.id, token.sample}].push_back(token);
    };
  for (const GenerationResult& result : engine.generate(std::move(requests))) {
    for (size_t s = 0; s < result.samples.size(); ++s) {
      const GeneratedSample& sample = result.samples[s];
      const auto& tokens = streamed[{result.id, static_cast<int64_t>(s)}];
      ASSERT_EQ(tokens.size(), sample.token_ids.size());
      for (size_t i = 0; i < tokens.size(); ++i) {
        EXPECT_EQ(tokens[i].position, static_cast<int64_t>(i));
        EXPECT_EQ(tokens[i].token, sample.token_ids[i]);
        EXPECT_EQ(tokens[i].logprob, sample.logprobs[i]);
        EXPECT_EQ(tokens[i].raw_logprob, sample.raw_logprobs[i]);
        EXPECT_EQ(tokens[i].sampling_logprob, sample.sampling_logprobs[i]);
        EXPECT_EQ(tokens[i].version, sample.versions[i]);
        EXPECT_EQ(tokens[i].is_last, i + 1 == tokens.size());
      }
    }
  }
}

TEST(EmbeddedEngine, APausedEngineKeepsItsRequestsAndComputesNothing) {
  const CountingModel model(counting_config());
  EmbeddedEngine engine(model, engine_options(3, 512));
  engine.submit(request_of(1, {3}, 2, 6));
  engine.submit(request_of(2, {9}, 1, 6));
  engine.step();
  engine.pause();
  const auto before = engine.statistics();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(engine.step().empty());
  EXPECT_EQ(engine.statistics().new_tokens, before.new_tokens);
  EXPECT_FALSE(engine.idle());
  EXPECT_THROW(engine.drain(), UserError);
  EXPECT_TRUE(engine.cancel(2));
  EXPECT_EQ(engine.step().size(), 1u) << "a cancelled request is returned";
  engine.resume();
  const auto results = engine.drain();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].samples[1].token_ids, (std::vector<int32_t>{4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(engine.statistics().prefill_tokens, before.prefill_tokens) << "keys and values stayed";
}

TEST(EmbeddedEngine, RandomOperationsKeepItsInvariantsAndEveryRequestReturns) {
  const CounterRandom random(23, Purpose::test);
  const CountingModel model(counting_config());
  auto options = engine_options(6, 20);
  options.settings.kv_memory.count = 24 * KvStorage::bytes_per_page(model.config(), at::kFloat);
  options.stop_tokens = {7};
  EmbeddedEngine engine(model, options);
  uint64_t next_id = 0;
  std::map<uint64_t, int64_t> expected;  // request id -> number of samples
  const auto check = [&](const std::vector<GenerationResult>& results) {
    for (const GenerationResult& result : results) {
      ASSERT_EQ(expected.count(result.id), 1u);
      ASSERT_EQ(static_cast<int64_t>(result.samples.size()), expected[result.id]);
      expected.erase(result.id);
    }
  };
  for (uint64_t i = 0; i < 10000; ++i) {
    const uint64_t choice = random.below(20, 0, i);
    if (choice < 5 && expected.size() < 10) {
      auto prompt =
          random_tokens(random.below(3, 1, i), 1 + static_cast<int64_t>(random.below(90, 2, i)), 50);
      auto request = request_of(next_id, prompt, 1 + static_cast<int64_t>(random.below(5, 3, i)),
                                1 + static_cast<int64_t>(random.below(60, 4, i)));
      request.sampling.temperature = 4;
      expected[next_id++] = request.sampling.n_samples;
      engine.submit(std::move(request));
    } else if (choice == 5 && next_id > 0) {
      engine.cancel(random.below(next_id, 5, i));
    } else if (choice == 6 && random.below(4, 6, i) == 0) {
      engine.update_weights({static_cast<int32_t>(i), &model});
    } else if (choice == 7 && random.below(4, 7, i) == 0) {
      engine.paused() ? engine.resume() : engine.pause();
    } else {
      check(engine.step());
    }
    ASSERT_NO_THROW(engine.check_integrity()) << "after operation " << i;
  }
  engine.resume();
  check(engine.drain());
  EXPECT_TRUE(expected.empty()) << expected.size() << " requests are lost";
  EXPECT_NO_THROW(engine.check_integrity()) << "with no request left, no page has a holder";
  EXPECT_GT(engine.statistics().preemptions, 10);
}

TEST(EmbeddedEngine, Bf16ServesAndItsLogProbabilitiesAreClose) {
  const auto model = small_rollout_model(at::kBFloat16, 3);
  EmbeddedEngine engine(*model, engine_options());
  for (const GenerationResult& result : engine.generate(mixed_requests())) {
    // Logits of order 10 are spaced by 2^-5 in bf16. The engine and the full forward round at different
    // places.
    EXPECT_LT(largest_log_prob_error(*model, result, 1.0), 0.5) << "request " << result.id;
  }
}

}  // namespace
}  // namespace bough
