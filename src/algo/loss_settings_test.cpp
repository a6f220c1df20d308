#include "algo/loss_settings.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "algo/loss.h"
#include "base/error.h"

namespace bough {
namespace {

TEST(LossSettings, LossReportsTheInputsThatItNeeds) {
  LossSettings settings;
  EXPECT_TRUE(make_loss(settings)->needs_proximal());
  EXPECT_TRUE(make_loss(settings)->needs_behaviour());
  EXPECT_FALSE(make_loss(settings)->needs_reference());
  EXPECT_FALSE(make_loss(settings)->needs_entropy());
  settings.use_decoupled_loss = false;
  EXPECT_FALSE(make_loss(settings)->needs_behaviour());
  settings.recompute_logprob = false;
  settings.entropy_coef = settings.kl_loss_coef = 0.1;
  EXPECT_FALSE(make_loss(settings)->needs_proximal());
  EXPECT_TRUE(make_loss(settings)->needs_behaviour());
  EXPECT_TRUE(make_loss(settings)->needs_reference());
  EXPECT_TRUE(make_loss(settings)->needs_entropy());
}

LossSettings loss_settings(const std::function<void(LossSettings&)>& change) {
  LossSettings settings;
  change(settings);
  return settings;
}

std::string error_of(const LossSettings& settings) {
  try {
    make_loss(settings);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(LossSettings, BadSettingsAreNamed) {
  const auto message = [](const std::function<void(LossSettings&)>& change) {
    return error_of(loss_settings(change));
  };
  EXPECT_NE(message([](LossSettings& s) { s.loss = "pppo"; }).find("did you mean 'ppo'"), std::string::npos);
  EXPECT_NE(message([](LossSettings& s) { s.loss = ""; }).find("expected one of ppo, pg, gspo"),
            std::string::npos);
  EXPECT_NE(message([](LossSettings& s) { s.eps_clip = 1.5; }).find("eps_clip"), std::string::npos);
  EXPECT_NE(message([](LossSettings& s) { s.c_clip = 0.5; }).find("c_clip"), std::string::npos);
  EXPECT_NE(message([](LossSettings& s) { s.entropy_coef = std::nan(""); }).find("entropy_coef"),
            std::string::npos);
  EXPECT_NE(message([](LossSettings& s) { s.kl_loss_type = "k1"; }).find("kl_loss_type"), std::string::npos);
  EXPECT_EQ(message([](LossSettings& s) { s.loss = "grpo"; }), "");
  EXPECT_NE(message([](LossSettings& s) { s.loss = "gspo", s.c_clip = 3; }).find("no dual clip"),
            std::string::npos);
  EXPECT_NE(message([](LossSettings& s) { s.correction = "tiss"; }).find("masked_is"), std::string::npos);
  EXPECT_NE(message([](LossSettings& s) { s.loss = "dppo_kl", s.correction = "tis"; }).find("by itself"),
            std::string::npos);
  EXPECT_NE(message([](LossSettings& s) {
              s.loss = "dppo_kl", s.off_policy_mask_threshold = 1;
            }).find("off_policy_mask_threshold"),
            std::string::npos);
  EXPECT_NE(message([](LossSettings& s) {
              s.correction = "tis", s.use_decoupled_loss = s.recompute_logprob = false;
            }).find("nothing to correct"),
            std::string::npos);
  EXPECT_NE(message([](LossSettings& s) {
              s.correction = "tis", s.rejection_sampling.upper = 2;
            }).find("two corrections"),
            std::string::npos);
  EXPECT_NE(message([](LossSettings& s) {
              s.correction = "icepop", s.correction_level = "sequence";
            }).find("by token"),
            std::string::npos);
  EXPECT_NE(message([](LossSettings& s) { s.correction_upper = 2; }).find("no such bound"),
            std::string::npos);
  EXPECT_NE(message([](LossSettings& s) {
              s.correction = "icepop", s.correction_upper = 0.4;
            }).find("from 0.5 to 0.4"),
            std::string::npos);
  EXPECT_NE(message([](LossSettings& s) { s.rejection_sampling.upper = 0.5; }).find("above 1"),
            std::string::npos);
  EXPECT_EQ(message([](LossSettings& s) { s.loss = "pg", s.correction = "tis"; }), "");
  EXPECT_NE(message([](LossSettings& s) {
              s.loss = "pg", s.prox_logp_method = "loglinear";
            }).find("does not use pi_old"),
            std::string::npos);
  EXPECT_EQ(
      message([](LossSettings& s) { s.loss = "pg", s.correction = "tis", s.prox_logp_method = "loglinear"; }),
      "");
  EXPECT_NE(message([](LossSettings& s) { s.prox_logp_method = "linear"; }).find("loglinear"),
            std::string::npos);
  EXPECT_NE(message([](LossSettings& s) {
              s.prox_logp_method = "loglinear", s.use_decoupled_loss = false;
            }).find("use_decoupled_loss"),
            std::string::npos);
}

TEST(LossSettings, SettingsAreReadByTheirKeys) {
  const LossSettings settings = parse_settings<LossSettings>(
      "{loss: grpo, eps_clip_higher: 0.28, behave_imp_weight_cap: null, use_decoupled_loss: false}", "test");
  EXPECT_EQ(settings.loss, "ppo");
  EXPECT_EQ(settings.eps_clip_higher, 0.28);
  EXPECT_FALSE(settings.behave_imp_weight_cap.has_value());
  EXPECT_FALSE(settings.use_decoupled_loss);
  EXPECT_THROW(parse_settings<LossSettings>("eps_clip: 1.5", "test"), UserError);
}

}  // namespace
}  // namespace bough
