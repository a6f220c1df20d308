#include "cli/step_input.h"

#include <limits>

#include "base/error.h"
#include "base/log.h"
#include "cost/run_costs.h"
#include "data/rollout_file.h"
#include "models/checkpoint.h"
#include "models/lora.h"
#include "train/sequence_steps.h"

namespace bough {

namespace {

// Keys as in a run's settings. The defaults suit a file that is examined alone.
struct StepSettings {
  ActorSettings actor;

  StepSettings() {
    actor.loss.loss = "pg";
    // The loss clips the ratio to the behavior policy: in a single step there is no other old policy.
    actor.loss.use_decoupled_loss = false;
    actor.loss.recompute_logprob = false;
    // Rewards of the file are not clipped.
    actor.shaping.reward_clip = std::numeric_limits<double>::infinity();
  }

  template <class V>
  void visit(V& v) {
    v("actor", actor, "how the gradient is computed");
    v("lora", actor.lora, "train low-rank adapters in place of the model's weights");
  }
};

// Keeps only the rollouts that enter the loss, with their advantages.
void score(std::vector<Trajectory>& rollouts, const ActorSettings& settings, bool from_rewards) {
  if (from_rewards)
    for (Trajectory& rollout : rollouts) {
      if (!rollout.reward) continue;
      rollout.advantage.clear();
      rollout.trained = true;
    }
  set_advantages(rollouts, settings, /*max_response_tokens=*/{});
  const size_t all = rollouts.size();
  std::erase_if(rollouts, [](const Trajectory& rollout) { return !rollout.in_loss(); });
  if (rollouts.empty())
    throw UserError(str("none of the ", all, " sequences enters the loss: not valid, or filtered"));
  if (rollouts.size() < all)
    log_info(str(all - rollouts.size(), " of ", all, " sequences are left out: not valid, or filtered"));
}

}  // namespace

ActorSettings step_settings(const StepOptions& options, const std::string& mode) {
  check_at_least("--repeat", options.repeat, 1);
  if (options.max_tokens_per_mb)
    check_at_least("--max-tokens-per-mb", *options.max_tokens_per_mb, 1, "a pass holds at least one token");
  if (options.loss != "pg" && options.loss != "grpo")
    throw UserError(str("--loss: got ", quoted(options.loss), ", expected pg or grpo"));
  const auto memory_bytes = parse_memory("--memory", options.memory);
  std::vector<std::string> overrides = {str("actor.loss=", options.loss)};
  const int64_t default_tokens =
      options.torch.device == "cuda" ? kMaxTokensPerPassOfGpu : kDefaultMaxTokensPerPass;
  overrides.push_back(
      str("actor.mb_spec.max_tokens_per_mb=", options.max_tokens_per_mb.value_or(default_tokens)));
  if (memory_bytes) overrides.push_back(str("actor.mb_spec.memory=", *memory_bytes));
  if (!mode.empty()) overrides.push_back(str("actor.tree_training_mode=", mode));
  overrides.insert(overrides.end(), options.overrides.begin(), options.overrides.end());
  const ActorSettings settings = parse_settings<StepSettings>("{}", "command line", overrides).actor;
  if (settings.ppo_epochs != 1)
    throw UserError(str("actor.ppo_epochs: got ", settings.ppo_epochs,
                        ", expected 1: a step is one gradient, at the weights of --model"));
  if (settings.ppo_n_minibatches != 1)
    throw UserError(str("actor.ppo_n_minibatches: got ", settings.ppo_n_minibatches,
                        ", expected 1: a step is the gradient of the whole file; split the file"));
  return settings;
}

StepInput load_step(const StepOptions& options, const ActorSettings& settings, const TrainingRanks* ranks) {
  make_loss(settings.loss);  // unsupported settings are refused before anything is loaded
  const TorchSetup setup = set_up_torch(options.torch);

  // The rollouts are read first: their errors are found quickly, and weights take long to load.
  const ModelConfig config = load_model_config(options.model);
  RolloutReadOptions reading{.vocab_size = config.vocab_size};
  if (settings.advantages.needs_values()) reading.columns = {kValuesColumn};
  std::vector<Trajectory> rollouts = read_rollouts(options.rollouts, reading);
  score(rollouts, settings, options.from_rewards);
  std::unique_ptr<Model> model =
      load_model(options.model, setup.dtype, setup.device, ranks ? ranks->model() : ModelRanks());
  model->set_batch_invariant(options.batch_invariant.value_or(false));
  model->set_precisions(setup.precisions);
  if (settings.lora.enabled()) add_adapter(*model, settings.lora, /*seed=*/1);
  CostModel costs = ranks && ranks->all() ? shared_costs(*model, *ranks->all())
                                          : model_costs(*model, {}, settings.router_losses.is_used());
  const PrefixTree tree = build_prefix_tree(token_spans(rollouts));
  const StepWork work = count_work(tree, trained_flags(rollouts), work_model(costs.shape()));
  return {settings, std::move(rollouts), std::move(model), std::move(costs), compute_statistics(tree), work};
}

void add_step_options(Command& command, StepOptions& options) {
  command.add_option("--model", options.model, "Hugging Face directory; its weights are not changed")
      .required()
      .type_name("DIR");
  command.add_option("--rollouts", options.rollouts, "Rollout file, .jsonl or .jsonl.zst")
      .required()
      .type_name("FILE");
  command
      .add_option("settings", options.overrides,
                  "Settings of a run's actor, which override the options:\n"
                  "actor.loss=ppo actor.loss_aggregation=sequence_mean\n"
                  "actor.adv_estimator=rloo actor.use_decoupled_loss=true ...\n"
                  "and of its adapters, lora.rank=16 lora.targets=[q_proj,v_proj] ...\n"
                  "(`bough train --settings` lists them)")
      .type_name("actor.key=value");
  command.add_option("--repeat", options.repeat, "Repetitions, after one that is not counted").type_name("K");
  command
      .add_option("--max-tokens-per-mb", options.max_tokens_per_mb,
                  str("Most tokens of a pass (default: ", kDefaultMaxTokensPerPass, ", on a GPU ",
                      kMaxTokensPerPassOfGpu, ")"))
      .type_name("B");
  command
      .add_option("--memory", options.memory,
                  "Budget over weights and gradients, such as 40GiB; if no plan fits, the step\n"
                  "is refused, and the message names a budget that would do")
      .type_name("BYTES");
  command.add_option("--loss", options.loss,
                     "pg: minus the mean of advantage x log-probability |\n"
                     "grpo: PPO clip against the file's log-probabilities");
  command.add_flag("--from-rewards", options.from_rewards,
                   "Compute advantages from the rewards, even if the file has advantages");
  add_torch_options(command, options.torch);
  add_batch_invariant_flag(command, options.batch_invariant);
  add_json_flag(command, options.json);
}

}  // namespace bough
