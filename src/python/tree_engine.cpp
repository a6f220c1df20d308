#include "python/tree_engine.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdlib>

#include "base/cpu.h"
#include "base/error.h"
#include "base/json.h"
#include "cost/calibrate.h"
#include "cost/run_costs.h"
#include "kernels/common/cpu_allocator.h"
#include "kernels/common/cuda_library.h"
#include "kernels/common/device.h"
#include "models/decoder_cost.h"
#include "models/lora.h"
#include "plan/plan.h"
#include "train/make_batch.h"
#include "train/pass_memory.h"
#include "train/plan_execution.h"
#include "tree/prefix_tree.h"

namespace bough {

namespace {

// Passes the type of the exception on to Python (kUserError), and gives the process our allocator meanwhile.
template <class Function>
auto guarded(Function&& function) {
  try {
    const CpuAllocatorScope allocator;
    return function();
  } catch (const UserError& error) {
    throw std::runtime_error(str(kUserError, error.what()));
  }
}

CouplingScope coupling_named(const std::string& name) {
  if (name == "token") return CouplingScope::kNothing;
  if (name == "sequence") return CouplingScope::kSequence;
  if (name == "batch") return CouplingScope::kBatch;
  throw UserError(str("couples: got ", quoted(name), ", expected token, sequence or batch"));
}

// Bytes of the activations of a plan of leaf blocks, all held at once, and the largest temporaries.
int64_t held_bytes(const Plan& plan, const PassCosts& costs) {
  int64_t held = 0, temporary = 0;
  for (const PlannedTree& planned : plan.trees)
    for (const Block& block : planned.blocks) {
      if (!block.needed) continue;
      held += block.num_tokens * costs.kept_bytes(block.keep) + block.num_loss_rows * costs.row_bytes();
      temporary = std::max(temporary, costs.temporary_bytes(block.shape(), block.keep));
    }
  return held + temporary;
}

struct ForwardSeconds {
  double layers = 0, head = 0;
};
ForwardSeconds forward_seconds(const Plan& plan, const PassCosts& costs) {
  ForwardSeconds sum;
  for (const PlannedTree& planned : plan.trees)
    for (const Block& block : planned.blocks) {
      if (!block.needed) continue;
      sum.layers += costs.forward_seconds(block.shape());
      sum.head += costs.head_forward_seconds(block.shape());
    }
  return sum;
}

struct PricedPlan {
  Plan plan;
  Simulation simulation;
  ForwardSeconds forward;
  double seconds = 0;  // of the whole computation
  int64_t bytes = 0;
  bool holds = false;  // all activations, between forward and backward
};
PricedPlan price(Plan plan, const PassCosts& costs) {
  const Simulation simulation = simulate(plan, &costs);
  const ForwardSeconds forward = forward_seconds(plan, costs);
  return {std::move(plan), simulation, forward, simulation.seconds, simulation.peak_bytes};
}

// Replaces `chosen` by a plan that holds all activations, if one fits into `budget` bytes and is not slower.
void hold_if_faster(const std::string& strategy, PlanRequest request, int64_t budget, PricedPlan& chosen) {
  request.memory_bytes.reset();
  request.layers = LayerRecompute::kNever;
  for (const TokenSpan& sequence : request.sequences)
    request.max_tokens_per_pass =
        std::max(request.max_tokens_per_pass, static_cast<int64_t>(sequence.size()));
  for (const char* const name : {"packed", "dense"}) {
    if (strategy != "auto" && strategy != name) continue;
    PricedPlan candidate = price(make_plan(name, request), *request.costs);
    if (!has_only_leaf_blocks(candidate.plan)) continue;
    candidate.seconds += candidate.forward.head;  // backward computes the logits again
    candidate.bytes = held_bytes(candidate.plan, *request.costs);
    candidate.holds = true;
    if (candidate.bytes <= budget && candidate.seconds <= chosen.seconds) chosen = std::move(candidate);
  }
}

}  // namespace

// Instead of a head: stores the hidden states of the loss rows, or passes their gradients on.
class HiddenHead final : public BlockHead {
 public:
  // One of the two is defined: [R, D], to be filled in, or its gradient in the accumulator type.
  HiddenHead(const at::Tensor& hidden_RD, const at::Tensor& d_hidden_RD)
      : hidden_RD_(hidden_RD), d_hidden_RD_(d_hidden_RD) {}

  at::Tensor run(const BlockRows& /*rows*/, const RowIndices& indices, const at::Tensor& source_SD) override {
    const at::NoGradGuard no_grad;
    const at::Tensor sources_L = indices.sources.index_select(0, indices.head_rows);
    if (hidden_RD_.defined()) {
      hidden_RD_.index_copy_(0, indices.loss_rows, source_SD.index_select(0, sources_L));
      return {};
    }
    const at::Tensor d_source_SD = at::zeros(source_SD.sizes(), d_hidden_RD_.options());
    add_rows_(d_source_SD, sources_L, d_hidden_RD_.index_select(0, indices.loss_rows));
    return d_source_SD;
  }

 private:
  const at::Tensor hidden_RD_, d_hidden_RD_;
};

// State of this thread while the engine computes: no autocast, in which libtorch would round the factors of
// products, and a count of the peak memory.
class TreeEngine::Computation {
 public:
  explicit Computation(TreeEngine& engine)
      : engine_(engine),
        device_(engine.model_->device()),
        had_autocast_(at::autocast::is_autocast_enabled(device_.type())),
        peak_(device_) {
    at::autocast::set_autocast_enabled(device_.type(), false);
  }
  ~Computation() {
    at::autocast::set_autocast_enabled(device_.type(), had_autocast_);
    engine_.peak_bytes_ = peak_.bytes();
  }
  Computation(const Computation&) = delete;
  Computation& operator=(const Computation&) = delete;

 private:
  TreeEngine& engine_;
  const at::Device device_;
  const bool had_autocast_;
  const PeakBytes peak_;
};

// A loss that Python computes.
class PythonLoss final : public Loss {
 public:
  PythonLoss(TreeEngine& engine, int64_t callback, CouplingScope coupling)
      : engine_(engine), callback_(reinterpret_cast<int (*)()>(callback)), coupling_(coupling) {}

  CouplingScope coupling() const override { return coupling_; }
  bool needs_advantages() const override { return false; }
  bool needs_behaviour() const override { return false; }
  bool needs_proximal() const override { return false; }
  bool needs_reference() const override { return false; }
  bool needs_entropy() const override { return true; }

  LossOutput operator()(const LossRows& rows) const override {
    engine_.rows_ = {rows.log_probs_R, rows.entropies_R, rows.rows_R};
    engine_.loss_.reset();
    const int failed = callback_();
    engine_.rows_ = {};
    const at::Tensor loss = std::exchange(engine_.loss_, {});
    if (failed != 0) throw UserError("loss_fn raised an exception");
    BOUGH_CHECK(loss.defined() && loss.dim() == 0, "the callback returned without a loss");
    LossOutput output;
    output.loss = loss.to(rows.log_probs_R.options());
    // A loss of rows that the function leaves out altogether has no graph.
    if (!output.loss.requires_grad()) output.loss = output.loss + rows.log_probs_R.sum() * 0;
    return output;
  }

 private:
  TreeEngine& engine_;
  int (*callback_)();
  CouplingScope coupling_;
};

EngineBatch::EngineBatch(const at::Tensor& tokens_N, const at::Tensor& lengths_S, const at::Tensor& trained_N,
                         double temperature, int64_t vocab_size)
    : tokens_(tokens_N.const_data_ptr<int32_t>(), tokens_N.const_data_ptr<int32_t>() + tokens_N.numel()) {
  const auto* const lengths = lengths_S.const_data_ptr<int64_t>();
  const auto* const trained = trained_N.const_data_ptr<uint8_t>();
  batch_.temperature = temperature;
  batch_.row_offset.push_back(0);
  std::vector<int64_t> row_sequences;
  int64_t begin = 0;
  for (int64_t s = 0; s < lengths_S.numel(); ++s) {
    std::vector<int32_t>& positions = batch_.trained_positions.emplace_back();
    for (int64_t i = 0; i < lengths[s]; ++i) {
      const int32_t token = tokens_[static_cast<size_t>(begin + i)];
      if (token < 0 || token >= vocab_size)
        throw UserError(str("sequence ", s, ", position ", i, ": got token id ", token, ", expected 0 to ",
                            vocab_size - 1, " (vocab_size of the model)"));
      if (trained[begin + i] == 0) continue;
      if (i == 0)
        throw UserError(str("sequence ", s,
                            ": its first token is marked as trained, but no token comes before "
                            "it; expected 0 there"));
      positions.push_back(static_cast<int32_t>(i));
      row_sequences.push_back(s);
    }
    batch_.sequences.emplace_back(tokens_.data() + begin, static_cast<size_t>(lengths[s]));
    batch_.row_offset.push_back(static_cast<int64_t>(row_sequences.size()));
    begin += lengths[s];
  }
  BOUGH_CHECK(begin == tokens_N.numel() && begin == trained_N.numel(), "the lengths sum to ", begin, ", got ",
              tokens_N.numel(), " tokens and ", trained_N.numel(), " flags");
  batch_.fields.sequences_R = at::tensor(row_sequences, at::kLong);
  batch_.fields.rows_R = at::arange(batch_.num_rows(), at::kLong);
}

TreeEngine::TreeEngine(const std::string& config, const std::string& dtype, const std::string& device,
                       bool has_lm_head) {
  guarded([&] {
    if (device != "cpu" && device != "cuda")
      throw UserError(str("device: got ", quoted(device), ", expected cpu or cuda"));
    if (device == "cuda") open_cuda_library(/*sets_allocator=*/false);
    ModelConfig parsed = parse_model_config(Json::parse(config), "the model's config");
    if (!has_lm_head) {
      parsed.tie_word_embeddings = true;  // no weights in addition to the embedding
      parsed.computes_logits = false;
    }
    model_ = make_model_without_weights(parsed, scalar_type_of(dtype), at::Device(device));
  });
}

std::tuple<std::vector<std::string>, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>
TreeEngine::parts(bool adapters) const {
  std::vector<std::string> names;
  std::vector<int64_t> index, begin, end;
  const auto parameters = adapters ? model_->trained_parameters() : model_->parameters();
  for (size_t i = 0; i < parameters.size(); ++i)
    for (const Parameter::Part& part : parameters[i]->parts) {
      names.push_back(part.name);
      index.push_back(static_cast<int64_t>(i));
      begin.push_back(part.begin);
      end.push_back(part.end);
    }
  return {names, index, begin, end};
}

std::vector<std::vector<int64_t>> TreeEngine::shapes(bool adapters) const {
  std::vector<std::vector<int64_t>> shapes;
  for (const Parameter* parameter : adapters ? model_->trained_parameters() : model_->parameters())
    shapes.push_back(parameter->value.sizes().vec());
  return shapes;
}

void TreeEngine::set_weight(bool adapters, int64_t parameter, const at::Tensor& value) {
  Parameter& to =
      *(adapters ? model_->trained_parameters() : model_->parameters()).at(static_cast<size_t>(parameter));
  BOUGH_CHECK(value.sizes() == to.value.sizes() && value.scalar_type() == model_->dtype() &&
                  value.device().type() == model_->device().type() && value.is_contiguous(),
              "parameter ", parameter, ": got ", value.toString(), " ", value.sizes(), ", expected ",
              to.value.sizes());
  to.value = value.detach();
}

void TreeEngine::set_adapted_modules(const std::vector<std::string>& modules, int64_t rank, double scale) {
  guarded([&] { bough::set_adapted_modules(*model_, modules, rank, scale); });
}

BatchHandle TreeEngine::make_batch(const at::Tensor& tokens_N, const at::Tensor& lengths_S,
                                   const at::Tensor& trained_N, double temperature) const {
  return guarded([&] {
    const ModelConfig& config = model_->config();
    auto batch =
        c10::make_intrusive<EngineBatch>(tokens_N, lengths_S, trained_N, temperature, config.vocab_size);
    for (size_t s = 0; s < batch->batch_.sequences.size(); ++s)
      if (const auto length = static_cast<int64_t>(batch->batch_.sequences[s].size());
          length > config.max_exact_length)
        throw UserError(str("sequence ", s, ": got ", length, " tokens, expected at most ",
                            config.max_exact_length, " for this model: ", config.beyond_exact_length));
    return batch;
  });
}

const CostModel& TreeEngine::costs() {
  if (!costs_) {  // may measure the device, with gradients
    const Computation computation(*this);
    const c10::InferenceMode no_inference(false);
    const at::AutoGradMode with_gradients(true);
    costs_ = model_costs(*model_, {});
    if (!model_->config().computes_logits) costs_ = critic_costs(*costs_, *model_);
  }
  return *costs_;
}

std::string TreeEngine::plan(const BatchHandle& handle, const std::string& strategy,
                             int64_t max_tokens_per_pass, int64_t memory_bytes, bool separate) {
  return guarded([&] {
    EngineBatch& batch = *handle;
    const bool on_gpu = !model_->device().is_cpu();
    if (max_tokens_per_pass == 0)
      max_tokens_per_pass = on_gpu ? kMaxTokensPerPassOfGpu : kDefaultMaxTokensPerPass;
    PlanRequest request = plan_request(batch.batch_, max_tokens_per_pass);
    request.costs = &costs();
    if (memory_bytes > 0 || on_gpu)
      request.memory_bytes =
          memory_bytes > 0 ? memory_bytes
                           : static_cast<int64_t>(kShareOfFreeMemory * device_memory(model_->device()).free);
    PricedPlan plan = price(make_plan(strategy, request), costs());
    if (separate) {
      plan.seconds += plan.forward.layers + plan.forward.head;
      const int64_t budget =
          memory_bytes > 0 ? memory_bytes : static_cast<int64_t>(0.5 * device_memory(model_->device()).free);
      hold_if_faster(strategy, request, budget, plan);
    }
    const PrefixTree tree = build_prefix_tree(batch.batch_.sequences);
    const TreeStatistics statistics = compute_statistics(tree);
    const Json description = {
        {"strategy", plan.plan.strategy},
        {"max_tokens_per_pass", plan.plan.max_tokens_per_pass},
        {"passes", plan.simulation.num_passes},
        {"tokens", statistics.num_flat_tokens},
        {"tree_tokens", statistics.num_tree_tokens},
        {"compression", statistics.compression},
        {"work_ratio", count_work(tree, request.trained, work_model(costs().shape())).ratio()},
        {"seconds", plan.seconds},
        {"bytes", plan.bytes},
        {"holds_activations", plan.holds},
        {"tokens_recomputed", plan.simulation.tokens_recomputed}};
    batch.plan_ = std::move(plan.plan);
    batch.holds_ = plan.holds;
    return dump_line(description);
  });
}

std::tuple<at::Tensor, at::Tensor> TreeEngine::forward(const BatchHandle& handle, bool holds) {
  return guarded([&]() -> std::tuple<at::Tensor, at::Tensor> {
    EngineBatch& batch = *handle;
    BOUGH_CHECK(batch.plan_, "the batch has no plan");
    const Computation computation(*this);
    Executor executor(*model_);
    if (holds && batch.holds_) {
      hold_gradients(batch);
      batch.held_ = executor.execute_held(*batch.plan_, batch.batch_);
      return {batch.held_->values().log_probs_R, batch.held_->values().entropies_R};
    }
    const RowValues values = executor.execute_forward(*batch.plan_, batch.batch_);
    return {values.log_probs_R, values.entropies_R};
  });
}

void TreeEngine::backward(const BatchHandle& handle, const at::Tensor& d_log_probs_R,
                          const at::Tensor& d_entropies_R) {
  guarded([&] {
    EngineBatch& batch = *handle;
    const Computation computation(*this);
    const Seeds seeds{d_log_probs_R, d_entropies_R, {}};
    if (!batch.held_) {
      zero_gradients();
      Executor(*model_).add_gradient(*batch.plan_, batch.batch_, seeds);
      return;
    }
    std::exchange(batch.held_, nullptr)->backward(seeds);
    return_gradients(batch);
  });
}

at::Tensor TreeEngine::hidden(const BatchHandle& handle, bool holds) {
  return guarded([&] {
    EngineBatch& batch = *handle;
    const Computation computation(*this);
    const at::Tensor hidden_RD =
        at::zeros({batch.num_rows(), model_->config().hidden_size},
                  at::TensorOptions().dtype(model_->dtype()).device(model_->device()));
    HiddenHead head(hidden_RD, {});
    if (holds && batch.holds_) {
      hold_gradients(batch);
      batch.held_hidden_ = std::make_unique<TwoPhases>(*model_, options_, *batch.plan_, batch.batch_,
                                                       std::vector<BlockHead*>{&head});
    } else {
      Executor(*model_).execute_head(*batch.plan_, batch.batch_, head, /*backward=*/false);
    }
    return hidden_RD;
  });
}

void TreeEngine::hidden_backward(const BatchHandle& handle, const at::Tensor& d_hidden_RD) {
  guarded([&] {
    EngineBatch& batch = *handle;
    const Computation computation(*this);
    HiddenHead head({}, d_hidden_RD);
    if (!batch.held_hidden_) {
      zero_gradients();
      Executor(*model_).execute_head(*batch.plan_, batch.batch_, head, /*backward=*/true);
      return;
    }
    std::exchange(batch.held_hidden_, nullptr)->backward({&head});
    return_gradients(batch);
  });
}

void TreeEngine::hold_gradients(EngineBatch& batch) {
  zero_gradients();
  batch.gradients_ = gradients();
}

void TreeEngine::return_gradients(EngineBatch& batch) {
  const std::vector<Parameter*> parameters = model_->trained_parameters();
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i]->main_grad = batch.gradients_[i];
  batch.gradients_.clear();
}

std::tuple<double, at::Tensor, at::Tensor> TreeEngine::step(const BatchHandle& handle, int64_t callback,
                                                            const std::string& coupling) {
  return guarded([&]() -> std::tuple<double, at::Tensor, at::Tensor> {
    const Computation computation(*this);
    zero_gradients();
    const PythonLoss loss(*this, callback, coupling_named(coupling));
    const ExecutionResult result = Executor(*model_).execute(*handle->plan_, handle->batch_, loss);
    synchronize(model_->device());
    return {result.loss, result.values.log_probs_R, result.values.entropies_R};
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> TreeEngine::rows() const {
  BOUGH_CHECK(std::get<0>(rows_).defined(), "rows() is called outside of the loss function");
  return rows_;
}

void TreeEngine::set_loss(const at::Tensor& loss) {
  loss_ = loss;
}

std::vector<at::Tensor> TreeEngine::gradients() {
  std::vector<at::Tensor> gradients;
  for (const Parameter* parameter : model_->trained_parameters()) gradients.push_back(parameter->main_grad);
  return gradients;
}

void TreeEngine::zero_gradients() {
  for (Parameter* parameter : model_->trained_parameters()) {
    at::Tensor& gradient = parameter->main_grad;
    if (gradient.defined() && (gradient.use_count() > 1 || gradient.storage().use_count() > 1))
      gradient.reset();
  }
  model_->zero_gradients();
  model_->allocate_gradients();
}

}  // namespace bough

TORCH_LIBRARY_FRAGMENT(bough, m) {
  // Returns whether it set the environment variable ONEDNN_MAX_CPU_ISA (base/cpu.h).
  m.def("apply_cpu_workarounds", [] {
    const bool was_set = std::getenv("ONEDNN_MAX_CPU_ISA");
    bough::apply_cpu_workarounds();
    return !was_set && std::getenv("ONEDNN_MAX_CPU_ISA");
  });
  m.class_<bough::EngineBatch>("EngineBatch").def("num_rows", &bough::EngineBatch::num_rows);
  m.class_<bough::TreeEngine>("TreeEngine")
      .def(torch::init<const std::string&, const std::string&, const std::string&, bool>())
      .def("parts", &bough::TreeEngine::parts)
      .def("shapes", &bough::TreeEngine::shapes)
      .def("set_weight", &bough::TreeEngine::set_weight)
      .def("set_adapted_modules", &bough::TreeEngine::set_adapted_modules)
      .def("make_batch", &bough::TreeEngine::make_batch)
      .def("plan", &bough::TreeEngine::plan)
      .def("forward", &bough::TreeEngine::forward)
      .def("backward", &bough::TreeEngine::backward)
      .def("hidden", &bough::TreeEngine::hidden)
      .def("hidden_backward", &bough::TreeEngine::hidden_backward)
      .def("step", &bough::TreeEngine::step)
      .def("rows", &bough::TreeEngine::rows)
      .def("set_loss", &bough::TreeEngine::set_loss)
      .def("gradients", &bough::TreeEngine::gradients)
      .def("peak_bytes", &bough::TreeEngine::peak_bytes);
}
