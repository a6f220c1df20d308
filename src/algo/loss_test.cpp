#include "algo/loss.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "algo/policy_loss.h"
#include "base/error.h"

namespace bough {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Loss rows as plain numbers. The reference below reads them; tensors() makes LossRows for the tested code.
struct PlainRows {
  std::vector<double> log_pi, entropy, advantage, log_mu, log_old, log_ref, weight;
  bool has_old = true;  // pi_old was computed
  bool old_is_current = false;
};

struct Case {
  std::string name;
  LossSettings settings;
  bool has_old = true;
  bool old_is_current = false;
};

LossSettings settings_of(const std::function<void(LossSettings&)>& change) {
  LossSettings settings;
  change(settings);
  return settings;
}

std::vector<Case> cases() {
  const auto plain_ppo = [](LossSettings& s) { s.use_decoupled_loss = false; };
  std::vector<Case> out;
  out.push_back({"pg", settings_of([](LossSettings& s) { s.loss = "pg"; }), false});
  out.push_back({"pg_kl_entropy", settings_of([](LossSettings& s) {
                   s.loss = "pg", s.kl_loss_coef = 0.3, s.kl_loss_type = "k2", s.entropy_coef = 0.7;
                 }),
                 false});
  out.push_back({"ppo_proximal", settings_of(plain_ppo)});
  out.push_back({"ppo_behaviour",
                 settings_of([](LossSettings& s) { s.use_decoupled_loss = s.recompute_logprob = false; }),
                 false});
  out.push_back({"ppo_current", settings_of(plain_ppo), false, true});
  out.push_back({"ppo_dual_clip_higher", settings_of([](LossSettings& s) {
                   s.use_decoupled_loss = false, s.eps_clip_higher = 0.28, s.c_clip = 1.5;
                 })});
  out.push_back({"ppo_kl_entropy", settings_of([](LossSettings& s) {
                   s.use_decoupled_loss = false, s.kl_loss_coef = 0.2, s.entropy_coef = 0.05;
                 })});
  out.push_back({"decoupled", settings_of([](LossSettings& s) { s.behave_imp_weight_cap = 1.3; })});
  out.push_back({"decoupled_no_cap", settings_of([](LossSettings& s) { s.behave_imp_weight_cap.reset(); })});
  out.push_back({"decoupled_current_kl", settings_of([](LossSettings& s) {
                   s.behave_imp_weight_cap = 1.3, s.kl_loss_coef = 0.4, s.entropy_coef = 0.1;
                 }),
                 false, true});
  out.push_back({"sft", settings_of([](LossSettings& s) { s.loss = "sft"; }), false});
  return out;
}

// Every loss and every correction, for properties that hold for all of them. tests/parity/test_losses.py
// compares values.
std::vector<Case> all_cases() {
  std::vector<Case> out = cases();
  for (const std::string& name : loss_names())
    out.push_back({name, settings_of([&](LossSettings& s) { s.loss = name; })});
  for (const std::string& name : correction_names())
    for (const char* level : {"token", "sequence", "geometric"}) {
      const bool has_level = name == "tis" || name == "masked_is" || name == "rejection";
      if (!has_level && std::string(level) != "token") continue;
      out.push_back({name + " " + level, settings_of([&](LossSettings& s) {
                       s.correction = name, s.correction_level = level;
                       if (name != "auto" && name != "none" && name != "cap" && name != "obrs")
                         s.correction_lower = 0.7;
                     })});
    }
  for (const char* level : {"token", "sequence"})
    for (const char* action : {"mask", "clamp"})
      out.push_back(
          {std::string("rejection_sampling ") + level + " " + action, settings_of([&](LossSettings& s) {
             s.rejection_sampling.level = level, s.rejection_sampling.action = action;
             s.rejection_sampling.upper = 1.2;
           })});
  out.push_back({"masks", settings_of([](LossSettings& s) {
                   s.off_policy_mask_threshold = 0.05, s.m2_threshold = 0.02;
                 })});
  for (const char* mode : {"k1", "k2", "k3", "topk"})
    out.push_back({std::string("teacher ") + mode,
                   settings_of([&](LossSettings& s) { s.teacher.path = "t", s.teacher.loss_mode = mode; })});
  out.push_back(
      {"KL topk", settings_of([](LossSettings& s) { s.kl_loss_coef = 0.2, s.kl_loss_type = "topk"; })});
  out.push_back({"obrs without Z", settings_of([](LossSettings& s) {
                   s.correction = "obrs", s.obrs_normalizer = "none", s.correction_upper = 1.3;
                 })});
  out.push_back({"unbiased", settings_of([](LossSettings& s) {
                   s.kl_loss_coef = 0.2, s.kl_loss_type = "unbiased", s.target_entropy = 0.1;
                 })});
  return out;
}

PlainRows random_rows(int seed, int num_rows, const Case& c) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<double> normal;
  PlainRows rows;
  rows.has_old = c.has_old;
  rows.old_is_current = c.old_is_current;
  for (int r = 0; r < num_rows; ++r) {
    const double log_pi = -std::abs(2.0 * normal(bits)) - 0.1;
    rows.log_pi.push_back(log_pi);
    rows.log_old.push_back(log_pi + 0.3 * normal(bits));
    rows.log_mu.push_back(log_pi + 0.3 * normal(bits));
    rows.log_ref.push_back(log_pi + 0.8 * normal(bits));
    rows.entropy.push_back(std::abs(normal(bits)));
    rows.advantage.push_back(r % 7 == 0 ? 0.0 : normal(bits));
    rows.weight.push_back(0.01 + std::abs(normal(bits)));
  }
  return rows;
}

LossRows tensors(const PlainRows& rows, at::ScalarType dtype = at::kDouble) {
  const auto make = [&](const std::vector<double>& values) {
    return at::tensor(at::ArrayRef<double>(values), at::kDouble).to(dtype);
  };
  LossRows out;
  out.log_probs_R = make(rows.log_pi).requires_grad_(true);
  out.entropies_R = make(rows.entropy).requires_grad_(true);
  out.advantages_R = make(rows.advantage);
  out.behaviour_log_probs_R = make(rows.log_mu);
  if (rows.has_old) out.proximal_log_probs_R = make(rows.log_old);
  out.reference_log_probs_R = make(rows.log_ref);
  out.weights_R = make(rows.weight);
  std::vector<int64_t> sequences;  // three rows each, except the last
  for (size_t r = 0; r < rows.log_pi.size(); ++r) sequences.push_back(static_cast<int64_t>(r / 3));
  out.sequences_R = at::tensor(at::ArrayRef<int64_t>(sequences), at::kLong);
  out.rows_R = at::arange(out.log_probs_R.numel(), at::kLong);
  out.proximal_is_current = rows.old_is_current;
  // Three top-k tokens per loss row: one whose log-probability depends on the argument `own_R`, one with the
  // same probability in all policies, one of probability 0.
  out.teacher_log_probs_R = out.reference_log_probs_R;
  const auto top_k = [&](const at::Tensor& own_R) {
    const at::Tensor own = own_R.detach();
    return at::stack(
        {own.sub(0.7), own.mul(0).nan_to_num(0.0).sub(1.5), own.mul(0).nan_to_num(0.0).sub(kInf)}, 1);
  };
  out.top_k_log_probs_RK = top_k(out.log_probs_R).requires_grad_(true);
  out.behaviour_top_k_RK = top_k(out.behaviour_log_probs_R);
  if (rows.has_old) out.proximal_top_k_RK = top_k(out.proximal_log_probs_R);
  out.reference_top_k_RK = out.teacher_top_k_RK = top_k(out.teacher_log_probs_R);
  return out;
}

LossRows subset(const LossRows& rows, const std::vector<int64_t>& chosen) {
  const at::Tensor index = at::tensor(at::ArrayRef<int64_t>(chosen), at::kLong);
  const auto pick = [&](const at::Tensor& t) { return t.defined() ? t.detach().index_select(0, index) : t; };
  LossRows out = rows.mapped(pick);
  out.log_probs_R = pick(rows.log_probs_R).requires_grad_(true);
  out.entropies_R = pick(rows.entropies_R).requires_grad_(true);
  out.top_k_log_probs_RK = pick(rows.top_k_log_probs_RK).requires_grad_(true);
  return out;
}

// The policy term of one loss row, by cases of the sign of A. The tested code uses minima of two terms.
// `frozen` is log pi wherever the equations stop the gradient.
double reference_policy(const LossSettings& s, const PlainRows& rows, size_t r, double log_pi, double frozen,
                        bool* clipped = nullptr) {
  const double a = rows.advantage[r];
  if (s.loss == "pg") return -a * log_pi;
  const double log_old = rows.old_is_current ? frozen : rows.has_old ? rows.log_old[r] : rows.log_mu[r];
  const double ratio = std::exp(log_pi - log_old);
  const double top = 1.0 + s.eps_clip_higher.value_or(s.eps_clip.value_or(0.2));
  double counted = ratio;
  if (a > 0.0 && ratio > top) counted = top;
  if (a < 0.0 && ratio < 1.0 - s.eps_clip.value_or(0.2)) counted = 1.0 - s.eps_clip.value_or(0.2);
  if (a < 0.0 && s.c_clip && ratio > *s.c_clip) counted = *s.c_clip;
  if (clipped) *clipped = counted != ratio;
  const double w = s.use_decoupled_loss ? std::exp(log_old - rows.log_mu[r]) : 1.0;
  if (s.use_decoupled_loss && s.behave_imp_weight_cap && w > *s.behave_imp_weight_cap) return 0.0;
  return -w * counted * a;
}

double reference_row(const LossSettings& s, const PlainRows& rows, size_t r, double log_pi, double entropy) {
  if (s.loss == "sft") return -rows.weight[r] * log_pi;
  const double d = rows.log_ref[r] - log_pi;
  const double kl = s.kl_loss_type == "k2" ? d * d / 2.0 : std::exp(d) - d - 1.0;
  return rows.weight[r] * (reference_policy(s, rows, r, log_pi, rows.log_pi[r]) + s.kl_loss_coef * kl -
                           s.entropy_coef * entropy);
}

// Central differences are wrong across a kink. Ratios closer to a kink than 1e-3 are moved away.
void avoid_kinks(const LossSettings& s, PlainRows& rows) {
  const double top = 1.0 + s.eps_clip_higher.value_or(s.eps_clip.value_or(0.2));
  for (size_t r = 0; r < rows.log_pi.size(); ++r) {
    const double log_old = rows.has_old ? rows.log_old[r] : rows.log_mu[r];
    const double ratio = std::exp(rows.log_pi[r] - log_old);
    for (const double kink : {top, 1.0 - s.eps_clip.value_or(0.2), s.c_clip.value_or(top)})
      if (std::abs(ratio - kink) < 1e-3) rows.log_pi[r] += 0.01;
  }
}

double grad_at(const at::Tensor& leaf, int64_t r) {
  return leaf.grad().defined() ? leaf.grad().to(at::kDouble).const_data_ptr<double>()[r] : 0.0;
}

std::vector<double> list(const at::Tensor& x) {
  const at::Tensor y = x.detach().to(at::kDouble).contiguous();
  return {y.const_data_ptr<double>(), y.const_data_ptr<double>() + y.numel()};
}

TEST(Loss, ValueAndGradientEqualTheReference) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    PlainRows plain = random_rows(1, 300, c);
    avoid_kinks(c.settings, plain);
    const LossRows rows = tensors(plain);
    const LossOutput out = (*make_loss(c.settings))(rows);
    out.loss.backward();
    double expected = 0.0;
    const double h = 1e-5;
    for (size_t r = 0; r < plain.log_pi.size(); ++r) {
      const auto at_point = [&](double d_log_pi, double d_entropy) {
        return reference_row(c.settings, plain, r, plain.log_pi[r] + d_log_pi, plain.entropy[r] + d_entropy);
      };
      expected += at_point(0, 0);
      EXPECT_NEAR(grad_at(rows.log_probs_R, r), (at_point(h, 0) - at_point(-h, 0)) / (2 * h), 1e-8)
          << "row " << r;
      EXPECT_NEAR(grad_at(rows.entropies_R, r), (at_point(0, h) - at_point(0, -h)) / (2 * h), 1e-8)
          << "row " << r;
    }
    EXPECT_NEAR(out.loss.item<double>(), expected, 1e-11);
  }
}

TEST(Loss, MetricsEqualTheReference) {
  for (const Case& c : cases()) {
    if (c.settings.loss == "sft") continue;
    SCOPED_TRACE(c.name);
    const PlainRows plain = random_rows(2, 200, c);
    const LossOutput out = (*make_loss(c.settings))(tensors(plain));
    double policy = 0, kl = 0, entropy = 0, clipped = 0, approx_kl = 0, diff = 0, w_sum = 0, w_max = 0,
           masked = 0;
    for (size_t r = 0; r < 200; ++r) {
      bool cut = false;
      const double log_pi = plain.log_pi[r];
      policy += plain.weight[r] * reference_policy(c.settings, plain, r, log_pi, log_pi, &cut);
      const double d = plain.log_ref[r] - log_pi;
      kl += plain.weight[r] * (c.settings.kl_loss_type == "k2" ? d * d / 2.0 : std::exp(d) - d - 1.0);
      entropy += plain.weight[r] * plain.entropy[r];
      clipped += cut;
      const double log_old = c.old_is_current ? log_pi : c.has_old ? plain.log_old[r] : plain.log_mu[r];
      approx_kl += std::exp(log_pi - log_old) - 1.0 - (log_pi - log_old);
      const double log_w = (c.has_old ? plain.log_old[r] : log_pi) - plain.log_mu[r];
      diff += std::abs(log_w);
      w_sum += std::exp(log_w);
      w_max = std::max(w_max, std::exp(log_w));
      const auto cap = c.settings.behave_imp_weight_cap;
      masked += cap && std::exp(log_w) > *cap;
    }
    const auto value = [&](const char* name) { return out.metrics.at(name).value(); };
    EXPECT_NEAR(value("loss/policy"), policy, 1e-11);
    EXPECT_NEAR(value("loss/kl"), kl, 1e-11);
    EXPECT_NEAR(value("loss/entropy"), entropy, 1e-11);
    EXPECT_NEAR(value("policy/approx_kl"), approx_kl / 200, 1e-12);
    EXPECT_NEAR(value("mismatch/logprob_abs_diff"), diff / 200, 1e-12);
    EXPECT_NEAR(value("mismatch/importance_weight_mean"), w_sum / 200, 1e-12);
    EXPECT_NEAR(value("mismatch/importance_weight_max"), w_max, 1e-12);
    if (c.settings.loss == "ppo") {
      EXPECT_NEAR(value("policy/clip_fraction"), clipped / 200, 1e-12);
    }
    if (c.settings.loss == "ppo" && c.settings.use_decoupled_loss) {
      EXPECT_NEAR(value("mismatch/masked_fraction"), masked / 200, 1e-12);
    } else {
      EXPECT_EQ(out.metrics.count("mismatch/masked_fraction"), 0u);
    }
  }
}

TEST(Loss, AnySplitOfTheRowsAddsToTheSame) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(c.name);
    const PlainRows plain = random_rows(3, 97, c);
    const std::unique_ptr<Loss> loss = make_loss(c.settings);
    if (!loss->token_separable()) continue;
    const LossRows whole = tensors(plain);
    const LossOutput expected = (*loss)(whole);
    expected.loss.backward();

    std::mt19937_64 bits(4);
    std::vector<std::vector<int64_t>> parts(5);  // the last one stays empty
    for (int64_t r = 0; r < 97; ++r) parts[bits() % 4].push_back(r);
    double total = 0.0;
    WeightedSums metrics;
    for (const std::vector<int64_t>& part : parts) {
      const LossRows rows = subset(whole, part);
      const LossOutput out = (*loss)(rows);
      out.loss.backward();
      total += out.loss.item<double>();
      merge(metrics, out.metrics);
      for (size_t i = 0; i < part.size(); ++i) {
        EXPECT_DOUBLE_EQ(grad_at(rows.log_probs_R, i), grad_at(whole.log_probs_R, part[i]));
        EXPECT_DOUBLE_EQ(grad_at(rows.entropies_R, i), grad_at(whole.entropies_R, part[i]));
      }
    }
    EXPECT_NEAR(total, expected.loss.item<double>(), 1e-12);
    ASSERT_EQ(metrics.size(), expected.metrics.size());
    for (const auto& [name, metric] : expected.metrics)
      EXPECT_NEAR(metrics.at(name).value(), metric.value(), 1e-12);
  }
}

TEST(Loss, IsSeparableOnlyIfNoTermCouplesTokens) {
  for (const auto& [name, separable] : std::vector<std::pair<const char*, bool>>{{"ppo", true},
                                                                                 {"pg", true},
                                                                                 {"cispo", true},
                                                                                 {"sapo", true},
                                                                                 {"dppo_tv", true},
                                                                                 {"gspo", false},
                                                                                 {"gspo_token", false},
                                                                                 {"gmpo", false},
                                                                                 {"clip_cov", false},
                                                                                 {"kl_cov", false}})
    EXPECT_EQ(make_loss(settings_of([&](LossSettings& s) { s.loss = name; }))->token_separable(), separable)
        << name;
  EXPECT_TRUE(make_loss(settings_of([](LossSettings& s) { s.correction = "tis"; }))->token_separable());
  EXPECT_FALSE(make_loss(settings_of([](LossSettings& s) {
                 s.correction = "tis", s.correction_level = "sequence";
               }))->token_separable());
  EXPECT_FALSE(make_loss(settings_of([](LossSettings& s) { s.correction = "rejection"; }))->token_separable())
      << "its veto drops sequences";
  EXPECT_TRUE(make_loss(settings_of([](LossSettings& s) {
                s.correction = "rejection", s.correction_veto = 0;
              }))->token_separable());
  for (const char* normalizer : {"rest", "scaled", "none"})
    EXPECT_EQ(make_loss(settings_of([&](LossSettings& s) {
                s.correction = "obrs", s.obrs_normalizer = normalizer;
              }))->token_separable(),
              std::string(normalizer) == "none");
}

TEST(Loss, ClipCovSamplesItsFractionOfTokensAndRepeatsItForTheSameVersion) {
  LossSettings settings;
  settings.loss = "clip_cov";
  settings.use_decoupled_loss = false;
  settings.clip_cov_lb = 0.1;
  settings.clip_cov_ratio = 0.05;
  const PlainRows plain = random_rows(9, 200, cases()[2]);
  const auto dropped = [&](int64_t version) {
    std::vector<int64_t> rows_dropped;
    LossRows rows = tensors(plain);
    rows.version = version;
    (*make_loss(settings))(rows).loss.backward();
    LossRows ppo = tensors(plain);
    LossSettings plain_settings;
    plain_settings.use_decoupled_loss = false;
    (*make_loss(plain_settings))(ppo).loss.backward();
    const std::vector<double> got = list(rows.log_probs_R.grad()), all = list(ppo.log_probs_R.grad());
    for (size_t r = 0; r < got.size(); ++r) {
      if (got[r] == all[r]) continue;
      EXPECT_EQ(got[r], 0);
      rows_dropped.push_back(static_cast<int64_t>(r));
    }
    return rows_dropped;
  };
  const std::vector<int64_t> first = dropped(1);
  EXPECT_EQ(first.size(), 10u);
  EXPECT_EQ(dropped(1), first) << "the same version samples the same tokens";
  EXPECT_NE(dropped(2), first);
}

TEST(Loss, NoRowsGiveZeroAndFiniteMetrics) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(c.name);
    const LossRows rows = tensors(random_rows(5, 0, c));
    const LossOutput out = (*make_loss(c.settings))(rows);
    EXPECT_EQ(out.loss.item<double>(), 0.0);
    out.loss.backward();
    EXPECT_EQ(rows.log_probs_R.grad().numel(), 0);
    for (const auto& [name, metric] : out.metrics) EXPECT_EQ(metric.value(), 0.0) << name;
  }
}

TEST(Loss, ExtremeRatiosGiveFiniteLossAndGradients) {
  for (const Case& c : all_cases()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      SCOPED_TRACE(c.name);
      PlainRows plain;
      plain.has_old = c.has_old;
      plain.old_is_current = c.old_is_current;
      for (const double advantage : {-1.0, 0.0, 1.0})
        for (const double log_pi : {-200.0, -100.0, 0.0})
          for (const double other : {-kInf, -180.0, -80.0, 0.0}) {
            plain.log_pi.push_back(log_pi);
            plain.advantage.push_back(advantage);
            plain.log_mu.push_back(other);
            plain.log_old.push_back(-80.0 - other / 2);
            plain.log_ref.push_back(other);
            plain.entropy.push_back(0.0);
            plain.weight.push_back(1.0);
          }
      plain.log_old[0] = -kInf;
      const LossRows rows = tensors(plain, dtype);
      const LossOutput out = (*make_loss(c.settings))(rows);
      out.loss.backward();
      EXPECT_TRUE(std::isfinite(out.loss.item<double>()));
      EXPECT_TRUE(rows.log_probs_R.grad().isfinite().all().item<bool>());
      for (const auto& [name, metric] : out.metrics) EXPECT_TRUE(std::isfinite(metric.value())) << name;
    }
  }
}

TEST(Loss, TwoUnderflowedProbabilitiesCountAsEqual) {
  PlainRows plain{.log_pi = {-1.0},
                  .entropy = {0},
                  .advantage = {1},
                  .log_mu = {-kInf},
                  .log_old = {-kInf},
                  .log_ref = {0},
                  .weight = {1}};
  const LossOutput out = (*make_loss({}))(tensors(plain));
  EXPECT_EQ(out.metrics.at("mismatch/importance_weight_mean").value(), 1.0);
  EXPECT_NEAR(out.loss.item<double>(), -1.2, 1e-15);  // weight 1, ratio clipped
}

TEST(Loss, ANaNLogProbIsNotHidden) {
  const Case c = cases()[2];
  PlainRows plain = random_rows(6, 4, c);
  plain.log_pi[2] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isnan((*make_loss(c.settings))(tensors(plain)).loss.item<double>()));
}

TEST(Loss, Fp32IsCloseToFp64) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    const PlainRows plain = random_rows(7, 100, c);
    const double exact = (*make_loss(c.settings))(tensors(plain)).loss.item<double>();
    const LossOutput out = (*make_loss(c.settings))(tensors(plain, at::kFloat));
    EXPECT_EQ(out.loss.scalar_type(), at::kFloat);
    double scale = 0.0;  // sum of the terms' magnitudes, since the terms themselves cancel
    for (size_t r = 0; r < 100; ++r)
      scale += std::abs(reference_row(c.settings, plain, r, plain.log_pi[r], plain.entropy[r]));
    EXPECT_NEAR(out.loss.item<double>(), exact, 1e-6 * scale);
  }
}

TEST(Loss, HandValues) {
  PlainRows plain{.log_pi = {std::log(0.6), std::log(0.6), std::log(0.1), std::log(0.8)},
                  .entropy = {0, 0, 0, 0},
                  .advantage = {2.0, -2.0, -2.0, -1.0},
                  .log_mu = {std::log(0.4), std::log(0.4), std::log(0.4), std::log(0.1)},
                  .log_old = {},
                  .log_ref = {0, 0, 0, 0},
                  .weight = {1, 10, 100, 1000},
                  .has_old = false};
  LossSettings settings;
  settings.use_decoupled_loss = settings.recompute_logprob = false;
  settings.c_clip = 3.0;
  // The ratios are 1.5, 1.5, 0.25, 8. They are clipped to 1.2, not clipped, clipped to 0.8, and bounded to 3
  // by the dual clip.
  EXPECT_NEAR((*make_loss(settings))(tensors(plain)).loss.item<double>(),
              -2.4 + 10 * 3.0 + 100 * 1.6 + 1000 * 3.0, 1e-10);
}

// The first two values are those of AReaL's test_prox_approx.py.
TEST(Loss, InterpolatedLogProbsGoByTheTokensVersion) {
  const auto interpolated = [](double log_mu, double log_pi, int32_t token_version, int64_t version) {
    return list(interpolated_log_probs(at::tensor({log_mu}), at::tensor({log_pi}),
                                       at::tensor({token_version}, at::kInt), version))[0];
  };
  EXPECT_NEAR(interpolated(-1, -1.5, 0, 4), -1.375, 1e-15);
  EXPECT_NEAR(interpolated(-2, -2.2, 2, 4), -2.1, 1e-15);
  EXPECT_EQ(interpolated(-2, -3, 3, 4), -2) << "sampled one version ago: pi_old is mu";
  EXPECT_EQ(interpolated(-2, -3, 4, 4), -2);
  EXPECT_EQ(interpolated(-2, -3, 7, 4), -2) << "newer than the trainer";
  EXPECT_TRUE(std::isfinite(interpolated(-kInf, -1, 0, 4)));
  EXPECT_TRUE(std::isnan(interpolated(-1, std::nan(""), 0, 4))) << "a NaN must reach the optimizer";
}

LossRows rows_with_versions() {
  PlainRows plain{.log_pi = {-1.5, -2.2},
                  .entropy = {0, 0},
                  .advantage = {1, 2},
                  .log_mu = {-1, -2},
                  .log_old = {-1.4, -2.05},
                  .log_ref = {0, 0},
                  .weight = {1, 1}};
  LossRows rows = tensors(plain);
  rows.versions_R = at::tensor(std::vector<int32_t>{0, 2}, at::kInt);
  rows.version = 4;
  return rows;
}

TEST(Loss, LoglinearClipsAgainstTheInterpolatedPolicy) {
  LossSettings settings;
  settings.prox_logp_method = "loglinear";
  const auto loss = make_loss(settings);
  EXPECT_FALSE(loss->needs_proximal());
  EXPECT_TRUE(loss->needs_versions());
  LossRows rows = rows_with_versions();
  const LossOutput out = (*loss)(rows);
  out.loss.backward();
  // w · r · A with w = pi_old/mu and r = pi/pi_old inside the clip is pi/mu · A for any pi_old.
  EXPECT_NEAR(out.loss.item<double>(), -std::exp(-0.5) - 2 * std::exp(-0.2), 1e-15);
  EXPECT_NEAR(list(rows.log_probs_R.grad())[0], -std::exp(-0.5), 1e-15) << "pi_old has no gradient";
  EXPECT_NEAR(out.metrics.at("mismatch/logprob_abs_diff").value(), (0.375 + 0.1) / 2, 1e-15);
  rows.versions_R.reset();
  EXPECT_THROW((*loss)(rows), InternalError);
}

TEST(Loss, MetricsSayHowFarTheInterpolationIsOff) {
  LossSettings settings;
  settings.prox_logp_method = "metrics";
  const auto loss = make_loss(settings);
  EXPECT_TRUE(loss->needs_proximal());
  const LossOutput out = (*loss)(rows_with_versions());
  settings.prox_logp_method = "recompute";
  EXPECT_EQ(out.loss.item<double>(), (*make_loss(settings))(rows_with_versions()).loss.item<double>());
  const auto value = [&](const char* name) { return out.metrics.at(name).value(); };
  EXPECT_NEAR(value("prox_approx/abs_error"), (0.025 + 0.05) / 2, 1e-15);
  EXPECT_NEAR(value("prox_approx/abs_error_max"), 0.05, 1e-15);
  EXPECT_NEAR(value("prox_approx/squared_error"), (0.025 * 0.025 + 0.05 * 0.05) / 2, 1e-15);
  EXPECT_NEAR(value("prox_approx/importance_weight_abs_error"),
              (std::exp(-0.375) - std::exp(-0.4) + std::exp(-0.05) - std::exp(-0.1)) / 2, 1e-15);
}

TEST(Loss, RowsThatDoNotFitAreRefused) {
  const Case c = cases()[2];
  const std::unique_ptr<Loss> loss = make_loss(c.settings);
  const auto refused = [&](const std::function<void(LossRows&)>& change) {
    LossRows rows = tensors(random_rows(8, 5, c));
    change(rows);
    EXPECT_THROW((*loss)(rows), InternalError);
  };
  EXPECT_NO_THROW((*loss)(tensors(random_rows(8, 5, c))));
  refused([](LossRows& rows) { rows.weights_R.reset(); });
  refused([](LossRows& rows) { rows.proximal_log_probs_R.reset(); });
  refused([](LossRows& rows) { rows.advantages_R = rows.advantages_R.slice(0, 1); });
  refused([](LossRows& rows) { rows.behaviour_log_probs_R = rows.behaviour_log_probs_R.to(at::kFloat); });
  refused([](LossRows& rows) { rows.versions_R = at::arange(5, at::kLong); });
}

// Padding of the engine's list has probability 0 under mu, but any token's under pi_old.
TEST(Loss, ObrsIgnoresThePaddingOfTheEnginesList) {
  const Case c{"obrs", settings_of([](LossSettings& s) { s.correction = "obrs"; })};
  const LossRows padded = tensors(random_rows(3, 60, c));
  LossRows without = padded, other = padded;
  for (LossRows* rows : {&without, &other}) rows->log_probs_R = padded.log_probs_R.detach();
  without.behaviour_top_k_RK = padded.behaviour_top_k_RK.narrow(1, 0, 2);
  without.proximal_top_k_RK = padded.proximal_top_k_RK.narrow(1, 0, 2);
  without.top_k_log_probs_RK = padded.top_k_log_probs_RK.detach().narrow(1, 0, 2);
  other.proximal_top_k_RK = padded.proximal_top_k_RK.clone();
  other.proximal_top_k_RK.select(1, 2).fill_(-1.0);
  const auto loss = make_loss(c.settings);
  const LossOutput expected = (*loss)(without), got = (*loss)(other);
  EXPECT_EQ(got.loss.item<double>(), expected.loss.item<double>());
  EXPECT_EQ(got.metrics.at("mismatch/obrs_z").value(), expected.metrics.at("mismatch/obrs_z").value());
}

}  // namespace
}  // namespace bough
