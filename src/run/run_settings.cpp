#include "run/run_settings.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "base/error.h"

namespace bough {

template SettingField describe_settings(RunSettings& settings);

namespace {
// Throws UserError if `setting` needs the engine's top-k tokens, but samples will have none.
void check_has_engine_top(const RunSettings& s, const std::string& setting, const std::string& instead) {
  if (s.serve.port)
    throw UserError(str(setting,
                        " needs the engine's top-k tokens, which conversations of external agents do not "
                        "keep; expected ",
                        instead));
  if (s.gconfig.top_logprobs == 0)
    throw UserError(
        str(setting,
            " needs the engine's top-k tokens, but gconfig.top_logprobs is 0; expected 1 or more, "
            "for example 20, or ",
            instead));
}

void check_readers_of_engine_top(const RunSettings& s) {
  const LossSettings& loss = s.actor.loss;
  const SparseTrainingSettings& sparse = s.sparse_training;
  if (loss.correction == "obrs" && loss.obrs_normalizer != "none")
    check_has_engine_top(s, "actor.correction: obrs", "actor.obrs_normalizer: none, or another correction");
  if (loss.kl_loss_coef != 0 && loss.kl_loss_type == "topk")
    check_has_engine_top(s, "actor.kl_loss_type: topk", "k2, k3 or unbiased");
  if (!sparse.has_sparse_policy() || sparse.kl_loss_coef == 0 || sparse.kl_loss_type != "topk") return;
  check_has_engine_top(s, "sparse_training.kl_loss_type: topk", "k2 or k3");
  if (loss.teacher.by_top_tokens())
    throw UserError(
        "sparse_training.kl_loss_type: topk needs the engine's top-k tokens, and teacher.loss_mode topk "
        "needs "
        "the policy's; a pass returns one list; expected k2 or k3, or teacher.loss_mode k1, k2 or k3");
}
}  // namespace

void EvaluatorSettings::check() const {
  if (n_samples > 1 && temperature == 0.0) {
    throw UserError(str("evaluator.temperature is 0 with evaluator.n_samples ", n_samples,
                        ": all samples would be the same; set a temperature, or n_samples to 1"));
  }
}

void RunSettings::complete() {
  if (actor.replays_rollout_experts()) rollout.return_routed_experts = true;
  if (dtype == "auto") dtype = dtype_on(device);
  actor.mb_spec.complete_for(device);
  rollout.prefill_chunk_tokens = rollout.prefill_chunk(device == "cuda");
  if (allocation_mode.empty()) return;
  const size_t plus = allocation_mode.find('+');
  const bool is_two_at_most =
      plus == std::string::npos || allocation_mode.find('+', plus + 1) == std::string::npos;
  if (!is_two_at_most || allocation_mode.find('|') != std::string::npos)
    throw UserError(str("allocation_mode: got ", quoted(allocation_mode),
                        ", expected SERVERS+TRAINER, for example sglang:d4+fsdp:d8, or TRAINER, for example "
                        "fsdp:d8"));
  if (plus != std::string::npos) rollout.backend = allocation_mode.substr(0, plus);
  actor.backend = plus == std::string::npos ? allocation_mode : allocation_mode.substr(plus + 1);
}

void RunSettings::check() const {
  const auto require = [](const std::string& value, const char* key) {
    if (value.empty()) throw UserError(str(key, " is missing; give it in the file or as ", key, "=..."));
  };
  require(model.path, "model.path");
  if (saver.max_rollouts.is_auto())
    throw UserError("saver.max_rollouts: got auto, expected an amount, for example 16GiB, or 0 for no bound");
  if (!serve.port) require(train_dataset.path, "train_dataset.path");
  if (serve.port && !environment.type.empty())
    throw UserError(
        str("serve.port: external agents and an environment cannot both hold the conversations; leave out "
            "serve.port or environment.type (got ",
            quoted(environment.type), ")"));
  if (serve.port && train_dataset.path.empty() && total_train_steps == 0)
    throw UserError(
        "total_train_steps: without train_dataset.path, agents bring their own problems and there are no "
        "epochs; got 0, expected the number of steps");
  check_readers_of_engine_top(*this);
  for (const auto& [key, name] :
       {std::pair{"experiment_name", &experiment_name}, {"trial_name", &trial_name}}) {
    if (name->find('/') != std::string::npos || *name == "." || *name == "..") {
      throw UserError(
          str(key, ": got ", quoted(*name), ", expected the name of one folder; use fileroot for a path"));
    }
  }
  if (gconfig.temperature == 0.0 || gconfig.greedy) {
    throw UserError(
        "gconfig.temperature: training needs samples that differ, got greedy sampling; expected a "
        "temperature above 0 (evaluation has its own, evaluator.temperature)");
  }
  if (actor.advantages.adv_estimator == "rloo" && gconfig.n_samples < 2) {
    throw UserError("actor.adv_estimator: rloo needs gconfig.n_samples of 2 or more");
  }
  if (!actor.advantages.needs_values() && (critic.share_backbone.value_or(false) || !critic.path.empty()))
    throw UserError(str("critic: path or share_backbone is set, but actor.adv_estimator ",
                        actor.advantages.adv_estimator, " uses no critic; leave them out, or use gae"));
  if (actor.lora.enabled() && actor.loss.ref_model_sync_steps > 0)
    throw UserError(
        "actor.ref_model_sync_steps: with lora the policy is an adapter over frozen weights, and the "
        "reference cannot copy an adapter; expected 0");
  const bool needs_budget = sparse_training.mode != "sparse" && !sparse_training.is_draft();
  if (needs_budget && !rollout.sparse.is_sparse())
    throw UserError(
        str("sparse_training.mode: ", sparse_training.mode,
            " needs sparse rollouts, but rollout.sparse.budget is none; expected a budget, for example 512"));
  if (sparse_training.mode == "exact_top_k" && rollout.sparse.summary != "exact")
    throw UserError(
        str("sparse_training.mode: exact_top_k chooses single keys by their scores, but "
            "rollout.sparse.summary is ",
            rollout.sparse.summary, "; expected exact"));
  if (rollout.sparse.replay && !sparse_training.has_sparse_policy() && !sparse_training.trains_sparse())
    throw UserError(str("rollout.sparse.replay: sparse_training.mode ", sparse_training.mode,
                        " trains nothing with the blocks that generation chose; expected false, or the mode "
                        "distill, draft or sparse_to_sparse"));
  if (sparse_training.is_draft() == sparse_training.draft_path.empty())
    throw UserError(str("sparse_training.draft_path: got ", quoted(sparse_training.draft_path), " with mode ",
                        sparse_training.mode,
                        "; expected the directory of the model that generates if the mode is draft, and "
                        "nothing in other modes"));
  if (sparse_training.has_sparse_policy() && actor.advantages.needs_values())
    throw UserError(str("sparse_training.mode: ", sparse_training.mode,
                        " trains a second policy, which generates, and supports no critic; expected an "
                        "actor.adv_estimator other than gae"));
  if (sparse_training.is_draft() && actor.lora.enabled())
    throw UserError(
        "sparse_training.mode: draft trains another model, whose checkpoint holds all weights, beside the "
        "trained model; expected no lora, or the mode distill");
  if (sparse_training.has_sparse_policy() && rollout.quantization != "none")
    throw UserError(str("rollout.quantization: got ", rollout.quantization, ", but sparse_training.mode ",
                        sparse_training.mode,
                        sparse_training.distills() ? " changes the weights below its adapters every step"
                                                   : " keeps no quantized copy of the model that generates",
                        "; expected none"));
  if (sparse_training.trains_sparse() && actor.filters.needs_acceptance())
    throw UserError(
        "actor.keep_samples_by: acceptance compares the trained policy with another one that generates, but "
        "sparse_training.mode sparse_to_sparse trains the policy that generates; expected reward");
  if (sparse_training.trains_sparse() && !actor.loss.teacher.path.empty())
    throw UserError(
        "sparse_training.mode: sparse_to_sparse runs all models with chosen blocks, but a teacher is dense; "
        "expected no teacher.path");
  if (sparse_training.trains_sparse() && actor.advantages.needs_values())
    throw UserError(
        "sparse_training.mode: sparse_to_sparse supports no critic yet; expected an actor.adv_estimator "
        "other than gae");
  if (rollout.has_servers() && sparse_training.has_sparse_policy())
    throw UserError(str("rollout.backend: got ", rollout.backend, ", but sparse_training.mode ",
                        sparse_training.mode, " generates with its own policy; expected embedded"));
  const auto sizes = sizes_of_backend(actor.backend);
  if (sizes && sizes->all() > sizes->data &&
      (sparse_training.has_sparse_policy() || sparse_training.trains_sparse()))
    throw UserError(str("actor.backend: got ", actor.backend, ", but sparse_training.mode ",
                        sparse_training.mode,
                        " trains with chosen blocks, for which a rank needs all heads of a group and all "
                        "tokens of a pass; expected data parallelism only (fsdp:dN)"));
  const bool cuts = gconfig.top_p < 1.0 || gconfig.top_k > 0 || gconfig.min_p > 0 ||
                    gconfig.repetition_penalty != 1.0 || gconfig.presence_penalty != 0.0 ||
                    gconfig.frequency_penalty != 0.0;
  if (actor.loss.correction == "obrs" && cuts)
    throw UserError(
        "actor.correction: obrs needs samples from the full distribution; expected gconfig without top_p, "
        "top_k, min_p and penalties");
  if (actor.loss.loss == "sft") {
    throw UserError(
        "actor.loss: sft is no loss of reinforcement learning; expected ppo or pg (for sft: `bough sft`)");
  }
}

SamplingParameters RunSettings::evaluation_sampling() const {
  SamplingParameters sampling;
  sampling.n_samples = evaluator.n_samples;
  sampling.temperature = evaluator.temperature;
  sampling.max_new_tokens = gconfig.max_new_tokens;
  sampling.stop = gconfig.stop;
  sampling.stop_token_ids = gconfig.stop_token_ids;
  return sampling;
}

SettingAliases RunSettings::aliases() {
  return {
      {"actor.path", "model.path"},
      {"ref.model.path", "ref.path"},
      {"teacher.path", "actor.teacher.path"},
      {"teacher.rl_loss_weight", "actor.teacher.rl_loss_weight"},
      {"teacher.distill_loss_weight", "actor.teacher.distill_loss_weight"},
      {"teacher.loss_mode", "actor.teacher.loss_mode"},
      {"teacher.topk", "actor.teacher.topk"},
      {"cluster.fileroot", "fileroot"},
      {"recover.freq_steps", "saver.freq_steps"},
      {"actor.group_size", "gconfig.n_samples"},
      {"total_train_n_steps", "total_train_steps"},
      {"actor.temperature", "gconfig.temperature"},
      {"actor.dtype", "dtype"},
      {"actor.lora_rank", "lora.rank"},
      {"actor.lora_alpha", "lora.alpha"},
      {"actor.target_modules", "lora.targets"},
      {"lora.r", "lora.rank"},
      {"sparse_training.arm", "sparse_training.mode"},
      {"sparse_training.weak_path", "sparse_training.draft_path"},
      {"lora.lora_alpha", "lora.alpha"},
      {"lora.target_modules", "lora.targets"},
      {"lora.lora_dropout", "lora.dropout"},
      {"critic.value_eps_clip", "critic.eps_clip"},
      {"actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "environment.max_turns"},
      {"train_dataset.filter_overlong_prompts", "train_dataset.overlong_prompts"},
      {"train_dataset.max_prompt_length", "train_dataset.max_length"},
      {"valid_dataset.filter_overlong_prompts", "valid_dataset.overlong_prompts"},
      {"valid_dataset.max_prompt_length", "valid_dataset.max_length"},
      {"environment.max_assistant_turns", "environment.max_turns"},
      {"environment.max_tool_calling_iterations", "environment.max_turns"},
  };
}

bool is_harmless_change(const std::string& key) {
  static constexpr std::array<std::string_view, 46> kHarmless = {"experiment_name",
                                                                 "actor.backend",
                                                                 "allocation_mode",
                                                                 "trial_name",
                                                                 "fileroot",
                                                                 "total_train_steps",
                                                                 "total_train_epochs",
                                                                 "compare_dense",
                                                                 "saver.freq_steps",
                                                                 "saver.freq_minutes",
                                                                 "saver.keep",
                                                                 "saver.max_rollouts",
                                                                 "saver.rollouts",
                                                                 "report.port",
                                                                 "evaluator.freq_steps",
                                                                 "evaluator.at_start",
                                                                 "evaluator.at_end",
                                                                 "evaluator.sparse",
                                                                 "evaluator.timeout_seconds",
                                                                 "stall_seconds",
                                                                 "rollout.ranks",
                                                                 "rollout.threads",
                                                                 "actor.threads",
                                                                 "threads",
                                                                 "reward_service.workers",
                                                                 "reward_service.timeout_seconds",
                                                                 "reward_service.retries",
                                                                 "reward_service.retry_timeouts",
                                                                 "reward_service.startup_timeout_seconds",
                                                                 "reward_service.max_consecutive_failures",
                                                                 "reward_service.python",
                                                                 "environment.workers",
                                                                 "environment.timeout_seconds",
                                                                 "environment.startup_timeout_seconds",
                                                                 "environment.retries",
                                                                 "environment.python",
                                                                 "serve.port",
                                                                 "serve.host",
                                                                 "serve.api_key_file",
                                                                 "serve.lease_seconds",
                                                                 "actor.max_num_gen_batches",
                                                                 "actor.pad_to_maximum",
                                                                 "rollout.servers.addresses",
                                                                 "rollout.servers.api_key_file",
                                                                 "rollout.servers.weights_path",
                                                                 "rollout.servers.timeout_seconds"};
  return std::find(kHarmless.begin(), kHarmless.end(), key) != kHarmless.end();
}

}  // namespace bough
