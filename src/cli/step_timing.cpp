#include "cli/step_timing.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "base/error.h"
#include "base/median.h"
#include "cost/run_costs.h"
#include "kernels/common/cpu_allocator.h"
#include "models/checkpoint.h"

namespace bough {

namespace {

// pg or grpo.
std::unique_ptr<Loss> make_step_loss(const std::string& name) {
  if (name != "pg" && name != "grpo")
    throw UserError(str("--loss: got ", quoted(name), ", expected pg or grpo"));
  LossSettings settings;
  settings.loss = name == "pg" ? "pg" : "ppo";
  // The clip is against the policy that sampled the tokens: a single step has no other.
  settings.use_decoupled_loss = false;
  settings.recompute_logprob = false;
  return make_loss(settings);
}

}  // namespace

StepInput load_step(const StepOptions& options) {
  check_at_least("--repeat", options.repeat, 1);
  if (options.max_tokens_per_mb)
    check_at_least("--max-tokens-per-mb", *options.max_tokens_per_mb, 1, "a pass holds at least one token");
  const auto memory_bytes = parse_memory("--memory", options.memory);
  std::unique_ptr<Loss> loss = make_step_loss(options.loss);
  const TorchSetup setup = set_up_torch(options.torch);

  // The rollouts first: they are quickly found wrong, weights take long to load.
  const ModelConfig config = load_model_config(options.model);
  RolloutBatch rollouts(read_rollouts(options.rollouts, {.vocab_size = config.vocab_size}));
  std::unique_ptr<Model> model = load_model(options.model, setup.dtype, setup.device);
  model->set_batch_invariant(options.batch_invariant.value_or(false));
  CostModel costs(device_profile(options.torch.device, setup.dtype), model_shape(*model));
  const PrefixTree tree = build_prefix_tree(rollouts.sequences);
  const StepWork work = count_work(tree, rollouts.trained_flags(), work_model(costs.shape()));
  return {options.max_tokens_per_mb.value_or(kDefaultMaxTokensPerPass),
          memory_bytes,
          std::move(loss),
          std::move(rollouts),
          std::move(model),
          std::move(costs),
          compute_statistics(tree),
          work};
}

void add_step_options(CLI::App& command, StepOptions& options) {
  command.add_option("--model", options.model, "Hugging Face directory; its weights are not changed")
      ->required()
      ->type_name("DIR");
  command.add_option("--rollouts", options.rollouts, "JSON Lines, .jsonl or .jsonl.zst")
      ->required()
      ->type_name("FILE");
  command.add_option("--repeat", options.repeat, "Repetitions, after one that is not counted")
      ->type_name("K");
  command
      .add_option("--max-tokens-per-mb", options.max_tokens_per_mb,
                  str("Tokens whose activations are held at once (default: ", kDefaultMaxTokensPerPass, ")"))
      ->type_name("B");
  command
      .add_option("--memory", options.memory,
                  "Budget over weights and gradients, 40GiB: the plan keeps within it, or the\n"
                  "step is refused with what would do")
      ->type_name("BYTES");
  command.add_option("--loss", options.loss,
                     "pg: minus the mean of advantage x log-probability |\n"
                     "grpo: PPO clip against the file's log-probabilities");
  add_torch_options(command, options.torch);
  add_batch_invariant_flag(command, options.batch_invariant);
  add_json_flag(command, options.json);
}

StepTimer::StepTimer(const StepInput& input, const std::string& mode)
    : input_(input), mode_(mode), executor_(*input.model) {
  input_.model->allocate_gradients();
}

void StepTimer::run(bool counted) {
  const int64_t before = cpu_allocated_bytes();
  reset_cpu_peak_bytes();
  const auto start = std::chrono::steady_clock::now();
  input_.model->zero_gradients();
  const TrainBatch batch = make_train_batch(input_.rollouts, accumulator_type(input_.model->dtype()));
  PlanRequest request = plan_request(batch, input_.max_tokens_per_pass);
  request.costs = &input_.costs;
  request.memory_bytes = input_.memory_bytes;
  const Plan plan = make_plan(mode_, request);
  const WalkResult result = executor_.forward_backward(plan, batch, *input_.loss);
  if (counted) seconds_.push_back(seconds_since(start));
  peak_bytes_ = std::max(peak_bytes_, cpu_peak_bytes() - before);
  loss_value_ = result.loss;
  num_trained_ = batch.num_rows();
  strategy_ = plan.strategy;
  max_tokens_per_pass_ = plan.max_tokens_per_pass;
  simulation_ = simulate(plan, &input_.costs);
}

double StepTimer::median_seconds() const {
  BOUGH_CHECK(!seconds_.empty(), "no run was counted");
  return median(seconds_);
}

}  // namespace bough
