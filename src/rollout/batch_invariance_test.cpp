// The bits of a sample do not depend on what else is in the batch.
#include <map>

#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

// Returns the tokens of all samples and the bits of their log-probabilities.
std::vector<std::pair<int32_t, double>> sampled(const std::vector<GenerationResult>& results) {
  std::vector<std::pair<int32_t, double>> tokens;
  for (const GenerationResult& result : results)
    for (const GeneratedSample& sample : result.samples)
      for (size_t i = 0; i < sample.token_ids.size(); ++i)
        tokens.emplace_back(sample.token_ids[i], sample.logprobs[i]);
  return tokens;
}

TEST(EmbeddedEngine, BatchInvariantSamplesDoNotDependOnWhatIsComputedBesideThem) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto model = small_rollout_model(dtype, 5);
    if (model->why_not_batch_invariant()) continue;
    model->set_batch_invariant(true);
    const auto generate = [&](EmbeddedEngineOptions options, std::vector<GenerationRequest> requests) {
      options.settings.batch_invariant = true;
      EmbeddedEngine engine(*model, options);
      return sampled(engine.generate(std::move(requests)));
    };
    const auto together = generate(engine_options(), mixed_requests());
    ASSERT_GT(together.size(), 300u);
    std::vector<std::pair<int32_t, double>> alone;
    for (const GenerationRequest& request : mixed_requests())
      for (const auto& token : generate(engine_options(1), {request})) alone.push_back(token);
    EXPECT_EQ(alone, together) << "one at a time, " << dtype;
    for (const int64_t chunk : {1, 7, 300})
      EXPECT_EQ(generate(engine_options(3, chunk), mixed_requests()), together) << "chunk " << chunk;
    at::set_num_threads(2);
    EXPECT_EQ(generate(engine_options(), mixed_requests()), together) << "two threads";
    at::set_num_threads(kThreads);

    auto options = engine_options(16, 40);
    options.settings.kv_memory.count = 26 * KvStorage::bytes_per_page(model->config(), dtype);
    options.settings.batch_invariant = true;
    EmbeddedEngine small_engine(*model, options);
    EXPECT_EQ(sampled(small_engine.generate(mixed_requests())), together) << "little memory";
    EXPECT_GT(small_engine.statistics().preemptions, 0);

    // Samples that are interrupted many times under the same weights have the same bits.
    EmbeddedEngine interrupted(*model, engine_options(16, 24));
    for (GenerationRequest& request : mixed_requests()) interrupted.submit(std::move(request));
    std::map<uint64_t, GenerationResult> results;
    for (int32_t version = 0; !interrupted.idle(); ++version) {
      if (version % 9 == 8) interrupted.update_weights({version, model.get()});
      for (GenerationResult& result : interrupted.step()) results[result.id] = std::move(result);
    }
    std::vector<GenerationResult> in_order;
    for (auto& [id, result] : results) in_order.push_back(std::move(result));
    EXPECT_EQ(sampled(in_order), together) << "interrupted, " << dtype;
    EXPECT_GT(interrupted.version(), 20);
  }
}

TEST(EmbeddedEngine, BatchInvarianceIsRefusedIfUnsupported) {
  const auto model = small_rollout_model(at::kDouble, 5);
  const auto message = message_of<UserError>([&] { model->set_batch_invariant(true); });
  EXPECT_NE(message.find("batch_invariant: it needs the dtype fp32 or bf16"), std::string::npos) << message;
  EXPECT_NO_THROW(model->set_batch_invariant(false));
  auto options = engine_options();
  options.settings.batch_invariant = true;
  EXPECT_THROW(EmbeddedEngine(*model, options), InternalError);
}

}  // namespace
}  // namespace bough
