#include "tinker/training_model.h"

#include <ATen/ATen.h>

#include <cmath>

#include "base/error.h"
#include "base/log.h"
#include "cost/run_costs.h"
#include "kernels/common/device.h"
#include "models/checkpoint.h"
#include "models/lora.h"
#include "plan/plan.h"
#include "train/executor.h"
#include "train/pass_memory.h"

namespace bough {

namespace {

std::unique_ptr<Model> trained_model(const Model& base, const LoraSettings& adapter, uint64_t seed) {
  std::unique_ptr<Model> model = base.share();
  if (adapter.enabled()) {
    add_adapter(*model, adapter, seed);
    return model;
  }
  for (Parameter* parameter : model->parameters()) parameter->value = parameter->value.clone();
  model->allocate_gradients();
  return model;
}

OptimizerSettings optimizer_settings(const AdamParameters& parameters) {
  OptimizerSettings settings;
  settings.lr = parameters.learning_rate;
  settings.beta1 = parameters.beta1;
  settings.beta2 = parameters.beta2;
  settings.eps = parameters.eps;
  settings.weight_decay = parameters.weight_decay;
  settings.gradient_clipping = std::max(0.0, parameters.grad_clip_norm);
  settings.warmup_steps_proportion = 0;
  return settings;
}

std::vector<float> floats(const at::Tensor& values) {
  const at::Tensor flat = values.to(at::kFloat).contiguous();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}

}  // namespace

AdamParameters read_adam(Fields& fields) {
  if (const OrderedJson* other = fields.object("optimizer_params"))
    throw ApiError(400,
                   str("optimizer_params: got ", dump_ordered(*other).substr(0, 60),
                       ", expected adam_params: models are trained with AdamW"),
                   "optimizer_params");
  const OrderedJson* const given = fields.object("adam_params");
  if (!given) fields.wrong("adam_params", "the parameters of AdamW");
  Fields adam(*given, "adam_params");
  AdamParameters parameters;
  const auto read = [&](const char* name, double low, double high, double& value) {
    value = adam.number(name, low, high).value_or(value);
  };
  read("learning_rate", 0, 10, parameters.learning_rate);
  read("beta1", 0, 0.999999, parameters.beta1);
  read("beta2", 0, 0.9999999, parameters.beta2);
  read("eps", 1e-30, 1, parameters.eps);
  read("weight_decay", 0, 10, parameters.weight_decay);
  read("grad_clip_norm", -1e30, 1e30, parameters.grad_clip_norm);
  adam.done();
  return parameters;
}

TrainingModel::TrainingModel(const Model& base, const LoraSettings& adapter, uint64_t seed,
                             TrainingPlans plans)
    : model_(trained_model(base, adapter, seed)),
      plans_(std::move(plans)),
      optimizer_(std::make_unique<Optimizer>(*model_, optimizer_settings({}), 0)) {}

Plan TrainingModel::plan(const TinkerBatch& batch) {
  if (!costs_) costs_ = model_costs(*model_, {});
  const bool on_gpu = !model_->device().is_cpu();
  const int64_t tokens = plans_.max_tokens_per_pass > 0 ? plans_.max_tokens_per_pass
                         : on_gpu                       ? kMaxTokensPerPassOfGpu
                                                        : kMaxTokensPerPass;
  PlanRequest request = plan_request(batch.batch, tokens);
  request.costs = &*costs_;
  request.memory_bytes = plans_.memory_bytes;
  return make_plan(plans_.strategy, request);
}

std::vector<ForwardBackwardResult> TrainingModel::forward_backward(
    const std::vector<const ForwardBackwardRequest*>& requests, const TinkerLossSettings& settings) {
  const auto batch = make_tinker_batch(requests, settings, accumulator_type(model_->dtype()));
  const Plan plan = this->plan(*batch);
  Executor executor(*model_);
  has_gradients_ |= !requests.front()->forward_only;
  const RowValues values =
      requests.front()->forward_only
          ? executor.execute_forward(plan, batch->batch)
          : executor.execute(plan, batch->batch, TinkerLoss(*batch, model_->device())).values;
  const at::Tensor log_probs_RK = batch->log_probs(values.log_probs_R, values.top_k_log_probs_RK);
  const at::Tensor loss_R =
      tinker_loss(settings, batch->inputs, log_probs_RK, batch->batch.fields.sequences_R).to(at::kDouble);

  std::vector<ForwardBackwardResult> results;
  size_t datum = 0;
  for (const ForwardBackwardRequest* request : requests) {
    ForwardBackwardResult& result = results.emplace_back();
    const int64_t first = batch->batch.row_offset[datum];
    for (size_t i = 0; i < request->data.size(); ++i, ++datum) {
      const int64_t begin = batch->batch.row_offset[datum], end = batch->batch.row_offset[datum + 1];
      const int64_t columns = batch->columns[datum];
      result.outputs.push_back(
          {floats(log_probs_RK.narrow(0, begin, end - begin).narrow(1, 0, columns)), columns});
    }
    const int64_t rows = batch->batch.row_offset[datum] - first;
    result.metrics["loss:sum"] = loss_R.narrow(0, first, rows).sum().item<double>();
  }
  return results;
}

std::map<std::string, double> TrainingModel::optim_step(const AdamParameters& parameters) {
  optimizer_->use(optimizer_settings(parameters));
  const Optimizer::Report report = optimizer_->step();
  has_gradients_ = false;
  if (report.skipped)
    log_warning(
        "serve: optim_step: the gradient is not finite and was dropped; the weights stay as they were");
  return {{"grad_norm", std::isfinite(report.grad_norm) ? report.grad_norm : -1.0},
          {"skipped", report.skipped ? 1.0 : 0.0}};
}

void TrainingModel::save(const std::filesystem::path& directory, const std::string& base,
                         bool with_optimizer) {
  if (has_adapter(*model_)) save_adapter(directory, *model_, base);
  else save_model(directory, *model_, {.copy_from = base});
  if (with_optimizer) optimizer_->save(directory);
}

void TrainingModel::load(const std::filesystem::path& directory, bool with_optimizer) {
  const bool is_adapter = std::filesystem::exists(directory / "adapter_config.json");
  if (is_adapter != has_adapter(*model_))
    throw UserError(is_adapter ? "path: got the checkpoint of an adapter, expected one of all weights"
                               : "path: got a checkpoint of all weights, expected one of an adapter");
  if (is_adapter) load_adapter(directory, *model_);
  else load_weights(directory, *model_);
  optimizer_ =
      std::make_unique<Optimizer>(*model_, optimizer_settings({}), 0);  // masters are copies of weights
  if (with_optimizer) optimizer_->load(directory);
  model_->zero_gradients();
  has_gradients_ = false;
}

std::vector<at::Tensor*> TrainingModel::tensors() {
  std::vector<at::Tensor*> all;
  for (Parameter* parameter : model_->trained_parameters()) {
    all.push_back(&parameter->value);
    if (has_gradients_) all.push_back(&parameter->main_grad);
  }
  for (at::Tensor* tensor : optimizer_->state_tensors()) all.push_back(tensor);
  return all;
}

void TrainingModel::park(const std::filesystem::path& folder) {
  const std::vector<at::Tensor*> all = tensors();
  if (model_->device().is_cpu()) {
    Parked parked{ScratchFile(folder), {}};
    for (const at::Tensor* tensor : all) {
      parked.file.write(tensor->const_data_ptr(), tensor->nbytes());
      parked.sizes.push_back(tensor->sizes().vec());
    }
    parked_.emplace(std::move(parked));
  }
  is_parked_ = true;
  for (at::Tensor* tensor : all) *tensor = parked_ ? at::empty({0}, tensor->options()) : tensor->to(at::kCPU);
  if (!has_gradients_)
    for (Parameter* parameter : model_->trained_parameters()) parameter->main_grad.reset();
}

void TrainingModel::unpark() {
  if (!is_parked_) return;
  const std::vector<at::Tensor*> all = tensors();
  int64_t offset = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!parked_) {
      *all[i] = all[i]->to(model_->device());
      continue;
    }
    at::Tensor tensor = at::empty(parked_->sizes[i], all[i]->options());
    parked_->file.read(tensor.mutable_data_ptr(), tensor.nbytes(), offset);
    offset += static_cast<int64_t>(tensor.nbytes());
    *all[i] = std::move(tensor);
  }
  model_->allocate_gradients();
  parked_.reset();
  is_parked_ = false;
}

PromptValues prompt_values(Model& model, const std::vector<int32_t>& tokens, int64_t top_k,
                           std::optional<WireTensor> targets) {
  TrainBatch batch;
  batch.sequences.emplace_back(tokens.data(), tokens.size());
  std::vector<int32_t>& positions = batch.trained_positions.emplace_back();
  for (int32_t i = 1; i < std::ssize(tokens); ++i) positions.push_back(i);
  batch.row_offset = {0, std::ssize(positions)};
  at::Tensor targets_RK;
  if (targets) {
    targets_RK = at::tensor(targets->values, at::kDouble).to(at::kLong).view({-1, targets->columns});
    batch.top_k_ids_RK = targets_RK.clamp_min(0);
  }
  const PlanRequest request =
      plan_request(batch, std::max(kMaxTokensPerPass, static_cast<int64_t>(std::ssize(tokens))));
  Executor executor(model);
  const RowValues values = executor.execute_forward(make_plan("dense", request), batch, {.top_k = top_k});
  PromptValues result{floats(values.log_probs_R), {}, std::move(targets)};
  if (result.targets) {
    const at::Tensor log_probs_RK = values.top_k_log_probs_RK.to(at::kCPU, at::kDouble);
    const at::Tensor asked_RK =
        at::where(targets_RK < 0, at::zeros({}, at::kDouble), log_probs_RK).contiguous();
    result.targets->values.assign(asked_RK.const_data_ptr<double>(),
                                  asked_RK.const_data_ptr<double>() + asked_RK.numel());
  }
  if (top_k > 0) {
    const at::Tensor ids = values.top_ids_RK.to(at::kInt).contiguous();
    result.top.k = top_k;
    result.top.ids = {ids.const_data_ptr<int32_t>(), ids.const_data_ptr<int32_t>() + ids.numel()};
    result.top.log_probs = floats(values.top_log_probs_RK);
  }
  return result;
}

}  // namespace bough
