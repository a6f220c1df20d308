#include "run/idle_settings.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <map>
#include <string_view>

namespace bough {

namespace {

using Settings = const RunSettings&;

// If is_idle() is true, the settings of `keys` have no effect. A key may be that of a group.
struct IdleRow {
  std::vector<std::string_view> keys;
  const char* needs;  // what gives the settings an effect
  bool (*is_idle)(Settings s);
};

bool is_synchronous(Settings s) {
  return s.rollout.max_head_offpolicyness == 0;
}
bool takes_turns(Settings s) {
  return !s.rollout.is_asynchronous();
}
bool has_loss(Settings s, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), s.actor.loss.loss) != names.end();
}
bool has_correction(Settings s, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), s.actor.loss.correction) != names.end();
}
bool has_estimator(Settings s, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), s.actor.advantages.adv_estimator) != names.end();
}
// The ratio of the policy loss is exactly 1: pi_old is the policy that the only optimizer step changes.
bool has_ratio_one(Settings s) {
  const LossSettings& loss = s.actor.loss;
  const bool old_is_trained =
      loss.use_decoupled_loss ? loss.prox_logp_method != "loglinear" : loss.recompute_logprob;
  return s.actor.updates_per_batch() == 1 && old_is_trained && !has_loss(s, {"dppo_tv", "dppo_kl"});
}
bool uses_cap(Settings s) {
  const LossSettings& loss = s.actor.loss;
  if (loss.correction == "cap") return true;
  return loss.correction == "auto" && !loss.rejection_sampling.says_anything() && loss.use_decoupled_loss &&
         !has_loss(s, {"pg", "dppo_tv", "dppo_kl"});
}
bool has_verifier(Settings s, std::string_view name) {
  if (s.reward.empty()) return name == "number";
  return std::any_of(s.reward.begin(), s.reward.end(),
                     [&](const RewardEntry& entry) { return entry.verifier == name; });
}
bool has_reward_workers(Settings s) {
  return std::any_of(s.reward.begin(), s.reward.end(),
                     [](const RewardEntry& entry) { return entry.verifier.empty(); });
}
bool is_scored_by_reward(Settings s) {
  const bool has_reward = !s.reward.empty();
  return s.environment.is_scored_by_reward(has_reward) &&
         (!s.serve.port || has_reward || !s.valid_dataset.path.empty());
}
bool has_environment_workers(Settings s) {
  const std::string& type = s.environment.type;
  return type == "python" || type == "command" || type == "http" || type == "mcp";
}

const std::vector<IdleRow>& table() {
  static const std::vector<IdleRow> rows = {
      // Asynchrony.
      {{"rollout.fixed_staleness", "rollout.max_age", "rollout.max_age_action"},
       "rollout.max_head_offpolicyness above 0",
       is_synchronous},
      {{"actor.threads", "rollout.interruptible"},
       "rollout.max_head_offpolicyness above 0, rollout.fixed_staleness false",
       takes_turns},
      {{"rollout.threads"},
       "rollout.max_head_offpolicyness (without rollout.fixed_staleness) or rollout.ranks above 0",
       [](Settings s) { return takes_turns(s) && s.rollout.ranks == 0; }},
      {{"rollout.max_age_action"},
       "rollout.max_age above 0",
       [](Settings s) { return s.rollout.max_age == 0; }},
      // Generation.
      {{"rollout.servers"},
       "rollout.backend vllm or sglang",
       [](Settings s) { return !s.rollout.has_servers(); }},
      {{"rollout.prefill_chunk_tokens", "rollout.admission", "rollout.kv_memory"},
       "rollout.backend embedded",
       [](Settings s) { return s.rollout.has_servers(); }},
      {{"rollout.backend"},
       "an allocation_mode without servers, or none",
       [](Settings s) { return s.allocation_mode.find('+') != std::string::npos; }},
      {{"actor.backend"}, "no allocation_mode", [](Settings s) { return !s.allocation_mode.empty(); }},
      {{"gconfig.top_logprobs"}, "no serve.port", [](Settings s) { return s.serve.port.has_value(); }},
      // Sparse attention.
      {{"rollout.sparse.summary", "rollout.sparse.block", "rollout.sparse.sink_tokens",
        "rollout.sparse.recent_tokens", "rollout.sparse.dense_layers", "rollout.sparse.replay"},
       "rollout.sparse.budget",
       [](Settings s) { return !s.rollout.sparse.is_sparse(); }},
      {{"rollout.sparse.block", "rollout.sparse.sink_tokens", "rollout.sparse.recent_tokens"},
       "rollout.sparse.summary mean or minmax: exact chooses single keys",
       [](Settings s) { return s.rollout.sparse.summary == "exact"; }},
      {{"sparse_training.mode"},
       "rollout.sparse.budget, or the mode draft",
       [](Settings s) { return !s.rollout.sparse.is_sparse() && !s.sparse_training.is_draft(); }},
      {{"sparse_training.kl_loss_coef", "sparse_training.kl_loss_type", "sparse_training.lr_ratio"},
       "sparse_training.mode distill or draft",
       [](Settings s) { return !s.sparse_training.has_sparse_policy(); }},
      {{"sparse_training.kl_loss_type"},
       "sparse_training.kl_loss_coef above 0",
       [](Settings s) { return s.sparse_training.kl_loss_coef == 0; }},
      {{"sparse_training.draft_path"},
       "sparse_training.mode draft",
       [](Settings s) { return !s.sparse_training.is_draft(); }},
      {{"sparse_training.lora"},
       "sparse_training.mode distill",
       [](Settings s) { return !s.sparse_training.distills(); }},
      // Mixtures of experts.
      {{"actor.routing_differences"},
       "actor.routing_replay R3",
       [](Settings s) { return !s.actor.replays_rollout_experts(); }},
      {{"actor.routing_replay"},
       "several optimizer steps a batch (actor.ppo_n_minibatches, actor.ppo_epochs) with R2, which has "
       "nothing "
       "to replay before the second one",
       [](Settings s) { return s.actor.routing_replay == "R2" && s.actor.updates_per_batch() == 1; }},
      // Losses.
      {{"actor.eps_clip", "actor.eps_clip_higher"},
       "actor.loss ppo, gspo, gspo_token, cispo, gmpo or clip_cov",
       [](Settings s) {
         return !has_loss(s, {"ppo", "gspo", "gspo_token", "cispo", "gmpo", "clip_cov"});
       }},
      {{"actor.c_clip"}, "actor.loss ppo", [](Settings s) { return !has_loss(s, {"ppo"}); }},
      {{"actor.sapo_tau_pos", "actor.sapo_tau_neg"},
       "actor.loss sapo",
       [](Settings s) { return !has_loss(s, {"sapo"}); }},
      {{"actor.eps_clip", "actor.eps_clip_higher", "actor.c_clip", "actor.sapo_tau_pos",
        "actor.sapo_tau_neg"},
       "several optimizer steps a batch (actor.ppo_n_minibatches, actor.ppo_epochs), or a pi_old other than "
       "the trained policy: otherwise the ratio is 1, and no clip changes a gradient",
       has_ratio_one},
      {{"actor.dppo_threshold"},
       "actor.loss dppo_tv or dppo_kl",
       [](Settings s) {
         return !has_loss(s, {"dppo_tv", "dppo_kl"});
       }},
      {{"actor.clip_cov_ratio", "actor.clip_cov_lb", "actor.clip_cov_ub"},
       "actor.loss clip_cov",
       [](Settings s) { return !has_loss(s, {"clip_cov"}); }},
      {{"actor.kl_cov_ratio", "actor.ppo_kl_coef"},
       "actor.loss kl_cov",
       [](Settings s) { return !has_loss(s, {"kl_cov"}); }},
      {{"actor.recompute_logprob"},
       "actor.use_decoupled_loss false",
       [](Settings s) { return s.actor.loss.use_decoupled_loss; }},
      {{"actor.prox_logp_method"},
       "actor.use_decoupled_loss true",
       [](Settings s) { return !s.actor.loss.use_decoupled_loss; }},
      {{"actor.entropy_coef_delta"},
       "actor.target_entropy",
       [](Settings s) { return !s.actor.loss.target_entropy; }},
      {{"actor.loss_constant_length"},
       "actor.loss_aggregation constant_length",
       [](Settings s) { return s.actor.aggregation.loss_aggregation != "constant_length"; }},
      // Corrections.
      {{"actor.correction_level"},
       "actor.correction tis, masked_is or rejection",
       [](Settings s) {
         return !has_correction(s, {"tis", "masked_is", "rejection"});
       }},
      {{"actor.correction_lower"},
       "actor.correction icepop, masked_is or rejection",
       [](Settings s) {
         return !has_correction(s, {"icepop", "masked_is", "rejection"});
       }},
      {{"actor.correction_upper"},
       "actor.correction tis, icepop, masked_is, rejection or obrs",
       [](Settings s) {
         return !has_correction(s, {"tis", "icepop", "masked_is", "rejection", "obrs"});
       }},
      {{"actor.correction_veto"},
       "actor.correction masked_is or rejection",
       [](Settings s) {
         return !has_correction(s, {"masked_is", "rejection"});
       }},
      {{"actor.behave_imp_weight_cap"},
       "the correction cap, which the decoupled loss has without another correction",
       [](Settings s) { return !uses_cap(s); }},
      {{"actor.rejection_sampling"},
       "a value other than the defaults, which together mean the correction cap",
       [](Settings s) { return !s.actor.loss.rejection_sampling.says_anything(); }},
      {{"actor.rejection_sampling.agg"},
       "actor.rejection_sampling.level sequence",
       [](Settings s) { return s.actor.loss.rejection_sampling.level != "sequence"; }},
      {{"actor.obrs_lambda", "actor.obrs_normalizer"},
       "actor.correction obrs",
       [](Settings s) { return !has_correction(s, {"obrs"}); }},
      // The reference and the teacher.
      {{"ref"},
       "actor.kl_loss_coef or actor.kl_ctl above 0",
       [](Settings s) { return !s.actor.loss.uses_reference(); }},
      {{"actor.kl_loss_type"},
       "actor.kl_loss_coef above 0, or actor.kl_ctl above 0 for the metric of a type other than topk",
       [](Settings s) {
         const LossSettings& loss = s.actor.loss;
         return loss.kl_loss_type == "topk" ? loss.kl_loss_coef == 0.0 : !loss.uses_reference();
       }},
      {{"actor.kl_estimator", "actor.kl_ctrl"},
       "actor.kl_ctl above 0",
       [](Settings s) { return s.actor.loss.kl_ctl == 0; }},
      {{"actor.kl_ctrl.target_kl", "actor.kl_ctrl.horizon"},
       "actor.kl_ctrl.type adaptive",
       [](Settings s) { return s.actor.loss.kl_ctrl.type != "adaptive"; }},
      {{"actor.ref_model_mixup_alpha"},
       "actor.ref_model_sync_steps above 0",
       [](Settings s) { return s.actor.loss.ref_model_sync_steps == 0; }},
      {{"actor.teacher"}, "actor.teacher.path", [](Settings s) { return !s.actor.loss.teacher.is_used(); }},
      {{"actor.teacher.topk"},
       "actor.teacher.loss_mode topk",
       [](Settings s) { return s.actor.loss.teacher.loss_mode != "topk"; }},
      // Advantages.
      {{"actor.std_unbiased"},
       "actor.adv_estimator grpo or gdpo",
       [](Settings s) {
         return !has_estimator(s, {"grpo", "gdpo"});
       }},
      {{"actor.eps"},
       "actor.adv_estimator grpo, gdpo or maxrl",
       [](Settings s) {
         return !has_estimator(s, {"grpo", "gdpo", "maxrl"});
       }},
      {{"actor.std_unbiased", "actor.eps"},
       "actor.std_level other than none",
       [](Settings s) { return has_estimator(s, {"grpo"}) && s.actor.advantages.std_level == "none"; }},
      {{"actor.mean_level", "actor.std_level"},
       "actor.adv_estimator grpo",
       [](Settings s) { return !has_estimator(s, {"grpo"}); }},
      {{"actor.discount"},
       "actor.adv_estimator gae or reinforce_plus_plus",
       [](Settings s) {
         return !has_estimator(s, {"gae", "reinforce_plus_plus"});
       }},
      {{"actor.gae_lambda", "actor.gae_timestep_unit", "actor.bootstrap_truncated", "critic"},
       "actor.adv_estimator gae",
       [](Settings s) { return !has_estimator(s, {"gae"}); }},
      {{"actor.turn_discount"},
       "actor.adv_estimator turn_returns",
       [](Settings s) { return !has_estimator(s, {"turn_returns"}); }},
      {{"actor.adv_norm"},
       "actor.adv_estimator gae or turn_returns",
       [](Settings s) {
         return !has_estimator(s, {"gae", "turn_returns"});
       }},
      {{"actor.gdpo_weights"},
       "actor.adv_estimator gdpo",
       [](Settings s) { return !has_estimator(s, {"gdpo"}); }},
      {{"actor.overlong_tokens", "actor.overlong_penalty_factor"},
       "actor.overlong_reward_penalty true",
       [](Settings s) { return !s.actor.shaping.overlong_reward_penalty; }},
      {{"actor.keep_samples"},
       "a gconfig.n_samples above it",
       [](Settings s) { return s.actor.filters.keep_samples >= s.gconfig.n_samples; }},
      {{"actor.keep_samples_by"},
       "actor.keep_samples above 0",
       [](Settings s) { return s.actor.filters.keep_samples == 0; }},
      // Optimizers and plans.
      {{"actor.optimizer.min_lr_ratio"},
       "actor.optimizer.lr_scheduler_type linear or cosine",
       [](Settings s) { return s.actor.optimizer.lr_scheduler_type == "constant"; }},
      {{"critic.optimizer.min_lr_ratio"},
       "critic.optimizer.lr_scheduler_type linear or cosine",
       [](Settings s) { return s.critic.optimizer.lr_scheduler_type == "constant"; }},
      {{"actor.optimizer.offload", "critic.optimizer.offload", "actor.activation_offload"},
       "device cuda",
       [](Settings s) { return s.device == "cpu"; }},
      {{"actor.packer"},
       "actor.tree_training_mode packed or auto",
       [](Settings s) {
         const std::string strategy = s.actor.tree.strategy();
         return strategy != "auto" && strategy != "packed";
       }},
      {{"actor.pad_to_maximum"}, "never: passes are not padded", [](Settings) { return true; }},
      // Adapters.
      {{"lora.alpha", "lora.targets", "lora.dropout"},
       "lora.rank above 0",
       [](Settings s) { return !s.actor.lora.enabled(); }},
      {{"lora.rank", "lora.alpha", "lora.targets"},
       "no lora.path: the adapter in that folder has its own",
       [](Settings s) { return !s.actor.lora.path.empty(); }},
      {{"sparse_training.lora.rank", "sparse_training.lora.alpha", "sparse_training.lora.targets"},
       "no sparse_training.lora.path: the adapter in that folder has its own",
       [](Settings s) { return !s.sparse_training.lora.path.empty(); }},
      // Data and evaluation.
      {{"total_train_epochs"}, "total_train_steps 0", [](Settings s) { return s.total_train_steps > 0; }},
      {{"train_dataset.format", "train_dataset.shuffle", "train_dataset.max_problems",
        "train_dataset.answer_required", "train_dataset.messages_key", "train_dataset.prompt_key",
        "train_dataset.question_key", "train_dataset.answer_key", "train_dataset.id_key",
        "train_dataset.layout", "train_dataset.few_shot", "train_dataset.tools_key",
        "train_dataset.overlong_prompts", "train_dataset.max_length"},
       "train_dataset.path",
       [](Settings s) { return s.train_dataset.path.empty(); }},
      {{"valid_dataset", "evaluator"},
       "valid_dataset.path",
       [](Settings s) { return s.valid_dataset.path.empty(); }},
      {{"evaluator.sparse"},
       "rollout.sparse.budget, and a sparse_training.mode other than draft",
       [](Settings s) { return !s.generates_with_sparse_policy(); }},
      {{"valid_dataset.batch_size", "valid_dataset.shuffle"},
       "never: an evaluation takes all problems at once",
       [](Settings) { return true; }},
      {{"train_dataset.completion_key", "valid_dataset.completion_key"},
       "never: only `bough sft` reads completions",
       [](Settings) { return true; }},
      {{"train_dataset.few_shot.path"},
       "train_dataset.few_shot.shots above 0",
       [](Settings s) { return s.train_dataset.few_shot.shots == 0; }},
      {{"valid_dataset.few_shot.path"},
       "valid_dataset.few_shot.shots above 0",
       [](Settings s) { return s.valid_dataset.few_shot.shots == 0; }},
      {{"train_dataset.layout.question_template", "train_dataset.layout.answer_prefix",
        "train_dataset.layout.separator"},
       "train_dataset.format text",
       [](Settings s) { return s.train_dataset.format == "chat"; }},
      {{"valid_dataset.layout.question_template", "valid_dataset.layout.answer_prefix",
        "valid_dataset.layout.separator"},
       "valid_dataset.format text",
       [](Settings s) { return s.valid_dataset.format == "chat"; }},
      {{"train_dataset.layout.separator", "train_dataset.layout.answer_prefix"},
       "train_dataset.few_shot.shots above 0",
       [](Settings s) { return s.train_dataset.few_shot.shots == 0; }},
      {{"valid_dataset.layout.separator", "valid_dataset.layout.answer_prefix"},
       "valid_dataset.few_shot.shots above 0",
       [](Settings s) { return s.valid_dataset.few_shot.shots == 0; }},
      // Rewards and environments.
      {{"reward_service.verifier"},
       "the reward number",
       [](Settings s) { return !has_verifier(s, "number") || !is_scored_by_reward(s); }},
      {{"reward_service.math"}, "the reward math", [](Settings s) { return !has_verifier(s, "math"); }},
      {{"reward_service.code"}, "the reward code", [](Settings s) { return !has_verifier(s, "code"); }},
      {{"reward_service.timeout_seconds", "reward_service.retries", "reward_service.retry_timeouts",
        "reward_service.startup_timeout_seconds"},
       "a reward or a filter in worker processes or behind an endpoint",
       [](Settings s) { return !has_reward_workers(s) && s.filter.empty(); }},
      {{"reward_service.retry_timeouts"},
       "reward_service.retries above 0",
       [](Settings s) { return s.reward_service.retries == 0; }},
      {{"reward_service.python"},
       "a reward, a filter or an environment in Python",
       [](Settings s) {
         return !has_reward_workers(s) && s.filter.empty() && s.environment.type != "python";
       }},
      {{"environment"}, "environment.type", [](Settings s) { return s.environment.type.empty(); }},
      {{"environment.path", "environment.python"},
       "environment.type python",
       [](Settings s) { return s.environment.type != "python"; }},
      {{"environment.command"},
       "environment.type command or mcp",
       [](Settings s) { return s.environment.type != "command" && s.environment.type != "mcp"; }},
      {{"environment.url"}, "environment.type http", [](Settings s) { return s.environment.type != "http"; }},
      {{"environment.server"},
       "environment.type mcp",
       [](Settings s) { return s.environment.type != "mcp"; }},
      {{"environment.workers", "environment.timeout_seconds", "environment.startup_timeout_seconds",
        "environment.retries"},
       "environment.type python, command, http or mcp",
       [](Settings s) { return !has_environment_workers(s); }},
      {{"environment.max_invalid_calls"},
       "environment.tool_call_parser",
       [](Settings s) { return s.environment.tool_call_parser.empty(); }},
      {{"environment.tool_response_truncate_side"},
       "environment.max_tool_response_length above 0",
       [](Settings s) { return s.environment.max_tool_response_length == 0; }},
      {{"serve"}, "serve.port", [](Settings s) { return !s.serve.port; }},
  };
  return rows;
}

bool covers(std::string_view row_key, std::string_view key) {
  return key.starts_with(row_key) && (key.size() == row_key.size() || key[row_key.size()] == '.');
}

bool covers(const IdleRow& row, std::string_view key) {
  return std::any_of(row.keys.begin(), row.keys.end(),
                     [&](std::string_view row_key) { return covers(row_key, key); });
}

}  // namespace

std::vector<IdleSetting> idle_settings(const RunSettings& settings, std::span<const GivenSetting> given) {
  std::vector<IdleSetting> idle;
  std::vector<bool> is_named(given.size(), false);
  for (const IdleRow& row : table()) {
    if (!row.is_idle(settings)) continue;
    for (size_t i = 0; i < given.size(); ++i) {
      if (is_named[i] || given[i].key == row.needs || !covers(row, given[i].key)) continue;
      is_named[i] = true;
      idle.push_back({given[i].key, given[i].place, row.needs});
    }
  }
  return idle;
}

// The settings of sft are part of those of a run, where some of them belong to `actor`.
std::vector<IdleSetting> idle_settings(const SftSettings& settings, std::span<const GivenSetting> given) {
  RunSettings run;
  run.device = settings.device;
  run.train_dataset = settings.train_dataset;
  run.total_train_steps = settings.max_steps;
  run.actor.tree = settings.tree;
  run.actor.optimizer = settings.optimizer;
  run.actor.lora = settings.lora;
  // Other settings of train_dataset depend on whether the examples have answers or completions.
  const std::map<std::string_view, std::string> renamed = {
      {"epochs", "total_train_epochs"},
      {"pad_to_maximum", "actor.pad_to_maximum"},
      {"packer", "actor.packer"},
      {"activation_offload", "actor.activation_offload"},
      {"optimizer.min_lr_ratio", "actor.optimizer.min_lr_ratio"},
      {"optimizer.offload", "actor.optimizer.offload"},
      {"lora.rank", "lora.rank"},
      {"lora.alpha", "lora.alpha"},
      {"lora.targets", "lora.targets"},
      {"lora.dropout", "lora.dropout"},
      {"train_dataset.few_shot.path", "train_dataset.few_shot.path"},
      {"train_dataset.layout.question_template", "train_dataset.layout.question_template"}};
  std::vector<IdleSetting> idle;
  for (const GivenSetting& setting : given) {
    const auto found = renamed.find(setting.key);
    if (found == renamed.end()) continue;
    for (IdleSetting& of_run :
         idle_settings(run, std::vector<GivenSetting>{{found->second, setting.place}})) {
      std::string reason = of_run.reason;
      if (setting.key == "epochs") reason = "max_steps 0";
      else if (reason.starts_with("actor.")) reason = reason.substr(6);
      idle.push_back({setting.key, setting.place, reason});
    }
  }
  return idle;
}

std::vector<IdleSetting> idle_engine_settings(const RolloutSettings& settings,
                                              std::span<const GivenSetting> given) {
  static constexpr std::array<std::string_view, 7> kOfEngine = {"rollout.max_concurrent_rollouts",
                                                                "rollout.prefill_chunk_tokens",
                                                                "rollout.admission",
                                                                "rollout.kv_memory",
                                                                "rollout.batch_invariant",
                                                                "rollout.quantization",
                                                                "rollout.sparse"};
  RunSettings run;
  run.rollout.sparse = settings.sparse;
  std::vector<IdleSetting> idle;
  for (const GivenSetting& setting : given) {
    if (!covers("rollout", setting.key)) continue;
    const bool is_of_engine = std::any_of(kOfEngine.begin(), kOfEngine.end(),
                                          [&](std::string_view key) { return covers(key, setting.key); });
    if (!is_of_engine) idle.push_back({setting.key, setting.place, "never: only `bough train` reads it"});
    else
      for (IdleSetting& of_run : idle_settings(run, std::span(&setting, 1)))
        idle.push_back(std::move(of_run));
  }
  return idle;
}

std::string describe(std::span<const IdleSetting> idle) {
  if (idle.empty()) return "";
  std::string text = "these settings have no effect:";
  for (size_t i = 0; i < idle.size(); ++i) {
    const bool is_new = i == 0 || idle[i].reason != idle[i - 1].reason;
    text += str(is_new ? "\n  " : ", ", idle[i].key, " (", idle[i].place, ")");
    const std::string& reason = idle[i].reason;
    const bool is_last = i + 1 == idle.size() || idle[i + 1].reason != reason;
    if (is_last) text += str(": ", reason.starts_with("never: ") ? reason.substr(7) : "needs " + reason);
  }
  return text;
}

bool may_be_idle(const std::string& key) {
  return std::any_of(table().begin(), table().end(), [&](const IdleRow& row) { return covers(row, key); });
}

}  // namespace bough
