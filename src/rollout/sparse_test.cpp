// Sparse attention in the engine: which keys a sampled token attends to, also after its sample was preempted
// or continued.
#include <map>

#include "kernels/common/cuda_library.h"
#include "rollout/forward_pass.h"
#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

ModelConfig deep_config() {
  ModelConfig config = small_config();
  config.num_layers = 4;
  return config;
}

EmbeddedEngineOptions sparse_options(const std::string& budget, int64_t max_running = 64, int64_t chunk = 512,
                                     const std::string& summary = "mean") {
  EmbeddedEngineOptions options = engine_options(max_running, chunk);
  options.settings.sparse.budget = {budget.c_str()};
  options.settings.sparse.summary = summary;
  options.settings.sparse.dense_layers = 1;
  return options;
}

// Requests whose responses are far longer than the budget. Two prompts begin with the same tokens.
std::vector<GenerationRequest> long_requests() {
  std::vector<GenerationRequest> requests;
  const auto header = random_tokens(1, 90, 97);
  const int64_t lengths[] = {1, 47, 64, 100, 33};
  for (uint64_t i = 0; i < 5; ++i) {
    auto prompt = random_tokens(20 + i, lengths[i], 97);
    if (i >= 3) prompt.insert(prompt.begin(), header.begin(), header.end());
    auto request =
        request_of(200 + i, prompt, 1 + static_cast<int64_t>(i) % 3, 60 - 9 * static_cast<int64_t>(i));
    if (i == 0) request.sampling.max_new_tokens = 150;
    request.sampling.ignore_eos = true;
    request.seed = 3;
    requests.push_back(std::move(request));
  }
  return requests;
}

// Attention of one sequence by the definition in sparse_policy.h and page_choice.h, token by token, in tensor
// ops.
class ChosenAttention : public AttentionContext {
 public:
  ChosenAttention(std::vector<uint8_t> is_sampled, const SparseSettings& settings)
      : is_sampled_(std::move(is_sampled)), settings_(settings) {}

  at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override {
    const int64_t length = q_TNH.size(0), G = k_TGH.size(1), heads = q_TNH.size(1) / G;
    at::Tensor o_TNH = at::empty_like(q_TNH);
    for (int64_t t = 0; t < length; ++t)
      for (int64_t g = 0; g < G; ++g) {
        const at::Tensor q_PH = q_TNH[t].narrow(0, g * heads, heads);
        const at::Tensor k_JH = k_TGH.narrow(0, 0, t + 1).select(1, g);
        const at::Tensor v_JH = v_TGH.narrow(0, 0, t + 1).select(1, g);
        at::Tensor scores_PJ = at::matmul(q_PH, k_JH.t()) / std::sqrt(static_cast<double>(q_TNH.size(2)));
        if (layer >= settings_.dense_layers && is_sampled_[static_cast<size_t>(t)] != 0 &&
            settings_.summary == "exact" && t >= budget_tokens(t + 1)) {
          const at::Tensor least_P1 = std::get<0>(scores_PJ.topk(budget_tokens(t + 1), -1)).amin(-1, true);
          scores_PJ = scores_PJ.masked_fill(scores_PJ < least_P1, -INFINITY);
        } else if (layer >= settings_.dense_layers && is_sampled_[static_cast<size_t>(t)] != 0 &&
                   settings_.summary != "exact")
          scores_PJ = scores_PJ.masked_fill(hidden_keys(q_PH.mean(0), k_JH), -INFINITY);
        o_TNH[t].narrow(0, g * heads, heads).copy_(at::matmul(at::softmax(scores_PJ, -1), v_JH));
      }
    return o_TNH;
  }

 private:
  int64_t budget_tokens(int64_t context) const {
    int64_t budget = 0;
    for (const auto& [from, blocks] : settings_.budget_blocks())
      if (context >= from) budget = blocks * settings_.block;
    return budget;
  }

  // [J]: true for the keys of blocks that are not chosen.
  at::Tensor hidden_keys(const at::Tensor& q_H, const at::Tensor& k_JH) const {
    const int64_t tokens = settings_.block, keys = k_JH.size(0), blocks = (keys + tokens - 1) / tokens;
    at::Tensor hidden_J = at::zeros({keys}, at::kBool);
    const int64_t budget = budget_tokens(keys) / tokens;
    if (blocks <= budget) return hidden_J;
    const int64_t first = settings_.first_blocks(), last = settings_.last_blocks();
    std::vector<std::pair<double, int64_t>> ranked;
    for (int64_t block = first; block < blocks - last; ++block) {
      const at::Tensor k_PH = k_JH.narrow(0, block * tokens, tokens);
      const double score = settings_.summary == "mean"
                               ? (q_H * k_PH.mean(0)).sum().item<double>()
                               : at::maximum(q_H * k_PH.amin(0), q_H * k_PH.amax(0)).sum().item<double>();
      ranked.emplace_back(-score, block);
    }
    std::sort(ranked.begin(), ranked.end());
    for (auto i = static_cast<size_t>(budget - first - last); i < ranked.size(); ++i)
      hidden_J.narrow(0, ranked[i].second * tokens, tokens).fill_(true);
    return hidden_J;
  }

  std::vector<uint8_t> is_sampled_;
  const SparseSettings& settings_;
};

// Differences between the engine's log-probabilities and those of the definition.
std::vector<double> log_prob_errors(const Model& model, const GenerationResult& result,
                                    std::vector<uint8_t> sampled_before, const SparseSettings& settings) {
  const at::NoGradGuard no_grad;
  std::vector<double> errors;
  for (const GeneratedSample& sample : result.samples) {
    std::vector<int64_t> tokens(result.prompt_ids.begin(), result.prompt_ids.end());
    tokens.insert(tokens.end(), sample.token_ids.begin(), sample.token_ids.end());
    std::vector<uint8_t> is_sampled = sampled_before;
    is_sampled.resize(result.prompt_ids.size(), 0);
    is_sampled.resize(tokens.size(), 1);
    ChosenAttention attention(is_sampled, settings);
    const at::Tensor tokens_T = at::tensor(tokens, at::kLong);
    const at::Tensor hidden_TD =
        model.forward(tokens_T, at::arange(tokens_T.size(0), tokens_T.options()), attention);
    const at::Tensor log_probs_TV = at::log_softmax(model.logits(hidden_TD).to(at::kDouble), -1);
    for (size_t i = 0; i < sample.token_ids.size(); ++i) {
      const auto row = static_cast<int64_t>(result.prompt_ids.size() + i) - 1;
      errors.push_back(
          std::abs(log_probs_TV[row][sample.token_ids[i]].item<double>() - sample.raw_logprobs[i]));
    }
  }
  return errors;
}

double largest_error(const Model& model, const GenerationResult& result, std::vector<uint8_t> sampled_before,
                     const SparseSettings& settings) {
  return std::ranges::max(log_prob_errors(model, result, std::move(sampled_before), settings));
}

std::map<uint64_t, GenerationResult> run(EmbeddedEngine& engine, std::vector<GenerationRequest> requests,
                                         int64_t steps_between_updates = 0, const Model* model = nullptr) {
  std::map<uint64_t, GenerationResult> results;
  for (GenerationRequest& request : requests) engine.submit(std::move(request));
  for (int32_t step = 1; !engine.idle(); ++step) {
    if (steps_between_updates > 0 && step % steps_between_updates == 0 && engine.ready_for_weights())
      engine.update_weights({step, model});
    for (GenerationResult& result : engine.step()) results[result.id] = std::move(result);
    engine.check_integrity();
  }
  return results;
}

std::vector<std::pair<int32_t, double>> tokens_of(const std::map<uint64_t, GenerationResult>& results) {
  std::vector<std::pair<int32_t, double>> tokens;
  for (const auto& [id, result] : results)
    for (const GeneratedSample& sample : result.samples)
      for (size_t i = 0; i < sample.token_ids.size(); ++i)
        tokens.emplace_back(sample.token_ids[i], sample.logprobs[i]);
  return tokens;
}

SparseSettings blocks_of(int64_t block, int64_t sink, int64_t recent, const std::string& budget) {
  return {.budget = {budget.c_str()},
          .block = block,
          .sink_tokens = sink,
          .recent_tokens = recent,
          .dense_layers = 1};
}

// By pages, and blocks of all other sizes. At most 40 tokens are chosen by score.
std::vector<SparseSettings> settings_to_test() {
  std::vector<SparseSettings> all;
  for (const std::string summary : {"mean", "minmax", "exact"})
    all.push_back(sparse_options("16x5", 64, 512, summary).settings.sparse);
  all.push_back(blocks_of(4, 16, 32, "80"));
  all.push_back(blocks_of(8, 0, 0, "8x5"));
  all.push_back(blocks_of(16, 0, 20, "64"));
  all.push_back(blocks_of(32, 16, 0, "96"));
  all.push_back(blocks_of(64, 0, 0, "128"));
  all.back().summary = "minmax";
  return all;
}

TEST(SparseEngine, SampledTokensAttendToTheirChosenBlocks) {
  const auto model = small_rollout_model(at::kDouble, 5, deep_config());
  for (const SparseSettings& settings : settings_to_test()) {
    EmbeddedEngineOptions options = sparse_options("none");
    options.settings.sparse = settings;
    EmbeddedEngine engine(*model, options);
    double dense_error = 0;
    for (const auto& [id, result] : run(engine, long_requests())) {
      EXPECT_LT(largest_error(*model, result, {}, settings), 1e-9)
          << id << " " << settings.summary << " " << settings.block;
      dense_error = std::max(dense_error, largest_log_prob_error(*model, result, 1.0));
    }
    EXPECT_GT(dense_error, 1e-3) << "nothing was left out";
    const EngineStatistics statistics = engine.statistics();
    EXPECT_LT(statistics.blocks_read, statistics.blocks_in_context);
    EXPECT_GT(statistics.blocks_read, 0);
  }
}

// The engine runs in fp32, the reference in fp64. If two page scores are almost equal, their choices may
// differ, so a few log-probabilities may differ too.
TEST(SparseEngine, OnCudaSampledTokensAttendToTheirChosenPages) {
  if (!kCuda->reason().empty()) GTEST_SKIP() << kCuda->reason();
  const auto model = small_rollout_model(at::kDouble, 5, deep_config());
  const auto on_cuda = small_rollout_model(at::kFloat, 5, deep_config(), at::kCUDA);
  for (const std::string summary : {"mean", "minmax"}) {
    EmbeddedEngineOptions options = sparse_options("16x5", 8, 40, summary);
    options.settings.sparse.replay = true;
    EmbeddedEngine engine(*on_cuda, options);
    int64_t tokens = 0, near = 0;
    for (const auto& [id, result] : run(engine, long_requests())) {
      for (const double error : log_prob_errors(*model, result, {}, options.settings.sparse)) {
        ++tokens;
        near += error < 2e-3;
      }
      for (const GeneratedSample& sample : result.samples) {
        const bool is_long = result.prompt_ids.size() + sample.token_ids.size() > 100;
        EXPECT_TRUE(!is_long || !sample.page_choices.positions.empty());
      }
    }
    EXPECT_GT(static_cast<double>(near), 0.97 * static_cast<double>(tokens)) << summary;
  }
}

// A wait for the device while a graph is recorded throws. The recorded pass then chooses pages again, because
// the replay's tokens and keys differ from those of the recording.
TEST(SparseEngine, OnCudaNoLayerWaitsForTheDevice) {
  if (!kCuda->reason().empty()) GTEST_SKIP() << kCuda->reason();
  const at::NoGradGuard no_grad;
  const ModelConfig config = deep_config();
  const auto model = small_rollout_model(at::kFloat, 5, config, at::kCUDA);
  const PagedShape shape{config.num_heads, config.num_kv_heads, config.head_dim, at::kFloat, at::kCUDA};
  std::vector<int32_t> pages[3];
  std::vector<PagedSegment> prompts, segments;
  const int64_t lengths[] = {175, 230, 40};  // the third context is within the budget
  int32_t next = 0;
  for (size_t s = 0; s < 3; ++s) {
    for (int64_t i = 0; i < pages_for(lengths[s] + 1); ++i) pages[s].push_back(next++);
    prompts.push_back({pages[s], 0, lengths[s]});
    segments.push_back({pages[s], lengths[s], 1});
  }
  const std::vector<uint8_t> is_sampled(3, 1), is_given(445, 0);
  for (const auto summary : {BlockSummary::kMean, BlockSummary::kMinMax}) {
    const SparsePolicy policy{
        .budget_blocks = 5, .summary = summary, .dense_layers = 1, .keeps_choices = true};
    KvStorage storage(config, at::kFloat, at::kCUDA, 64, policy);
    const auto forward = [&](AttentionContext& attention, std::span<const PagedSegment> of, int64_t step) {
      std::vector<int64_t> tokens, positions;
      for (const PagedSegment& segment : of)
        for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
          tokens.push_back((i * 13 + segment.pages[0] + step) % 97);
          positions.push_back(i);
        }
      return model->forward(at::tensor(tokens, at::kLong).cuda(), at::tensor(positions, at::kLong).cuda(),
                            attention);
    };
    SparseContext prefill(storage, shape, AttentionPath::kFastest, model->config().attention_scale(), prompts,
                          is_given);
    forward(prefill, prompts, 0);
    const auto context = [&](AttentionPath path) {
      return SparseContext(storage, shape, path, model->config().attention_scale(), segments, is_sampled);
    };
    SparseContext fast = context(AttentionPath::kFastest);
    EXPECT_EQ(fast.chooser().queries().size(), 2u);
    at::Tensor tokens_T = at::tensor({1, 2, 3}, at::kLong).cuda(),
               positions_T = at::tensor({175, 230, 40}, at::kLong).cuda();
    at::Tensor hidden_TD;
    const auto graphs = make_device_graphs();
    ASSERT_TRUE(graphs);
    const auto graph = graphs->capture([&] { hidden_TD = model->forward(tokens_T, positions_T, fast); });
    tokens_T.copy_(at::tensor({40, 50, 60}, at::kLong));
    graph->replay();
    const at::Tensor got = hidden_TD.cpu();
    SparseContext reference = context(AttentionPath::kReference);
    const at::Tensor expected = model->forward(tokens_T, positions_T, reference).cpu();
    EXPECT_LT((got - expected).abs().max().item<double>(), 1e-4);
    SparseContext dense(storage, shape, AttentionPath::kFastest, model->config().attention_scale(), segments,
                        std::vector<uint8_t>(3, 0));
    EXPECT_GT((got - model->forward(tokens_T, positions_T, dense).cpu()).abs().max().item<double>(), 1e-3);
  }
}

TEST(SparseEngine, ABudgetThatNoContextExceedsIsDenseBitForBit) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto model = small_rollout_model(dtype, 5, deep_config());
    EmbeddedEngine dense(*model, engine_options()), sparse(*model, sparse_options("256"));
    EXPECT_EQ(tokens_of(run(sparse, long_requests())), tokens_of(run(dense, long_requests()))) << dtype;
    EXPECT_EQ(sparse.statistics().blocks_read, sparse.statistics().blocks_in_context);
  }
}

TEST(SparseEngine, RecomputationChangesNoSampledToken) {
  const SparseSettings of_dtype[] = {sparse_options("16x5").settings.sparse,
                                     sparse_options("16x5").settings.sparse, blocks_of(4, 16, 32, "64"),
                                     blocks_of(8, 0, 0, "40"), blocks_of(32, 0, 32, "96")};
  for (size_t i = 0; i < std::size(of_dtype); ++i) {
    const auto dtype = i % 2 == 0 ? at::kFloat : at::kBFloat16;
    const auto options = [&](int64_t max_running = 64, int64_t chunk = 512) {
      EmbeddedEngineOptions own = sparse_options("none", max_running, chunk);
      own.settings.sparse = of_dtype[i];
      return own;
    };
    const auto model = small_rollout_model(dtype, 5, deep_config());
    if (model->why_not_batch_invariant()) continue;
    model->set_batch_invariant(true);
    EmbeddedEngine roomy(*model, options());
    const auto together = tokens_of(run(roomy, long_requests()));
    ASSERT_GT(together.size(), 400u);

    EmbeddedEngineOptions few_pages = options(16, 40);
    const SparsePolicy policy = sparse_policy(of_dtype[i], at::kCPU);
    few_pages.settings.kv_memory.count = 30 * KvStorage::bytes_per_page(model->config(), dtype, policy);
    EmbeddedEngine small_engine(*model, few_pages);
    EXPECT_EQ(tokens_of(run(small_engine, long_requests())), together)
        << "little memory, " << dtype << " " << of_dtype[i].block;
    EXPECT_GT(small_engine.statistics().preemptions, 0);

    EmbeddedEngine interrupted(*model, options(16, 24));
    EXPECT_EQ(tokens_of(run(interrupted, long_requests(), 9, model.get())), together)
        << "interrupted, " << of_dtype[i].block;
    EXPECT_GT(interrupted.statistics().recomputed_tokens, 100);
  }
}

TEST(SparseEngine, ALaterTurnReusesThePagesOfSampledTokens) {
  const auto model = small_rollout_model(at::kDouble, 5, deep_config());
  const EmbeddedEngineOptions options = sparse_options("16x5");
  GenerationRequest first = request_of(1, random_tokens(3, 70, 97), 1, 90);
  first.sampling.ignore_eos = true;
  const auto turn = [&](EmbeddedEngine& engine, const GenerationResult& before, bool marked) {
    GenerationRequest request = request_of(2, before.prompt_ids, 2, 40);
    request.sampled.resize(before.prompt_ids.size(), 0);
    const auto& response = before.samples[0].token_ids;
    request.prompt_ids.insert(request.prompt_ids.end(), response.begin(), response.end());
    request.sampled.resize(request.prompt_ids.size(), 1);
    const auto observation = random_tokens(4, 30, 97);
    request.prompt_ids.insert(request.prompt_ids.end(), observation.begin(), observation.end());
    if (!marked) request.sampled.clear();
    request.sampling.ignore_eos = true;
    const std::vector<uint8_t> sampled = request.sampled;
    const int64_t cached = engine.statistics().cached_tokens;
    const auto results = run(engine, {request});
    EXPECT_LT(largest_error(*model, results.at(2), sampled, options.settings.sparse), 1e-9)
        << (marked ? "marked" : "not marked");
    return engine.statistics().cached_tokens - cached;
  };
  EmbeddedEngine engine(*model, options);
  const GenerationResult before = run(engine, {first}).at(1);
  EXPECT_GE(turn(engine, before, /*marked=*/true), 144) << "earlier pages are found";
  // Text that is not marked as sampled is computed with full attention. It finds only the prompt's pages.
  EXPECT_LE(turn(engine, before, /*marked=*/false), 64);
  EmbeddedEngine not_started(*model, options);
  EXPECT_EQ(turn(not_started, before, /*marked=*/true), 0);
}

TEST(SparseEngine, AnInvalidBudgetIsRefused) {
  const auto refusal = [](const std::string& budget) {
    return message_of<UserError>([&] { SparseSettings{.budget = {budget.c_str()}}.check(); });
  };
  EXPECT_NE(refusal("many").find("budget is many"), std::string::npos);
  EXPECT_NE(refusal("16x").find("expected"), std::string::npos);
  EXPECT_NE(refusal("-5").find("expected"), std::string::npos);
  EXPECT_NE(refusal("16x3").find("at least 4"), std::string::npos);
  EXPECT_NE(refusal("8x30").find("16xN or 16xN"), std::string::npos) << "blocks have 16 tokens";
  EXPECT_NE(refusal("48").find("at least 4"), std::string::npos);
  using Pages = std::map<int64_t, int64_t>;
  EXPECT_EQ((SparseSettings{.budget = {"500"}}.budget_blocks()), (Pages{{0, 32}}));
  EXPECT_EQ((SparseSettings{.budget = {"16x24"}}.budget_blocks()), (Pages{{0, 24}}));
  EXPECT_TRUE(SparseSettings{}.budget_blocks().empty());
  EXPECT_EQ(blocks_of(4, 16, 32, "4x36").budget_blocks(), (Pages{{0, 36}}));
  EXPECT_EQ(blocks_of(4, 16, 32, "16x9").budget_blocks(), (Pages{{0, 36}}));
  const auto message = [](const SparseSettings& settings) {
    return message_of<UserError>([&] { settings.check(); });
  };
  EXPECT_NE(message(blocks_of(12, 16, 32, "512")).find("block is 12; expected 4, 8, 16"), std::string::npos);
  EXPECT_NE(
      message(blocks_of(4, 16, 32, "48")).find("at least 13 blocks (52 tokens): the first 4 and the last 8"),
      std::string::npos);
  EXPECT_NE(message_of<UserError>([] {
              sparse_policy(blocks_of(8, 16, 32, "512"), at::kCUDA);
            }).find("block is 8, but the device is cuda"),
            std::string::npos);
  EXPECT_NE(message_of<UserError>([] {
              sparse_policy(blocks_of(16, 0, 32, "512"), at::kCUDA);
            }).find("sink_tokens and recent_tokens keep 0 and 2 blocks"),
            std::string::npos);
  const SparseSettings small{.budget = {"512"}, .block = 4}, large{.budget = {"512"}, .block = 64};
  EXPECT_EQ(std::pair(small.first_blocks(), small.last_blocks()), std::pair(int64_t{4}, int64_t{8}));
  EXPECT_EQ(std::pair(large.first_blocks(), large.last_blocks()), std::pair(int64_t{1}, int64_t{2}));
}

TEST(SparseEngine, ImpossibleReplaySettingsAreRefused) {
  const auto refusal = [](const std::string& yaml) {
    return message_of<UserError>([&] { parse_settings<SparseSettings>(yaml, "test"); });
  };
  EXPECT_NE(refusal("replay: true").find("expected a budget"), std::string::npos);
  EXPECT_NE(refusal("{replay: true, budget: 512, summary: exact}").find("expected mean or minmax"),
            std::string::npos);
  const ModelConfig config = deep_config();
  const SparsePolicy policy{.budget_blocks = 8, .dense_layers = 1, .keeps_choices = true};
  EXPECT_EQ(KvStorage::choice_bytes_per_token(config, policy), 3 * config.num_kv_heads * (8 - 3) * 2);
  SparsePolicy forgets = policy;
  forgets.keeps_choices = false;
  EXPECT_EQ(KvStorage::bytes_per_page(config, at::kFloat, policy) -
                KvStorage::bytes_per_page(config, at::kFloat, forgets),
            16 * KvStorage::choice_bytes_per_token(config, policy));
}

TEST(SparseEngine, ABudgetGrowsWithTheContext) {
  const auto refusal = [](std::vector<SparseBudget> budget) {
    return message_of<UserError>([&] { SparseSettings{.budget = std::move(budget)}.check(); });
  };
  EXPECT_NE(refusal({"100:512"}).find("short contexts first"), std::string::npos);
  EXPECT_NE(refusal({"512", "1024"}).find("[512, 1024]"), std::string::npos);
  EXPECT_NE(refusal({"512", "8192:512"}).find("larger budgets"), std::string::npos);
  EXPECT_NE(refusal({"512", "8192:1024", "4096:2048"}).find("larger budgets"), std::string::npos);
  EXPECT_NE(refusal({"512", "8192:none"}).find("budget is none"), std::string::npos);
  EXPECT_NE(message_of<UserError>([] { SparseBudget::from_text("far:512"); }).find("before the colon"),
            std::string::npos);
  using Pages = std::map<int64_t, int64_t>;
  SparseSettings growing{.budget = {"16x5", "128:112", "180:16x9"}, .dense_layers = 1};
  EXPECT_EQ(growing.budget_blocks(), (Pages{{0, 5}, {128, 7}, {180, 9}}));
  const auto read =
      parse_settings<SparseSettings>("budget: [16x5, 128:112, {from: 180, budget: 16x9}]", "test");
  EXPECT_EQ(read.budget_blocks(), growing.budget_blocks());
  EXPECT_EQ(parse_settings<SparseSettings>(settings_yaml(read), "test").budget_blocks(),
            read.budget_blocks());
  const auto given = parse_settings<SparseSettings>("budget: 512", "test", {"budget=[16x4, 900:16x8]"});
  EXPECT_EQ(given.budget_blocks(), (Pages{{0, 4}, {900, 8}}));

  const auto model = small_rollout_model(at::kDouble, 5, deep_config());
  EmbeddedEngineOptions options = sparse_options("16x5");
  options.settings.sparse = growing;
  EmbeddedEngine engine(*model, options);
  for (const auto& [id, result] : run(engine, long_requests()))
    EXPECT_LT(largest_error(*model, result, {}, growing), 1e-9) << id;
}

}  // namespace
}  // namespace bough
