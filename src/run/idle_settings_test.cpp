#include "run/idle_settings.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "base/file.h"
#include "run/run_folder.h"

namespace bough {
namespace {

const std::string kNeeded = "model: {path: m}\ntrain_dataset: {path: t}\n";

// Key -> reason of the settings that have no effect in a run with these settings.
std::map<std::string, std::string> idle_in(const std::string& yaml,
                                           const std::vector<std::string>& overrides = {}) {
  const auto file = std::filesystem::path(::testing::TempDir()) / str("idle_", ::getpid(), ".yaml");
  write_file_atomically(file, kNeeded + yaml);
  std::map<std::string, std::string> out;
  for (const IdleSetting& idle : idle_settings(load_settings<RunSettings>(file, overrides),
                                               given_settings<RunSettings>(file, overrides)))
    out[idle.key] = idle.reason;
  std::filesystem::remove(file);
  return out;
}

std::set<std::string> keys_in(const std::string& yaml) {
  std::set<std::string> keys;
  for (const auto& [key, reason] : idle_in(yaml)) keys.insert(key);
  return keys;
}

// A run without environment resumes after the default of environment.tool_call_parser has changed.
TEST(IdleSettings, ARunResumesWithOtherSettingsThatHaveNoEffect) {
  const auto settings = [](const std::string& yaml) {
    return parse_settings<RunSettings>(kNeeded + yaml, "run.yaml");
  };
  const auto differences = check_resumed_settings(settings("environment: {tool_call_parser: hermes}"),
                                                  settings(""), "config.yaml");
  ASSERT_EQ(differences.size(), 1);
  EXPECT_EQ(differences[0].key, "environment.tool_call_parser");
  const RunSettings conversations = settings("environment: {type: python, path: e.py}");
  EXPECT_THROW(
      check_resumed_settings(settings("environment: {type: python, path: e.py, tool_call_parser: hermes}"),
                             conversations, "config.yaml"),
      UserError);
  EXPECT_THROW(check_resumed_settings(settings(""), conversations, "config.yaml"), UserError);
}

// A run that was started when `hermes` was the default resumes if `auto` selects it.
TEST(IdleSettings, ARunResumesIfAutoSelectsItsFormatOfToolCalls) {
  const std::filesystem::path model =
      std::filesystem::path(::testing::TempDir()) / str("bough_auto_format_", ::getpid());
  std::filesystem::create_directories(model);
  write_file_atomically(model / "chat_template.jinja", R"(<tool_call>{"name": })");
  const auto settings = [&](const char* parser) {
    return parse_settings<RunSettings>(
        str("model: {path: ", model.string(), "}\ntrain_dataset: {path: t.jsonl}\nreward: r.py:f\n",
            "environment: {type: python, path: e.py, tool_call_parser: ", parser, "}"),
        "run.yaml");
  };
  for (const auto& [saved, now] : {std::pair("hermes", "auto"), std::pair("auto", "hermes")}) {
    const auto differences = check_resumed_settings(settings(saved), settings(now), "config.yaml");
    ASSERT_EQ(differences.size(), 1);
    EXPECT_EQ(differences[0].key, "environment.tool_call_parser");
  }
  for (const char* saved : {"qwen3_coder", "''"})
    EXPECT_THROW(check_resumed_settings(settings(saved), settings("auto"), "config.yaml"), UserError)
        << saved;
  std::filesystem::remove_all(model);
}

TEST(IdleSettings, ARunResumesIfItsEndpointsMoved) {
  const auto settings = [](const std::string& reward, const std::string& environment) {
    return parse_settings<RunSettings>(str("model: {path: m}\ntrain_dataset: {path: t.jsonl}\nreward: ",
                                           reward, "\nenvironment: {type: http, url: ", environment, "}"),
                                       "run.yaml");
  };
  const RunSettings saved = settings("http://127.0.0.1:3000/reward", "http://127.0.0.1:3000/environment");
  EXPECT_EQ(check_resumed_settings(saved, settings("http://host:4/reward", "http://host:4/environment"),
                                   "config.yaml")
                .size(),
            2);
  for (const char* other : {"http://127.0.0.1:3000/other", "my_reward.py:score"})
    EXPECT_THROW(
        check_resumed_settings(saved, settings(other, "http://127.0.0.1:3000/environment"), "config.yaml"),
        UserError)
        << other;
}

TEST(IdleSettings, SettingsThatAnotherOneSwitchesOffAreNamed) {
  using Keys = std::set<std::string>;
  EXPECT_EQ(keys_in(""), Keys{});
  EXPECT_EQ(keys_in("rollout: {threads: 2, interruptible: false, max_age: 2}\nactor: {threads: 3}"),
            (Keys{"actor.threads", "rollout.threads", "rollout.interruptible", "rollout.max_age"}));
  EXPECT_EQ(keys_in("rollout: {threads: 2, interruptible: false, max_head_offpolicyness: 1}"), Keys{});
  EXPECT_EQ(keys_in("critic: {loss_coef: 2, optimizer: {lr: 0.1}}\nactor: {gae_lambda: 0.9, discount: 0.9}"),
            (Keys{"critic.loss_coef", "critic.optimizer.lr", "actor.gae_lambda", "actor.discount"}));
  EXPECT_EQ(keys_in("critic: {loss_coef: 2}\nactor: {gae_lambda: 0.9, adv_estimator: gae}"), Keys{});
  EXPECT_EQ(keys_in("rollout: {sparse: {summary: minmax}}\nsparse_training: {lr_ratio: 2, lora: {rank: 4}}"),
            (Keys{"rollout.sparse.summary", "sparse_training.lr_ratio", "sparse_training.lora.rank"}));
  EXPECT_EQ(keys_in("rollout: {sparse: {summary: minmax, budget: 128}}"), Keys{});
  EXPECT_EQ(keys_in("rollout: {sparse: {budget: 128}}\nsparse_training: {mode: distill, lr_ratio: 2}"),
            Keys{});
  EXPECT_EQ(keys_in("actor: {loss: cispo, sapo_tau_pos: 2, dppo_threshold: 0.1, kl_cov_ratio: 0.1}"),
            (Keys{"actor.sapo_tau_pos", "actor.dppo_threshold", "actor.kl_cov_ratio"}));
  EXPECT_EQ(keys_in("actor: {eps_clip: 0.1}"), Keys{"actor.eps_clip"});
  EXPECT_EQ(keys_in("actor: {eps_clip: 0.1, ppo_n_minibatches: 2}"), Keys{});
  EXPECT_EQ(keys_in("actor: {eps_clip: 0.1, prox_logp_method: loglinear}"), Keys{});
  EXPECT_EQ(keys_in("actor: {correction: tis, correction_lower: 0.1, behave_imp_weight_cap: 3}"),
            (Keys{"actor.correction_lower", "actor.behave_imp_weight_cap"}));
  EXPECT_EQ(keys_in("actor: {kl_loss_type: k2}"), Keys{"actor.kl_loss_type"});
  EXPECT_EQ(keys_in("actor: {kl_loss_type: k2, kl_ctl: 0.1}"), Keys{});
  EXPECT_EQ(keys_in("actor: {kl_loss_type: topk, kl_ctl: 0.1}"), Keys{"actor.kl_loss_type"});
  EXPECT_EQ(keys_in("gconfig: {top_logprobs: 5}\nactor: {kl_loss_type: topk, kl_loss_coef: 0.1}"), Keys{});
  EXPECT_EQ(keys_in("evaluator: {n_samples: 1}\nvalid_dataset: {shuffle: true}"),
            (Keys{"evaluator.n_samples", "valid_dataset.shuffle"}));
  const std::string sparse = "valid_dataset: {path: v}\nevaluator: {sparse: false}\n";
  EXPECT_EQ(keys_in(sparse), Keys{"evaluator.sparse"});
  EXPECT_EQ(keys_in(sparse + "rollout: {sparse: {budget: 128}}"), Keys{});
  EXPECT_EQ(keys_in("environment: {max_turns: 3}\nserve: {host: localhost}"),
            (Keys{"environment.max_turns", "serve.host"}));
  EXPECT_EQ(keys_in("environment: {type: ''}\nvalid_dataset: {path: ''}"), Keys{});
}

TEST(IdleSettings, TheMessageHasPlaceAndReason) {
  const auto file = std::filesystem::path(::testing::TempDir()) / str("idle_text_", ::getpid(), ".yaml");
  write_file_atomically(file, kNeeded + "rollout:\n  interruptible: false\n");
  const std::vector<std::string> overrides = {"lora.lora_alpha=8", "actor.threads=2"};
  const std::string text = describe(idle_settings(load_settings<RunSettings>(file, overrides),
                                                  given_settings<RunSettings>(file, overrides)));
  EXPECT_EQ(text,
            str("these settings have no effect:\n  actor.threads (command line), "
                "rollout.interruptible (",
                file.string(), ":4): needs rollout.max_head_offpolicyness above 0, ",
                "rollout.fixed_staleness false\n", "  lora.alpha (command line): needs lora.rank above 0"));
  EXPECT_EQ(describe({}), "");
}

TEST(IdleSettings, OfSftAndOfEnginesWithoutARun) {
  const std::vector<GivenSetting> of_sft = {{"epochs", "f:1"},
                                            {"lora.alpha", "f:2"},
                                            {"optimizer.lr", "f:3"},
                                            {"optimizer.min_lr_ratio", "f:4"},
                                            {"train_dataset.layout.answer_prefix", "f:5"}};
  SftSettings sft;
  EXPECT_EQ(describe(idle_settings(sft, of_sft)),
            "these settings have no effect:\n  lora.alpha (f:2): needs lora.rank above 0");
  sft.max_steps = 3;
  sft.lora.rank = 4;
  sft.optimizer.lr_scheduler_type = "constant";
  EXPECT_EQ(describe(idle_settings(sft, of_sft)),
            "these settings have no effect:\n  epochs (f:1): needs max_steps 0\n"
            "  optimizer.min_lr_ratio (f:4): needs optimizer.lr_scheduler_type linear or cosine");

  const std::vector<GivenSetting> of_engine = {{"gconfig.top_k", "f:1"},
                                               {"rollout.kv_memory", "f:2"},
                                               {"rollout.sparse.summary", "f:3"},
                                               {"rollout.threads", "f:4"}};
  RolloutSettings rollout;
  EXPECT_EQ(describe(idle_engine_settings(rollout, of_engine)),
            "these settings have no effect:\n  rollout.sparse.summary (f:3): needs rollout.sparse.budget\n"
            "  rollout.threads (f:4): only `bough train` reads it");
  rollout.sparse.budget = {"512"};
  EXPECT_EQ(idle_engine_settings(rollout, of_engine).size(), 1u);
}

void collect_leaves(const SettingField& group, const std::string& prefix, std::set<std::string>& out) {
  for (const SettingField& field : group.fields) {
    const std::string key = internal::join_key(prefix, field.key);
    if (field.is_group()) collect_leaves(field, key, out);
    else out.insert(key);
  }
}

// Every setting either has a row in the table, or always has an effect and stands here. A new setting fails
// the test until it is put into one of the two lists.
TEST(IdleSettings, EverySettingIsInTheTableOrAlwaysHasAnEffect) {
  const std::set<std::string> always = {"actor.adv_estimator",
                                        "actor.correction",
                                        "actor.deterministic",
                                        "actor.dynamic_sampling",
                                        "actor.enable_tree_training",
                                        "actor.entropy_coef",
                                        "actor.gradient_checkpointing",
                                        "actor.kl_ctl",
                                        "actor.kl_loss_coef",
                                        "actor.loss",
                                        "actor.loss_aggregation",
                                        "actor.m2_threshold",
                                        "actor.max_num_gen_batches",
                                        "actor.mb_spec.allocation",
                                        "actor.mb_spec.max_tokens_per_mb",
                                        "actor.mb_spec.memory",
                                        "actor.mb_spec.n_mbs",
                                        "actor.off_policy_mask_threshold",
                                        "actor.optimizer.beta1",
                                        "actor.optimizer.beta2",
                                        "actor.optimizer.eps",
                                        "actor.optimizer.gradient_clipping",
                                        "actor.optimizer.lr",
                                        "actor.optimizer.lr_scheduler_type",
                                        "actor.optimizer.warmup_steps_proportion",
                                        "actor.optimizer.weight_decay",
                                        "actor.overlong_reward_penalty",
                                        "actor.ppo_epochs",
                                        "actor.ppo_n_minibatches",
                                        "actor.ref_model_sync_steps",
                                        "actor.reward_bias",
                                        "actor.reward_clip",
                                        "actor.reward_scaling",
                                        "actor.router_aux_loss_coef",
                                        "actor.router_z_loss_coef",
                                        "actor.target_entropy",
                                        "actor.tree_training_mode",
                                        "actor.truncated_samples",
                                        "actor.use_decoupled_loss",
                                        "allocation_mode",
                                        "calibration",
                                        "compare_dense",
                                        "device",
                                        "dtype",
                                        "experiment_name",
                                        "fileroot",
                                        "filter",
                                        "gconfig.frequency_penalty",
                                        "gconfig.greedy",
                                        "gconfig.ignore_eos",
                                        "gconfig.max_new_tokens",
                                        "gconfig.min_new_tokens",
                                        "gconfig.min_p",
                                        "gconfig.n_samples",
                                        "gconfig.presence_penalty",
                                        "gconfig.repetition_penalty",
                                        "gconfig.stop",
                                        "gconfig.stop_token_ids",
                                        "gconfig.temperature",
                                        "gconfig.top_k",
                                        "gconfig.top_p",
                                        "lora.path",
                                        "model.head_dtype",
                                        "model.path",
                                        "model.router_dtype",
                                        "report.port",
                                        "reward",
                                        "reward_service.failure_reward",
                                        "reward_service.max_consecutive_failures",
                                        "reward_service.workers",
                                        "rollout.batch_invariant",
                                        "rollout.return_routed_experts",
                                        "rollout.max_buffered_groups",
                                        "rollout.max_concurrent_rollouts",
                                        "rollout.max_head_offpolicyness",
                                        "rollout.min_group",
                                        "rollout.quantization",
                                        "rollout.ranks",
                                        "rollout.sparse.budget",
                                        "rollout.weight_sync_steps",
                                        "saver.freq_minutes",
                                        "saver.freq_steps",
                                        "saver.keep",
                                        "saver.max_rollouts",
                                        "saver.rollouts",
                                        "seed",
                                        "stall_seconds",
                                        "threads",
                                        "total_train_steps",
                                        "train_dataset.batch_size",
                                        "train_dataset.path",
                                        "trial_name"};
  RunSettings settings;
  std::set<std::string> all, uncovered;
  collect_leaves(describe_settings(settings), "", all);
  for (const std::string& key : all)
    if (!may_be_idle(key)) uncovered.insert(key);
  std::vector<std::string> missing, surplus;
  std::ranges::set_difference(uncovered, always, std::back_inserter(missing));
  std::ranges::set_difference(always, uncovered, std::back_inserter(surplus));
  for (const std::string& key : missing) ADD_FAILURE() << key << " is in neither list";
  for (const std::string& key : surplus) ADD_FAILURE() << key << " is in both lists, or no setting";
}

}  // namespace
}  // namespace bough
