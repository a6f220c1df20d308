#include "train/executor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "train/head.h"
#include "train/parallel_groups.h"
#include "train/plan_execution.h"

namespace bough {

namespace {

// Throws if a sequence exceeds the length up to which the model is computed exactly. Beyond this length, a
// common prefix would have other hidden states in each sequence, because its rotary angles depend on the
// sequence's length, or the computed model would not be the one that the config defines.
void check_lengths(const ModelConfig& config, const TrainBatch& batch) {
  for (size_t s = 0; s < batch.sequences.size(); ++s)
    if (static_cast<int64_t>(batch.sequences[s].size()) > config.max_exact_length)
      throw UserError(str("sequence ", s + 1, " of the batch has ", batch.sequences[s].size(),
                          " tokens; expected at most ", config.max_exact_length, ", for this model: ",
                          config.beyond_exact_length, "; leave the sequence out, or shorten it"));
}

// Allocates the values of all loss rows, on the model's device.
void allocate_values(const Model& model, const TrainBatch& batch, int64_t top_k, RowValues& values) {
  const auto type = at::TensorOptions().dtype(accumulator_type(model.dtype())).device(model.device());
  const int64_t num_rows = batch.num_rows();
  values.log_probs_R = at::zeros({num_rows}, type);
  values.entropies_R = at::zeros({num_rows}, type);
  if (batch.top_k_ids_RK.defined())
    values.top_k_log_probs_RK = at::zeros({num_rows, batch.top_k_ids_RK.size(1)}, type);
  if (top_k == 0) return;
  values.top_ids_RK = at::zeros({num_rows, top_k}, type.dtype(at::kLong));
  values.top_log_probs_RK = at::zeros({num_rows, top_k}, type);
}

class HeldExecution final : public HeldForward {
 public:
  HeldExecution(Model& model, const ExecutorOptions& options, const Plan& plan, const TrainBatch& batch)
      : model_(model), options_(options), batch_(batch) {
    allocate_values(model, batch, /*top_k=*/0, result_.values);
    Head head(model, batch, {.chunk_rows = options.head_chunk_rows}, &result_);
    phases_.emplace(model_, options_, plan, batch, std::vector<BlockHead*>{&head});
    values_.log_probs_R = result_.values.log_probs_R.cpu();
    values_.entropies_R = result_.values.entropies_R.cpu();
  }
  void backward(const Seeds& seeds) override {
    Head head(model_, batch_, {.seeds = &seeds, .chunk_rows = options_.head_chunk_rows}, &result_);
    phases_->backward({&head});
  }

 private:
  Model& model_;
  const ExecutorOptions options_;
  const TrainBatch& batch_;
  ExecutionResult result_;
  std::optional<TwoPhases> phases_;
};

// Metrics of what the passes replayed, and of a mixture's load.
void add_count_metrics(const BlockCounts& counts, const ExecutorOptions& options, const TrainBatch& batch,
                       WeightedSums& metrics) {
  const auto share = [](int64_t part, int64_t of) {
    return WeightedSum{WeightedSum::Kind::mean, static_cast<double>(part), static_cast<double>(of)};
  };
  if (options.sparse.is_sparse() && batch.replayed && !batch.replayed->empty()) {
    metrics["sparse/replayed"] = share(counts.replays.replayed, counts.replays.lists);
    metrics["sparse/choices_differ"] = share(counts.replays.different, counts.replays.replayed);
  }
  const RouteCounts& routes = counts.routes;
  if (options.replays_experts) {
    const auto number = [](const at::Tensor& sum) { return sum.defined() ? sum.item<int64_t>() : 0; };
    metrics["experts/routes_differ"] = share(number(routes.different), number(routes.records));
    metrics["experts/tokens_differ"] = share(number(routes.different_tokens), number(routes.tokens));
  }
  // Over the layers: the largest number of tokens of an expert, divided by the mean, and the share of experts
  // with tokens.
  for (const at::Tensor& on_device : routes.loads) {
    const at::Tensor load_E = on_device.cpu();
    const double mean = load_E.sum().item<double>() / static_cast<double>(load_E.numel());
    if (mean == 0) continue;
    merge(metrics, {{"experts/load_max", {WeightedSum::Kind::mean, load_E.max().item<double>() / mean, 1}},
                    {"experts/used", share(load_E.count_nonzero().item<int64_t>(), load_E.numel())}});
  }
}

// Sums of a plan execution's routers over the ranks, as the experts' shares of all choices. CPU, fp64.
at::Tensor shares_of(const RouterSums& sums, const Model& model, const TrainBatch& batch,
                     Communicator* ranks) {
  at::Tensor choices_E = sums.choices_E.defined() ? sums.choices_E.cpu().to(at::kDouble)
                                                  : at::zeros({model.config().num_experts}, at::kDouble);
  if (ranks)
    ranks->all_reduce(
        std::span(choices_E.mutable_data_ptr<double>(), static_cast<size_t>(choices_E.numel())));
  return choices_E.mul_(router_loss_scale(model.config(), batch));
}

// The losses of the routers in this rank's passes, without coefficients.
void add_router_metrics(const RouterSums& sums, const Model& model, const ExecutorOptions& options,
                        const TrainBatch& batch, WeightedSums& metrics) {
  if (!sums.squares.defined()) return;
  const double scale = router_loss_scale(model.config(), batch);
  const auto add = [&](const char* name, double value) {
    metrics[name] = {WeightedSum::Kind::sum, value, 1};
  };
  if (options.expert_shares_E.defined())
    add("experts/aux_loss",
        static_cast<double>(model.config().num_experts) * scale *
            at::dot(options.expert_shares_E, sums.probabilities_E.cpu().to(at::kDouble)).item<double>());
  if (options.router_losses.router_z_loss_coef > 0)
    add("experts/z_loss", scale * sums.squares.item<double>());
}

// Runs the policy's head with `head_options` and, if it is not nullptr, the head `beside`. Sets *sums unless
// it is nullptr.
ExecutionResult execute_policy_head(Model& model, const ExecutorOptions& options, const Plan& plan,
                                    const TrainBatch& batch, Head::Options head_options,
                                    BlockHead* beside = nullptr, RouterSums* sums = nullptr) {
  BOUGH_CHECK(!options.sparse.is_sparse() || (batch.marked && model.device().is_cpu()),
              "a sparse policy needs the CPU and marks of sampled tokens");
  check_lengths(model.config(), batch);
  if (options.context_ranks && options.context_ranks->size() > 1)
    BOUGH_CHECK(!options.sparse.is_sparse() && !model.batch_invariant(),
                "context parallelism supports dense attention only");
  if (model.stage().size > 1)
    BOUGH_CHECK(!options.sparse.is_sparse(), "pipeline parallelism supports dense attention only");
  ExecutionResult result;
  RowValues& values = result.values;
  head_options.chunk_rows = options.head_chunk_rows;
  head_options.top_k = std::min(head_options.top_k, model.config().vocab_size);
  allocate_values(model, batch, head_options.top_k, values);
  std::optional<Head> head;
  std::vector<BlockHead*> heads;
  if (model.stage().is_last()) heads.push_back(&head.emplace(model, batch, head_options, &result));
  if (beside) heads.push_back(beside);
  const BlockCounts counts = execute_blocks(model, options, plan, batch, heads,
                                            /*backward=*/head_options.loss || head_options.seeds);
  result.num_uploads = counts.num_uploads;
  if (head) head->finish();
  for (at::Tensor* each : {&values.log_probs_R, &values.entropies_R, &values.top_k_log_probs_RK,
                           &values.top_ids_RK, &values.top_log_probs_RK})
    if (each->defined()) *each = each->cpu();
  add_count_metrics(counts, options, batch, result.metrics);
  add_router_metrics(counts.router_sums, model, options, batch, result.metrics);
  if (sums) *sums = counts.router_sums;
  if (options.ranks) {
    sum_values(values, *options.ranks);
    if (head_options.loss || head_options.seeds) sum_losses(result.loss, result.metrics, *options.ranks);
  }
  return result;
}

}  // namespace

bool needs_values_first(const Plan& plan, const Loss& loss) {
  if (loss.token_separable()) return false;
  size_t num_blocks = 0;
  for (const PlannedTree& planned : plan.trees) {
    num_blocks += planned.blocks.size();
    // A block that has no parent block and is not interior contains all tokens of each of its sequences.
    for (const Block& block : planned.blocks)
      if (block.interior || block.above >= 0) return true;
  }
  return loss.coupling() == CouplingScope::kBatch && num_blocks > 1;
}

Executor::Executor(Model& model, ExecutorOptions options)
    : model_(model), router_losses_(std::exchange(options.router_losses, {})), options_(std::move(options)) {
  if (options_.context_ranks && options_.context_ranks->size() > 1 && model.config().is_mixture())
    throw UserError(str("context parallelism: got ", options_.context_ranks->size(),
                        " ranks for a mixture of experts (", model.config().family->name,
                        "); expected 1 (c1)"));
}

RowValues Executor::execute_forward(const Plan& plan, const TrainBatch& batch,
                                    const ForwardRequest& request) {
  ExecutorOptions options = options_;
  options.routed_experts = request.routed_experts;
  return execute_policy_head(model_, options, plan, batch, {.top_k = request.top_k}).values;
}

void Executor::add_gradient(const Plan& plan, const TrainBatch& batch, const Seeds& seeds) {
  model_.allocate_gradients();
  execute_policy_head(model_, options_, plan, batch, {.seeds = &seeds});
}

std::unique_ptr<HeldForward> Executor::execute_held(const Plan& plan, const TrainBatch& batch) {
  check_lengths(model_.config(), batch);
  model_.allocate_gradients();
  return std::make_unique<HeldExecution>(model_, options_, plan, batch);
}

at::Tensor Executor::expert_shares(const Plan& plan, const TrainBatch& batch) {
  check_lengths(model_.config(), batch);
  ExecutorOptions options = options_;
  options.router_losses = router_losses_;
  const BlockCounts counts = execute_blocks(model_, options, plan, batch, {}, /*backward=*/false);
  return shares_of(counts.router_sums, model_, batch, options_.ranks);
}

void Executor::execute_head(const Plan& plan, const TrainBatch& batch, BlockHead& head, bool backward) {
  check_lengths(model_.config(), batch);
  if (backward) model_.allocate_gradients();
  execute_blocks(model_, options_, plan, batch, {&head}, backward);
}

// Whether this rank, or another one that computes the batch with it, needs a plan execution for the values of
// all loss rows before the one with gradients.
bool Executor::runs_values_first(const Plan& plan, const Loss& loss) const {
  if (loss.token_separable()) return false;
  if (options_.context_ranks && options_.context_ranks->size() > 1) return true;  // no rank has a whole block
  double wanted = needs_values_first(plan, loss);
  if (options_.ranks) {  // the ranks must run the same passes, whatever their own plans need
    if (options_.ranks->size() > 1 && loss.coupling() == CouplingScope::kBatch) wanted = 1;
    options_.ranks->all_reduce(std::span<double>(&wanted, 1));
  }
  return wanted > 0;
}

ExecutionResult Executor::execute(const Plan& plan, const TrainBatch& batch, const Loss& loss,
                                  BlockHead* beside) {
  model_.allocate_gradients();
  ExecutorOptions options = options_;
  options.router_losses = router_losses_;
  const bool needs_shares = router_losses_.router_aux_loss_coef > 0 && !options.expert_shares_E.defined();
  if (!runs_values_first(plan, loss)) {
    if (needs_shares) options.expert_shares_E = expert_shares(plan, batch);
    return execute_policy_head(model_, options, plan, batch, {.loss = &loss}, beside);
  }
  RouterSums sums;
  const RowValues values =
      execute_policy_head(model_, needs_shares ? options : options_, plan, batch, {}, nullptr, &sums).values;
  if (needs_shares) options.expert_shares_E = shares_of(sums, model_, batch, options_.ranks);
  auto [out, seeds] =
      evaluate_loss(loss, batch.fields, values.log_probs_R, values.entropies_R, values.top_k_log_probs_RK);
  if (!seeds.d_log_probs_R.defined()) seeds.d_log_probs_R = at::zeros_like(values.log_probs_R);
  auto result = execute_policy_head(model_, options, plan, batch, {.seeds = &seeds}, beside);
  result.loss = out.loss.item<double>();
  merge(result.metrics, out.metrics);
  return result;
}

}  // namespace bough
