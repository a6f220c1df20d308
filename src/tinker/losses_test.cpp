#include "tinker/losses.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "base/error.h"
#include "tinker/training_model.h"
#include "train/flat_reference.h"
#include "train/small_model.h"

namespace bough {
namespace {

constexpr int64_t kTestVocab = 40;

// Sequences of one prompt. The targets are the next tokens, or any tokens; cross_entropy may have several.
ForwardBackwardRequest random_request(const std::string& loss, uint64_t seed, bool next_tokens,
                                      int64_t columns = 1) {
  std::mt19937_64 random(seed);
  const auto real = [&](double low, double high) {
    return std::uniform_real_distribution(low, high)(random);
  };
  const auto token = [&] { return static_cast<int32_t>(random() % kTestVocab); };
  ForwardBackwardRequest request;
  request.loss_fn = loss;
  std::vector<int32_t> prompt(6);
  for (int32_t& id : prompt) id = token();
  for (int i = 0; i < 4; ++i) {
    WireDatum datum{prompt, {}};
    for (int64_t n = 1 + static_cast<int64_t>(random() % 5); n > 0; --n) datum.tokens.push_back(token());
    const size_t length = datum.tokens.size();
    const auto add = [&](const char* name, int64_t width, const auto& value) {
      WireTensor& tensor = datum.inputs[name];
      tensor.columns = width;
      for (size_t k = 0; k < length * static_cast<size_t>(width); ++k) tensor.values.push_back(value(k));
    };
    add("target_tokens", columns, [&](size_t k) {
      return static_cast<double>(next_tokens && k + 1 < length ? datum.tokens[k + 1] : token());
    });
    if (loss == "cross_entropy") {
      add("weights", columns, [&](size_t k) { return k < 5 ? 0.0 : real(0, 2); });
    } else {
      add("logprobs", 1, [&](size_t k) { return k < 5 ? 0.0 : real(-5, -2); });
      add("advantages", 1, [&](size_t k) { return k < 5 ? 0.0 : real(-2, 2); });
    }
    if (loss == "gspo") add("sequence_ratio_mask", 1, [&](size_t k) { return k < 5 ? 0.0 : 1.0; });
    if (loss == "ppo" || loss == "gspo") {
      add("clip_low_threshold", 1, [&](size_t) { return real(0.2, 0.9); });
      add("clip_high_threshold", 1, [&](size_t) { return real(1.1, 2.0); });
    }
    request.data.push_back(std::move(datum));
  }
  return request;
}

// The loss of a datum in plain numbers. log_probs: of its targets.
double plain_loss(const TinkerLossSettings& settings, const WireDatum& datum,
                  const std::vector<double>& log_probs) {
  const auto input = [&](const char* name, size_t i, double otherwise) {
    const auto found = datum.inputs.find(name);
    return found == datum.inputs.end() ? otherwise : found->second.values[i];
  };
  double loss = 0, sum = 0, count = 0;
  for (size_t i = 0; i < log_probs.size(); ++i)
    if (input("sequence_ratio_mask", i, 0) != 0) {
      sum += log_probs[i] - input("logprobs", i, 0);
      count += 1;
    }
  for (size_t i = 0; i < log_probs.size(); ++i) {
    const double log_p = log_probs[i], q = input("logprobs", i, 0), a = input("advantages", i, 0);
    const double low = input("clip_low_threshold", i, settings.clip_low);
    const double high = input("clip_high_threshold", i, settings.clip_high);
    double ratio = std::exp(log_p - q);
    if (settings.name == "cross_entropy") loss -= input("weights", i, 1) * log_p;
    if (settings.name == "importance_sampling") loss -= ratio * a;
    if (settings.name == "cispo") loss -= std::clamp(ratio, low, high) * log_p * a;
    if (settings.name == "dro") loss -= log_p * a - 0.5 * settings.beta * (log_p - q) * (log_p - q);
    if (settings.name == "gspo") ratio = std::exp(sum / count);
    if (settings.name == "gspo" || settings.name == "ppo")
      loss -= std::min(ratio * a, std::clamp(ratio, low, high) * a);
  }
  return loss;
}

struct Case {
  const char* loss;
  bool next_tokens;
  int64_t columns;
};
class TinkerLosses : public testing::TestWithParam<Case> {};

TEST_P(TinkerLosses, LossAndGradientsOfATreeEqualThoseOfTheFlatBatch) {
  const auto [loss, next_tokens, columns] = GetParam();
  const auto base = small_model(at::kDouble, 3);
  for (const char* strategy : {"auto", "dense", "path"}) {
    TrainingModel training(*base, {.rank = 3, .alpha = 32, .targets = {{"q_proj"}, {"up_proj"}, {"lm_head"}}},
                           5, {.strategy = strategy});
    at::manual_seed(9);
    for (Parameter* parameter : training.model().trained_parameters()) parameter->value.normal_(0, 0.1);
    const ForwardBackwardRequest first = random_request(loss, 1, next_tokens, columns),
                                 second = random_request(loss, 2, next_tokens, columns);
    const TinkerLossSettings settings = read_loss_settings(first);
    for (size_t i = 0; i < first.data.size(); ++i)
      check_datum(first.data[i], settings, kTestVocab, 100, "data");

    const auto results = training.forward_backward({&first, &second}, settings);

    const auto batch = make_tinker_batch({&first, &second}, settings, at::kDouble);
    ASSERT_EQ(batch->batch.top_k_ids_RK.defined(), !next_tokens);
    FlatReference flat(training.model());
    const FlatResult expected = flat.run(batch->batch, TinkerLoss(*batch));
    EXPECT_NEAR(results[0].metrics.at("loss:sum") + results[1].metrics.at("loss:sum"), expected.loss,
                1e-10 * (1 + std::abs(expected.loss)));
    for (Parameter* parameter : training.model().trained_parameters())
      for (const Parameter::Part& part : parameter->parts) {
        const at::Tensor got = parameter->main_grad.narrow(0, part.begin, part.end - part.begin);
        const at::Tensor& want = expected.gradients.at(part.name);
        EXPECT_GT(want.abs().max().item<double>(), 0) << part.name;
        EXPECT_LT((got - want).abs().max().item<double>(), 1e-10 * (1 + want.abs().max().item<double>()))
            << loss << " " << strategy << " " << part.name;
      }
    // The values of each request, by the formulas in plain numbers.
    size_t at = 0;
    for (const ForwardBackwardRequest* request : {&first, &second}) {
      double sum = 0;
      const ForwardBackwardResult& result = results[at++];
      ASSERT_EQ(result.outputs.size(), request->data.size());
      for (size_t i = 0; i < request->data.size(); ++i) {
        const std::vector<double> log_probs(result.outputs[i].log_probs.begin(),
                                            result.outputs[i].log_probs.end());
        EXPECT_EQ(log_probs.size(), request->data[i].tokens.size() * static_cast<size_t>(columns));
        sum += plain_loss(settings, request->data[i], log_probs);
      }
      EXPECT_NEAR(result.metrics.at("loss:sum"), sum, 1e-4 * (1 + std::abs(sum)))
          << "log-probabilities are fp32";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TinkerLosses,
                         testing::Values(Case{"cross_entropy", false, 1}, Case{"cross_entropy", false, 3},
                                         Case{"importance_sampling", false, 1}, Case{"ppo", false, 1},
                                         Case{"cispo", false, 1}, Case{"dro", false, 1},
                                         Case{"gspo", false, 1}),
                         [](const auto& info) {
                           return std::string(info.param.loss) + (info.param.columns > 1 ? "_top_k" : "");
                         });

TEST(TinkerLosses, TargetsThatFollowNeedNoFurtherTokens) {
  ForwardBackwardRequest request = random_request("cross_entropy", 4, true);
  const auto batch = make_tinker_batch({&request}, read_loss_settings(request), at::kDouble);
  EXPECT_FALSE(batch->batch.top_k_ids_RK.defined());
  request.data[0].inputs["target_tokens"].values[0] += request.data[0].tokens[1] == 0 ? 1 : -1;
  EXPECT_TRUE(
      make_tinker_batch({&request}, read_loss_settings(request), at::kDouble)->batch.top_k_ids_RK.defined());
}

TEST(TinkerLosses, ForwardOnlyAddsNoGradient) {
  const auto base = small_model(at::kDouble, 3);
  TrainingModel training(*base, {.rank = 2, .targets = {{"q_proj"}}}, 5, {});
  ForwardBackwardRequest request = random_request("cross_entropy", 1, true);
  request.forward_only = true;
  training.forward_backward({&request}, read_loss_settings(request));
  for (Parameter* parameter : training.model().trained_parameters())
    EXPECT_EQ(parameter->main_grad.abs().max().item<double>(), 0);
}

TEST(TinkerLosses, AGradientThatIsNotFiniteIsDroppedAndSaid) {
  const auto base = small_model(at::kDouble, 3);
  TrainingModel training(*base, {.rank = 2, .targets = {{"q_proj"}}}, 5, {});
  const at::Tensor before = training.model().trained_parameters()[0]->value.clone();
  training.model().trained_parameters()[0]->main_grad.fill_(std::nan(""));
  EXPECT_EQ(training.optim_step({}).at("skipped"), 1);
  EXPECT_TRUE(training.model().trained_parameters()[0]->value.equal(before));
  training.model().trained_parameters()[0]->main_grad.fill_(1.0);
  EXPECT_EQ(training.optim_step({.learning_rate = 0.5}).at("skipped"), 0);
  EXPECT_LT((training.model().trained_parameters()[0]->value - before + 0.5).abs().max().item<double>(), 1e-9)
      << "Adam's first step is the learning rate";
}

std::string refusal(const ForwardBackwardRequest& request) {
  try {
    const TinkerLossSettings settings = read_loss_settings(request);
    for (const WireDatum& datum : request.data) check_datum(datum, settings, kTestVocab, 100, "data[0]");
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    return error.what();
  }
  return "accepted";
}

TEST(TinkerLosses, WrongInputsAreRefusedByName) {
  const ForwardBackwardRequest good = random_request("ppo", 1, true);
  EXPECT_EQ(refusal(good), "accepted");
  const auto changed = [&](const auto& change) {
    ForwardBackwardRequest request = good;
    change(request);
    return refusal(request);
  };
  using Request = ForwardBackwardRequest;
  EXPECT_NE(changed([](Request& r) { r.loss_fn = "reinforce"; }).find("cispo"), std::string::npos);
  EXPECT_NE(changed([](Request& r) { r.loss_fn = "stable_reinforce"; }).find("importance_sampling and cispo"),
            std::string::npos);
  EXPECT_NE(changed([](Request& r) { r.config["clip"] = 0.5; }).find("loss_fn_config.clip"),
            std::string::npos);
  EXPECT_NE(changed([](Request& r) { r.config["clip_low_threshold"] = "x"; }).find("finite number"),
            std::string::npos);
  EXPECT_NE(changed([](Request& r) { r.data[0].inputs.erase("advantages"); }).find("advantages is missing"),
            std::string::npos);
  EXPECT_NE(changed([](Request& r) {
              r.data[0].inputs["mask"] = r.data[0].inputs["advantages"];
            }).find("loss_fn_inputs.mask"),
            std::string::npos);
  EXPECT_NE(changed([](Request& r) { r.data[0].inputs["logprobs"].values.pop_back(); }).find("positions"),
            std::string::npos);
  EXPECT_NE(changed([](Request& r) { r.data[0].inputs["logprobs"].values[1] = std::nan(""); }).find("finite"),
            std::string::npos);
  EXPECT_NE(changed([](Request& r) {
              r.data[0].inputs["target_tokens"].values[2] = kTestVocab;
            }).find("whole number from 0 to 39"),
            std::string::npos);
  EXPECT_NE(changed([](Request& r) { r.data[0].tokens[0] = -1; }).find("token id -1"), std::string::npos);
  EXPECT_NE(changed([](Request& r) { r.data[0].tokens.clear(); }).find("no tokens"), std::string::npos);
}

}  // namespace
}  // namespace bough
