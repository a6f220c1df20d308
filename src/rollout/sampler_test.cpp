#include "rollout/sampler.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "rollout/rollout_test_util.h"
#include "rollout/sampler_cuda.h"

namespace bough {
namespace {

at::Tensor random_logits(int64_t rows, int64_t vocabulary, uint64_t seed, double scale = 2.0) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn({rows, vocabulary}, generator, at::TensorOptions().dtype(at::kDouble)).mul_(scale);
}

SampledToken sample_one(const at::Tensor& logits, const SamplingTask& request) {
  SampledToken sampled;
  sample_tokens(logits, {&request, 1}, {&sampled, 1});
  return sampled;
}

// The expected distribution by the definition in sampler.h, found by sorting all tokens.
std::vector<double> expected_distribution(const at::Tensor& logits_V, const SamplingTask& request) {
  const auto V = static_cast<size_t>(logits_V.size(0));
  const double temperature = request.temperature;
  std::vector<double> weights(V);
  for (size_t i = 0; i < V; ++i) {
    const auto count_in = [&](const auto& tokens) {
      return std::count(tokens.begin(), tokens.end(), static_cast<int32_t>(i));
    };
    double logit = logits_V[static_cast<int64_t>(i)].item<double>();
    const auto in_response = count_in(request.response);
    if (in_response > 0 || count_in(request.prompt) > 0)
      logit = logit > 0 ? logit / request.repetition_penalty : logit * request.repetition_penalty;
    if (in_response > 0) logit -= request.presence_penalty;
    logit -= request.frequency_penalty * static_cast<double>(in_response);
    weights[i] = count_in(request.excluded) > 0 ? 0 : std::exp(logit / temperature);
  }
  std::vector<size_t> order(V);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weights[a] > weights[b]; });
  if (request.top_k > 0) {
    for (size_t i = static_cast<size_t>(request.top_k); i < V; ++i) weights[order[i]] = 0;
  }
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double mass = 0;
  for (const size_t i : order) {
    if (mass >= request.top_p * total && mass > 0) weights[i] = 0;
    mass += weights[i];
  }
  for (double& weight : weights)
    if (weight < request.min_p * weights[order[0]]) weight = 0;
  const double kept = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& weight : weights) weight /= kept;
  return weights;
}

// Tests Pearson's statistic over 100,000 sampled tokens. Tokens expected fewer than 5 times are pooled.
void expect_follows(const at::Tensor& logits_1V, SamplingTask request, const char* what) {
  const int kSamples = 100000;
  const CounterRandom random(17, Purpose::test);
  std::vector<SamplingTask> requests(kSamples, request);
  for (int i = 0; i < kSamples; ++i)
    requests[static_cast<size_t>(i)].uniform = random.uniform(0, static_cast<uint64_t>(i));
  std::vector<SampledToken> samples(kSamples);
  sample_tokens(logits_1V, requests, samples);
  const auto expected = expected_distribution(logits_1V[0], request);
  for (int i = 0; i < 100; ++i) {
    const SampledToken& sampled = samples[static_cast<size_t>(i)];
    EXPECT_NEAR(sampled.sampling_log_prob, std::log(expected[static_cast<size_t>(sampled.token)]), 2e-5)
        << what;
  }
  std::vector<double> counts(expected.size());
  for (const SampledToken& sampled : samples) ++counts[static_cast<size_t>(sampled.token)];
  double statistic = 0, pooled_count = 0, pooled_expected = 0;
  int cells = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == 0) {
      EXPECT_EQ(counts[i], 0) << what << ": token " << i << " is outside the cut";
    } else if (expected[i] * kSamples < 5) {
      pooled_count += counts[i];
      pooled_expected += expected[i] * kSamples;
    } else {
      statistic += std::pow(counts[i] - expected[i] * kSamples, 2) / (expected[i] * kSamples);
      ++cells;
    }
  }
  if (pooled_expected >= 5) {
    statistic += std::pow(pooled_count - pooled_expected, 2) / pooled_expected;
    ++cells;
  }
  if (cells < 2) return;  // only one token is possible, and no other token was sampled
  // Chi-square with n degrees of freedom has mean n and standard deviation sqrt(2 n). 4.5 deviations are
  // allowed.
  const double freedom = cells - 1;
  EXPECT_LT(statistic, freedom + 4.5 * std::sqrt(2 * freedom)) << what << ", " << cells << " cells";
}

TEST(Sampler, SamplesFollowTheDistribution) {
  const std::vector<int32_t> excluded = {0, 3, 299};
  for (const int64_t vocabulary : {11, 300, 1000}) {
    const auto logits = random_logits(1, vocabulary, 3).to(at::kFloat);
    SamplingTask request;
    expect_follows(logits, request, "plain");
    request.temperature = 0.7;
    expect_follows(logits.to(at::kDouble), request, "temperature 0.7");
    request.top_k = 5;
    expect_follows(logits, request, "top_k 5");
    request.top_p = 0.8;
    expect_follows(logits, request, "top_k 5, top_p 0.8");
    request.top_k = 0;
    expect_follows(logits, request, "top_p 0.8");
    if (vocabulary < 300) continue;
    request.excluded = excluded;
    expect_follows(logits, request, "top_p 0.8, excluded");
    request.top_p = 1;
    expect_follows(logits, request, "excluded");
  }
}

// The top log-probabilities are those of the whole distribution at the temperature, whatever restricts the
// sampling.
TEST(Sampler, MostLikelyTokensComeInOrderWithTheirLogProbabilities) {
  const std::vector<int32_t> response = {2, 5, 9}, excluded = {0, 3};
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const int64_t vocabulary : {5, 300, 5000}) {
      const auto logits = random_logits(2, vocabulary, 21).to(dtype);
      for (const int64_t count : {1, 4, 20}) {
        std::vector<SamplingTask> requests(4);
        for (size_t i = 0; i < requests.size(); ++i) {
          requests[i].row = static_cast<int64_t>(i % 2);
          requests[i].top_logprobs = count;
          requests[i].temperature = i < 2 ? 0.7 : 1.0;
        }
        requests[1].top_p = 0.5;
        requests[2].frequency_penalty = 3;
        requests[2].response = vocabulary > 9 ? std::span(response) : std::span(response).first(1);
        requests[3].excluded = excluded;
        std::vector<SampledToken> samples(requests.size());
        sample_tokens(logits, requests, samples);
        for (size_t i = 0; i < requests.size(); ++i) {
          const auto row = logits[requests[i].row].to(at::kDouble);
          const auto log_p = (row / requests[i].temperature).log_softmax(-1);
          const auto order = row.argsort(/*stable=*/true, -1, /*descending=*/true);
          const auto expected = static_cast<size_t>(std::min(count, vocabulary));
          ASSERT_EQ(samples[i].top_ids.size(), expected);
          ASSERT_EQ(samples[i].top_log_probs.size(), expected);
          for (size_t k = 0; k < expected; ++k) {
            const int64_t id = order[static_cast<int64_t>(k)].item<int64_t>();
            EXPECT_EQ(samples[i].top_ids[k], id);
            EXPECT_NEAR(samples[i].top_log_probs[k], log_p[id].item<double>(), 1e-5);
          }
        }
      }
      SamplingTask request;
      std::vector<SampledToken> samples(1);
      sample_tokens(logits, std::span(&request, 1), samples);
      EXPECT_TRUE(samples[0].top_ids.empty());
    }
}

TEST(Sampler, MinPAndPenaltiesShapeTheDistributionButNotItsLogProbabilities) {
  const std::vector<int32_t> prompt = {1, 2, 2, 7}, response = {2, 5, 9, 9, 9}, excluded = {0, 299};
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto logits = random_logits(1, 300, 13).to(dtype);
    SamplingTask request;
    request.temperature = 0.8;
    request.min_p = 0.1;
    expect_follows(logits, request, "min_p");
    request.excluded = excluded;
    expect_follows(logits, request, "min_p, excluded");
    request.top_p = 0.95;
    expect_follows(logits, request, "min_p cuts more than top_p");
    request.top_p = 0.3;
    expect_follows(logits, request, "min_p cuts less than top_p");
    request.top_p = 1;
    request.top_k = 20;
    expect_follows(logits, request, "min_p, top_k");
    request.min_p = 0;
    request.top_k = 0;
    request.prompt = prompt;
    request.response = response;
    request.repetition_penalty = 1.5;
    expect_follows(logits, request, "repetition_penalty");
    request.presence_penalty = 0.7;
    request.frequency_penalty = 0.2;
    expect_follows(logits, request, "all penalties");
    request.min_p = 0.05;
    request.top_p = 0.9;
    expect_follows(logits, request, "all penalties, top_p, min_p");
    const SampledToken sampled = sample_one(logits, request);
    EXPECT_NEAR(sampled.raw_log_prob,
                at::log_softmax(logits[0].to(at::kDouble), 0)[sampled.token].item<double>(), 2e-6);
    request.greedy = true;
    EXPECT_EQ(sample_one(logits, request).sampling_log_prob, 0);
  }
}

TEST(Sampler, TokensOfLaterBlocksAreSampledToo) {
  // All the mass lies in the last of several blocks, at the end of a vocabulary that no block size divides.
  auto logits = at::full({1, 2573}, -20.0, at::kFloat);
  logits[0][2572] = 3.0;
  logits[0][2500] = 3.0;
  expect_follows(logits, {}, "two tokens");
}

TEST(Sampler, LogProbabilitiesAreOfTheFullDistribution) {
  const std::vector<int32_t> excluded = {1};
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto logits = random_logits(6, 1234, 5).to(dtype);
    for (const double temperature : {0.7, 1.0, 1.3}) {
      for (int variant = 0; variant < 4; ++variant) {
        SamplingTask request;
        request.row = variant;
        request.temperature = temperature;
        request.uniform = 0.37;
        if (variant == 1) request.top_k = 3;
        if (variant == 2) request.top_p = 0.5;
        if (variant == 3) request.excluded = excluded;
        const SampledToken sampled = sample_one(logits, request);
        const auto row = logits[variant].to(at::kDouble);
        const double tolerance = dtype == at::kDouble ? 1e-12 : 2e-6;  // a sum of 1,234 fp32 exponentials
        EXPECT_NEAR(sampled.log_prob, at::log_softmax(row / temperature, 0)[sampled.token].item<double>(),
                    tolerance);
        EXPECT_NEAR(sampled.raw_log_prob, at::log_softmax(row, 0)[sampled.token].item<double>(), tolerance);
      }
    }
  }
}

// The requests mix all sampling options. The same random numbers give the same tokens on both devices, unless
// a uniform number is on the border between two tokens, within the sums' rounding.
class SamplerOn : public OnDevice {};
BOUGH_ON_DEVICES(SamplerOn);

TEST_P(SamplerOn, SamplesEqualThoseOfTheCpuInFp64) {
  const CounterRandom random(23, Purpose::test);
  const std::vector<int32_t> excluded = {2, 5}, response = {1, 1, 4};
  // The device path uses tensor ops, except for draw_token. The path is therefore tested on the CPU, too.
  for (const auto way : {sample_tokens, sample_on_device})
    for (const int64_t vocabulary : {9, 256, 1000, 50001})
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
        SCOPED_TRACE(testing::Message()
                     << vocabulary << " tokens, " << dtype << (way == sample_tokens ? "" : ", as on a GPU"));
        const auto logits = random_logits(7, vocabulary, 31).to(dtype);
        std::vector<SamplingTask> requests(60);
        for (size_t i = 0; i < requests.size(); ++i) {
          requests[i].row = static_cast<int64_t>(i % 7);
          requests[i].temperature = i % 3 == 0 ? 1.0 : 0.2 + 0.02 * static_cast<double>(i);
          requests[i].greedy = i % 11 == 0;
          requests[i].uniform = random.uniform(0, i);
          if (i % 5 == 1) requests[i].top_p = 0.8;
          if (i % 5 == 2) requests[i].top_k = 4;
          if (i % 5 >= 2) requests[i].min_p = 0.01;
          if (i % 10 == 7) requests[i].top_p = 0.5;
          if (i % 13 == 3) requests[i].excluded = excluded;
          if (i % 7 == 4) {
            requests[i].prompt = excluded;
            requests[i].response = response;
            requests[i].repetition_penalty = 1.3;
            requests[i].presence_penalty = 0.1;
            requests[i].frequency_penalty = 0.2;
          }
          if (i % 4 == 3) requests[i].top_logprobs = 1 + static_cast<int64_t>(i % 12);
        }
        std::vector<SampledToken> got(requests.size()), again(requests.size()), expected(requests.size());
        const auto there = logits.to(device());
        way(there, requests, got);
        way(there, requests, again);
        sample_tokens(logits.to(at::kDouble), requests, expected);
        int num_others = 0;
        for (size_t i = 0; i < requests.size(); ++i) {
          EXPECT_EQ(got[i].token, again[i].token);
          EXPECT_EQ(got[i].log_prob, again[i].log_prob);
          num_others += got[i].token != expected[i].token;
          if (got[i].token != expected[i].token) continue;
          const double tolerance =
              dtype == at::kDouble ? 1e-11 : 2e-5;  // sums of up to 50,001 fp32 exponentials
          EXPECT_NEAR(got[i].log_prob, expected[i].log_prob, tolerance) << "request " << i;
          EXPECT_NEAR(got[i].raw_log_prob, expected[i].raw_log_prob, tolerance) << "request " << i;
          EXPECT_NEAR(got[i].sampling_log_prob, expected[i].sampling_log_prob, tolerance) << "request " << i;
          ASSERT_EQ(got[i].top_ids, expected[i].top_ids) << "request " << i;
          for (size_t k = 0; k < got[i].top_ids.size(); ++k)
            EXPECT_NEAR(got[i].top_log_probs[k], expected[i].top_log_probs[k], tolerance) << "request " << i;
        }
        EXPECT_LE(num_others, 1);
      }
}

TEST_P(SamplerOn, GreedyTakesTheFirstOfEqualLogitsAndRefusesNonFiniteOnes) {
  auto logits = random_logits(1, 3000, 7).to(device());
  logits[0][2900] = 50;
  logits[0][611] = 50;
  SamplingTask request;
  request.temperature = 0;
  EXPECT_EQ(sample_one(logits, request).token, 611);
  for (const double wrong : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    auto broken = logits.clone();
    broken[0][1234] = wrong;
    EXPECT_NE(message_of<UserError>([&] { sample_one(broken, SamplingTask{}); }).find("not finite"),
              std::string::npos);
  }
}

TEST(Sampler, GreedyTakesTheFirstOfTheLargestLogits) {
  auto logits = random_logits(1, 3000, 7);
  SamplingTask request;
  request.temperature = 0;
  EXPECT_EQ(sample_one(logits, request).token, logits[0].argmax().item<int64_t>());
  logits[0][2900] = 50;
  logits[0][611] = 50;
  const SampledToken sampled = sample_one(logits, request);
  EXPECT_EQ(sampled.token, 611);
  EXPECT_EQ(sampled.log_prob, sampled.raw_log_prob) << "temperature 0 counts as 1";
  const std::vector<int32_t> excluded = {611};
  request.excluded = excluded;
  EXPECT_EQ(sample_one(logits, request).token, 2900);
  request.temperature = 2;
  request.greedy = true;
  const SampledToken warm = sample_one(logits, request);
  EXPECT_EQ(warm.token, 2900);
  EXPECT_NEAR(warm.log_prob, at::log_softmax(logits[0] / 2, 0)[2900].item<double>(), 1e-12);
}

TEST(Sampler, TruncationKeepsTheMostLikelyTokens) {
  const auto logits = at::log(at::tensor({0.1, 0.4, 0.1, 0.25, 0.15}, at::kDouble)).unsqueeze(0);
  const auto reachable = [&](SamplingTask request) {
    std::map<int32_t, int> tokens;
    for (int i = 0; i < 1000; ++i) {
      request.uniform = (i + 0.5) / 1000;
      ++tokens[sample_one(logits, request).token];
    }
    std::vector<int32_t> ids;
    for (const auto& [token, count] : tokens) ids.push_back(token);
    return ids;
  };
  SamplingTask request;
  request.top_k = 2;
  EXPECT_EQ(reachable(request), (std::vector<int32_t>{1, 3}));
  request.top_k = 4;
  EXPECT_EQ(reachable(request), (std::vector<int32_t>{0, 1, 3, 4})) << "of equal logits the lower id";
  request.top_k = 100;
  EXPECT_EQ(reachable(request).size(), 5u);
  request.top_k = 0;
  request.top_p = 0.41;
  EXPECT_EQ(reachable(request), (std::vector<int32_t>{1, 3})) << "the token that reaches top_p is kept";
  request.top_p = 0;
  EXPECT_EQ(reachable(request), (std::vector<int32_t>{1}));
  request.top_k = 2;
  request.top_p = 0.6;  // 0.4 / 0.65 of the mass that top_k leaves
  EXPECT_EQ(reachable(request), (std::vector<int32_t>{1}));
}

TEST(Sampler, TopPCutsAmongNearlyEqualLogits) {
  // All tokens lie in one bucket of the histogram. The 33 largest of the 64 tokens are the fewest with more
  // than half of the mass.
  const auto logits = at::arange(64, at::TensorOptions().dtype(at::kDouble)).mul_(1e-6).unsqueeze(0);
  std::map<int32_t, int> tokens;
  for (int i = 0; i < 1000; ++i) {
    SamplingTask request;
    request.top_p = 0.51;
    request.uniform = (i + 0.5) / 1000;
    ++tokens[sample_one(logits, request).token];
  }
  EXPECT_EQ(tokens.size(), 33u);
  EXPECT_EQ(tokens.begin()->first, 31);
}

TEST(Sampler, TokensLeftAfterExclusionMayBeVeryUnlikely) {
  auto logits = at::full({1, 600}, -1000.0, at::kFloat);
  logits[0][2] = 0.0;
  logits[0][599] = -900.0;
  const std::vector<int32_t> excluded = {2};
  for (const double top_p : {1.0, 0.9}) {
    SamplingTask request;
    request.excluded = excluded;
    request.top_p = top_p;
    const SampledToken sampled = sample_one(logits, request);
    EXPECT_EQ(sampled.token, 599);
    EXPECT_NEAR(sampled.log_prob, -900, 1e-3);
  }
}

TEST(Sampler, LogitsThatAreNotNumbersAreRefused) {
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    for (const int64_t where : {0, 255, 700}) {
      auto logits = random_logits(1, 701, 9).to(at::kFloat);
      logits[0][where] = bad;
      const std::string message = message_of<UserError>([&] { sample_one(logits, {}); });
      EXPECT_NE(message.find("not finite"), std::string::npos) << message;
    }
  }
  auto masked = random_logits(1, 701, 9).to(at::kFloat);
  masked[0][3] = -INFINITY;
  EXPECT_NO_THROW(sample_one(masked, {}));
  EXPECT_THROW(sample_one(at::full({1, 5}, -INFINITY, at::kFloat), {}), UserError);
}

TEST(Sampler, ExtremeUniformNumbersSampleTokensOfTheSet) {
  const auto logits = random_logits(1, 5000, 11, 8.0).to(at::kFloat);
  for (const double uniform : {5e-324, 1e-300, 1.0 - 1.2e-16}) {
    for (const double top_p : {1.0, 0.9}) {
      SamplingTask request;
      request.uniform = uniform;
      request.top_p = top_p;
      const SampledToken sampled = sample_one(logits, request);
      EXPECT_GE(sampled.token, 0);
      EXPECT_LT(sampled.token, 5000);
      EXPECT_TRUE(std::isfinite(sampled.log_prob));
    }
  }
}

}  // namespace
}  // namespace bough
