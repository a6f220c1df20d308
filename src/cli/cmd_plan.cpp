// `bough plan`: the common prefixes of a rollout file, the cost of each strategy (plan/plan.h) on a device,
// and a picture of the tree. Needs neither weights nor the device.
#include <map>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "base/settings.h"
#include "cli/command.h"
#include "cli/generation_options.h"
#include "cli/plan_page.h"
#include "cli/plan_report.h"
#include "cli/torch_options.h"
#include "cost/rollout_cost.h"
#include "cost/run_costs.h"
#include "data/rollout_file.h"
#include "plan/load_balance.h"
#include "plan/packing.h"
#include "plan/pipeline_schedule.h"
#include "plan/plan.h"
#include "run/memory_plan.h"
#include "run/run_view.h"
#include "train/make_batch.h"

namespace bough {

namespace {

struct PlanOptions {
  std::string run;
  std::vector<std::string> overrides;
  std::string rollouts, html, svg;
  std::string model, shape;
  std::string device = "cpu";
  std::string dtype;
  std::string memory;
  std::string packer = "auto";
  std::string gradient_checkpointing, activation_offload;
  int64_t ranks = 1, stages = 1;
  int64_t max_running = 256;
  SparseSettings sparse;
  std::optional<int64_t> max_tokens_per_mb;
  bool json = false;
};

CostModel cost_model_of(const PlanOptions& options) {
  if (!options.model.empty() && !options.shape.empty())
    throw UserError("--model and --shape both choose the model; give only one of them");
  const std::string dtype = !options.dtype.empty()    ? options.dtype
                            : options.device == "cpu" ? "fp32"
                                                      : "bf16";
  const at::ScalarType type = parse_dtype(dtype);
  ModelShape shape = options.model.empty()
                         ? named_model_shape(options.shape.empty() ? "qwen3-0.6b" : options.shape, dtype)
                         : model_shape(load_model_config(options.model), dtype);
  return CostModel(device_profile(options.device, type), std::move(shape));
}

std::optional<bool> parse_choice(const std::string& option, const std::string& text) {
  if (text.empty()) return {};
  if (text != "true" && text != "false")
    throw UserError(str(option, ": got ", quoted(text), ", expected true or false"));
  return text == "true";
}

StrategyCost cost_of(const std::string& strategy, const PlanRequest& request, const CostModel& costs,
                     bool memory_given) {
  StrategyCost cost{.strategy = strategy};
  try {
    cost.plan = make_plan(strategy, request);
    cost.simulation = simulate(cost.plan, request.costs, request.pipeline);
    int64_t num_flat_tokens = 0;
    for (const TokenSpan& sequence : request.sequences) num_flat_tokens += std::ssize(sequence);
    cost.effective_reuse = effective_reuse_ratio(num_planned_tokens(cost.plan), num_flat_tokens);
  } catch (const UserError& error) {
    if (strategy == "auto" && memory_given) throw;  // no strategy has a plan that fits
    cost.error = error.what();
  }
  const int64_t weights = costs.shape().parameter_bytes() / request.pipeline.num_stages;
  cost.fits = weights + cost.simulation.peak_bytes <= costs.device().memory_bytes;
  return cost;
}

std::vector<RankCost> rank_costs(const PrefixTree& tree, const PlanRequest& whole, const ModelShape& shape,
                                 int64_t num_ranks) {
  std::vector<RankCost> costs;
  for (const auto& share :
       balance_load(tree, num_ranks,
                    {.per_token = shape.linear_flops_per_token(), .per_pair = shape.flops_per_pair()}))
    costs.push_back(
        {share.num_tokens,
         simulate(make_plan("auto", part_of(whole, share.sequences)), whole.costs, whole.pipeline).seconds});
  return costs;
}

// The costs of the same passes without their backward.
class ForwardCosts final : public PassCosts {
 public:
  explicit ForwardCosts(const CostModel& costs) : costs_(costs) {}
  double forward_seconds(const PassShape& pass) const override { return costs_.forward_seconds(pass); }
  double backward_seconds(const PassShape&) const override { return 0; }
  double attention_forward_seconds(const PassShape& pass) const override {
    return costs_.attention_forward_seconds(pass);
  }
  double attention_backward_seconds(const PassShape&) const override { return 0; }
  double head_forward_seconds(const PassShape& pass) const override {
    return costs_.head_forward_seconds(pass);
  }
  double head_backward_seconds(const PassShape&) const override { return 0; }
  double recompute_seconds(const PassShape&, RecomputePolicy) const override { return 0; }
  int64_t stack_row_bytes() const override { return costs_.stack_row_bytes(); }
  int64_t kept_bytes(RecomputePolicy keep) const override { return costs_.kept_bytes(keep); }
  int64_t boundary_bytes() const override { return costs_.boundary_bytes(); }
  int64_t row_bytes() const override { return costs_.row_bytes(); }
  int64_t temporary_bytes(const PassShape& pass, RecomputePolicy keep) const override {
    return costs_.temporary_bytes(pass, keep);
  }

 private:
  const CostModel& costs_;
};

// A prompt ends before the first token that the policy sampled. Everything after that is the response, tool
// outputs included.
std::vector<SampledGroup> groups_of(const std::vector<Trajectory>& rollouts) {
  std::map<std::string_view, size_t> number;
  std::vector<SampledGroup> groups;
  for (const Trajectory& rollout : rollouts) {
    size_t prompt = 1;  // position 0 has no prediction
    while (prompt < rollout.input_ids.size() && !rollout.trains(prompt)) ++prompt;
    const auto [found, is_new] = number.try_emplace(rollout.group, groups.size());
    if (is_new) groups.push_back({static_cast<int64_t>(prompt), {}});
    groups[found->second].response_tokens.push_back(static_cast<int64_t>(rollout.input_ids.size()) -
                                                    static_cast<int64_t>(prompt));
  }
  return groups;
}

// The shape if only LoRA adapters are trained, with the default rank and targets of sparse_training.mode
// distill.
ModelShape adapted(ModelShape shape) {
  constexpr int64_t kRank = 32;
  const int64_t width = shape.hidden_size;
  const int64_t of_attention = 2 * (width + shape.query_width()) + 2 * (width + shape.key_width());
  const int64_t of_feed_forward = 3 * (width + shape.intermediate_size);  // experts have no adapters
  shape.adapter_elements =
      kRank * (shape.num_layers * of_attention + shape.num_dense_layers() * of_feed_forward);
  return shape;
}

// Pipeline stages train. The rollout is priced on one device.
IterationCost iteration_cost(const std::vector<SampledGroup>& groups, const Plan& plan,
                             const CostModel& costs, const SparseAttention& sparse, int64_t max_running,
                             const Pipeline& pipeline) {
  IterationCost cost{.rollout = rollout_cost(costs, groups, sparse, max_running)};
  const ForwardCosts forward(costs);
  cost.recompute_seconds = simulate(plan, &forward, pipeline).seconds;
  cost.update_seconds = simulate(plan, &costs, pipeline).seconds;
  // Pipeline stages do not support training with page selection.
  if (sparse.is_sparse() && pipeline.num_stages == 1) {
    const CostModel frozen(costs.device(), adapted(costs.shape()));
    cost.sparse_step_seconds = simulate(plan, &frozen).seconds;
  }
  return cost;
}

PlanPicture picture_of(const StrategyCost& cost) {
  const Plan& plan = cost.plan;
  const Simulation& s = cost.simulation;
  return plan_picture(
      plan, str(plan.strategy, ": ", format_thousands(s.num_passes), " passes of at most ",
                format_thousands(plan.max_tokens_per_pass), " tokens, ", format_thousands(s.tokens_forwarded),
                " tokens forwarded, ", format_thousands(s.tokens_recomputed), " recomputed"));
}

// The memory plan of a run on a GPU that need not be here.
void plan_run(const PlanOptions& options, const std::vector<std::string>& given) {
  for (const std::string& option : given)
    if (option != "--run" && option != "--device" && option != "--dtype" && option != "--ranks" &&
        option != "--json" && option != "settings")
      throw UserError(str(option,
                          ": has no effect with --run, whose settings say what it would; leave it out, or "
                          "give a setting behind --run CONFIG (actor.mb_spec.memory=40GiB)"));
  if (options.device == "cpu")
    throw UserError(
        "--run: a run on a CPU has no memory plan; choose a GPU with --device h100, h200 or a100");
  std::vector<std::string> overrides = {"device=cuda"};
  overrides.insert(overrides.end(), options.overrides.begin(), options.overrides.end());
  if (!options.dtype.empty()) overrides.push_back("dtype=" + options.dtype);
  const RunSettings settings = load_settings<RunSettings>(options.run, overrides);
  const DeviceProfile device = built_in_profile(options.device, settings.dtype);
  const MemoryPlan plan = plan_memory(settings, device, memory_of_profile(device), options.ranks);
  if (options.json) print_json(to_json(plan));
  else print_text(memory_table(plan));
  if (!plan.shortage.empty()) throw UserError(plan.shortage);
}

void run_plan(const PlanOptions& options, const std::vector<std::string>& given) {
  if (!options.run.empty()) return plan_run(options, given);
  if (options.rollouts.empty())
    throw UserError("--rollouts FILE is missing, or --run CONFIG for the memory of a run on a GPU");
  if (!options.overrides.empty())
    throw UserError(str("got ", quoted(options.overrides[0]), "; settings belong to --run CONFIG"));
  if (options.max_tokens_per_mb)
    check_at_least("--max-tokens-per-mb", *options.max_tokens_per_mb, 1, "a pass holds at least one token");
  check_at_least("--ranks", options.ranks, 1);
  check_at_least("--stages", options.stages, 1);
  check_packer("--packer", options.packer);
  TreeTrainingSettings tree_training{
      .gradient_checkpointing = parse_choice("--gradient-checkpointing", options.gradient_checkpointing),
      .activation_offload = parse_choice("--activation-offload", options.activation_offload)};
  tree_training.check();
  check_offload("--activation-offload", tree_training.offload(), options.device == "cpu");
  check_at_least("--max-running", options.max_running, 1);
  const SparseAttention sparse = priced_attention(options.sparse);
  if (!options.html.empty()) check_output_file("--html", options.html);
  if (!options.svg.empty()) check_output_file("--svg", options.svg);
  const auto memory = parse_memory("--memory", options.memory);
  const std::vector<Trajectory> rollouts =
      read_rollouts(options.rollouts, {.require_reward_or_advantage = false});
  const CostModel costs = cost_model_of(options);
  if (options.stages > costs.shape().num_layers)
    throw UserError(str("--stages: got ", options.stages, ", expected at most ", costs.shape().num_layers,
                        ", the layers of the model"));
  const std::vector<TokenSpan> sequences = token_spans(rollouts);
  const PrefixTree tree = build_prefix_tree(sequences);
  const PlanRequest request{.sequences = sequences,
                            .trained = trained_flags(rollouts),
                            .max_tokens_per_pass = options.max_tokens_per_mb.value_or(
                                options.device == "cpu" ? kDefaultMaxTokensPerPass : kMaxTokensPerPassOfGpu),
                            .memory_bytes = memory,
                            .costs = &costs,
                            .packer = options.packer,
                            .layers = tree_training.layers(),
                            .offload = tree_training.offload(),
                            .pipeline = {.num_stages = options.stages}};
  const Pipeline pipeline{.num_stages = options.stages};
  PlanReport report{.tree = compute_statistics(tree),
                    .work_ratio = count_work(tree, request.trained, work_model(costs.shape())).ratio(),
                    .max_tokens_per_mb = request.max_tokens_per_pass,
                    .stages = options.stages};
  const auto names = strategy_names();  // auto comes first in the list and is shown last
  for (size_t i = 1; i <= names.size(); ++i)
    report.strategies.push_back(
        cost_of(std::string(names[i % names.size()]), request, costs, memory.has_value()));
  report.ranks = rank_costs(tree, request, costs.shape(), options.ranks);
  const std::vector<SampledGroup> groups = groups_of(rollouts);
  const Plan& chosen = report.of("auto").plan;
  report.dense_iteration = iteration_cost(groups, chosen, costs, {}, options.max_running, pipeline);
  if (sparse.is_sparse())
    report.sparse_iteration = iteration_cost(groups, chosen, costs, sparse, options.max_running, pipeline);
  if (!options.svg.empty()) write_file_atomically(options.svg, plan_svg(picture_of(report.of("auto"))));
  if (!options.html.empty())
    write_file_atomically(options.html, tree_page(tree, rollouts, options.rollouts, reuse_note(report)));
  const std::string text = readable_report(report, costs) +
                           iteration_table(report, options.max_running, options.sparse.budget_text());
  if (!options.json) return print_text(text);
  Json json = report_json(report);
  json["text"] = text;
  print_json(json);
}

}  // namespace

void add_plan_command(CommandLine& line) {
  auto options = std::make_shared<PlanOptions>();
  auto self = std::make_shared<std::optional<Command>>();
  Command command =
      line.add("plan", "Shows how much a rollout file shares, and what each strategy would cost on a device",
               [options, self] { run_plan(*options, (*self)->given_options()); });
  *self = command;
  command.add_option("--rollouts", options->rollouts, "Rollout file, .jsonl or .jsonl.zst").type_name("FILE");
  command
      .add_option("--run", options->run,
                  "YAML file of a run: what its parts take of a GPU's memory (--device), and\n"
                  "whether it fits; --ranks of them train")
      .type_name("CONFIG");
  command.add_option("settings", options->overrides, "With --run: settings that override the file")
      .type_name("key=value");
  command.add_option("--model", options->model, "Hugging Face directory; only config.json is read")
      .type_name("DIR");
  command
      .add_option("--shape", options->shape,
                  "small | qwen3-0.6b | qwen3-1.7b | qwen3-4b | qwen3-8b | qwen3-14b\n(default: qwen3-0.6b)")
      .type_name("NAME");
  command
      .add_option("--device", options->device,
                  "cpu: this machine, measured once | h100 | h200 | a100: published rates")
      .type_name("NAME");
  command.add_option("--dtype", options->dtype, "fp32 | bf16 (default: fp32 on the CPU, else bf16)");
  command
      .add_option("--memory", options->memory,
                  "Budget over weights and gradients, such as 40GiB; if no plan fits, the batch is refused")
      .type_name("BYTES");
  command.add_option("--max-running", options->max_running, "Samples generated at once").type_name("N");
  add_sparse_options(command, options->sparse);
  command.add_option("--ranks", options->ranks, "Balance the batch over K devices").type_name("K");
  command
      .add_option("--stages", options->stages, "Each rank is a pipeline of P devices, which split the layers")
      .type_name("P");
  command
      .add_option("--max-tokens-per-mb", options->max_tokens_per_mb,
                  str("Most tokens of a pass (default: ", kDefaultMaxTokensPerPass, " on the CPU, else ",
                      kMaxTokensPerPassOfGpu, ")"))
      .type_name("B");
  command
      .add_option("--packer", options->packer,
                  str("Packer by which the strategy packed cuts the batch into trees: ",
                      format_choices(packer_names())))
      .type_name("NAME");
  command
      .add_option("--gradient-checkpointing", options->gradient_checkpointing,
                  "true: every pass recomputes its layers in backward | false: none does\n"
                  "(default: if --memory makes that the fastest plan, or the only one)")
      .type_name("BOOL");
  command
      .add_option(
          "--activation-offload", options->activation_offload,
          "true: passes that recompute their layers keep the layer inputs in host memory | false: none "
          "does\n(default: if --memory leaves no room for them)")
      .type_name("BOOL");
  command.add_option("--html", options->html, "Write a page with the picture of the tree").type_name("FILE");
  command.add_option("--svg", options->svg, "Write the picture of the chosen plan, one color per block")
      .type_name("FILE");
  add_json_flag(command, options->json);
}

}  // namespace bough
