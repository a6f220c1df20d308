#include "train/critic.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "kernels/common/host_snapshot.h"
#include "models/checkpoint.h"
#include "models/safetensors.h"
#include "models/tensor_parallel.h"

namespace bough {

namespace {

namespace fs = std::filesystem;

constexpr const char* kHeadFile = "value_head.safetensors";

NamedTensors named_head(const ValueHead& head) {
  return {{head.weight.parts.front().name, head.weight.value},
          {head.bias.parts.front().name, head.bias.value}};
}

// Returns <path>/model if `path` is a critic that a run saved; otherwise `path`.
fs::path backbone_directory(const fs::path& path) {
  return fs::exists(path / kHeadFile) ? path / "model" : path;
}

}  // namespace

ValueHead::ValueHead(int64_t hidden_size, at::ScalarType type, at::Device device, int64_t copies) {
  const auto options = at::TensorOptions().dtype(type).device(device);
  weight = {at::zeros({1, hidden_size}, options), {}, {{.name = "score.weight", .begin = 0, .end = 1}}};
  bias = {at::zeros({1}, options), {}, {{.name = "score.bias", .begin = 0, .end = 1}}};
  for (Parameter* parameter : parameters()) parameter->parts[0].copies = copies;
}

ValueBlockHead::ValueBlockHead(ValueHead& head, const TrainBatch& batch, const Options& options)
    : head_(head), options_(options) {
  const at::Device device = head.weight.value.device();
  rows_.values_R = at::zeros({batch.num_rows()}, head.weight.value.options());
  if (!options_.has_loss) return;
  BOUGH_CHECK(batch.num_rows() == 0 || (batch.old_values_R.defined() && batch.returns_R.defined()),
              "a value loss needs old values and returns");
  const auto here = [&](const at::Tensor& x) { return x.defined() ? x.to(device) : x; };
  rows_.old_values_R = here(batch.old_values_R);
  rows_.returns_R = here(batch.returns_R);
  rows_.weights_R = here(batch.fields.weights_R);
  for (Parameter* parameter : head_.parameters())
    if (!parameter->main_grad.defined()) parameter->main_grad = at::zeros_like(parameter->value);
}

at::Tensor ValueBlockHead::run(const BlockRows&, const RowIndices& indices, const at::Tensor& source_SD) {
  at::NoGradGuard no_grad;
  const auto acc = head_.weight.value.scalar_type();
  const auto weight_D = head_.weight.value.squeeze(0);
  const bool sends_gradient = options_.has_loss && options_.reaches_backbone;
  at::Tensor d_source_SD =
      sends_gradient ? at::zeros(source_SD.sizes(), source_SD.options().dtype(acc)) : at::Tensor();
  const auto hidden_RD = source_SD.index_select(0, indices.sources).to(acc);
  const auto d_R = gradient(indices, at::mv(hidden_RD, weight_D).add_(head_.bias.value));
  if (!options_.has_loss) return {};
  head_.weight.main_grad.squeeze(0).add_(at::mv(hidden_RD.t(), d_R));
  head_.bias.main_grad.add_(d_R.sum());
  if (sends_gradient) add_rows_(d_source_SD, indices.sources, d_R.unsqueeze(1) * weight_D);
  return d_source_SD;
}

// values: one per head row. Copies them to the loss rows in rows_. Returns the gradients of the head rows. If
// several sequences train a token, the gradients of its loss rows are added.
at::Tensor ValueBlockHead::gradient(const RowIndices& indices, const at::Tensor& values) {
  const auto values_R = values.index_select(0, indices.head_rows);
  rows_.values_R.index_copy_(0, indices.loss_rows, values_R);
  if (!options_.has_loss) return {};
  const auto own = [&](const at::Tensor& field) { return field.index_select(0, indices.loss_rows); };
  ValueLoss loss = value_loss({values_R, own(rows_.old_values_R), own(rows_.returns_R), own(rows_.weights_R)},
                              options_.eps_clip);
  sums_.add(std::move(loss.output));
  at::Tensor d_values = at::zeros_like(values);
  add_rows_(d_values, indices.head_rows, loss.d_values_R.mul_(options_.loss_coef));
  return d_values;
}

ValueExecution ValueBlockHead::finish() {
  sums_.finish();
  return {rows_.values_R.cpu(), sums_.loss(), sums_.metrics()};
}

void CriticSnapshot::save(const fs::path& directory) const {
  make_directories(directory);
  if (backbone) save_model(directory / "model", *backbone);
  write_safetensors(directory / kHeadFile, head);
  optimizer.save(directory);
}

Critic::Critic(Model& backbone, const CriticSettings& settings, const ActorSettings& actor,
               int64_t total_updates, const TrainingRanks* ranks)
    : backbone_(backbone),
      settings_(settings),
      ranks_(ranks && ranks->all() ? ranks : nullptr),
      head_(backbone.config().hidden_size, accumulator_type(backbone.dtype()), backbone.device(),
            ranks_ ? ranks_->sizes().tensor : 1),
      executor_(backbone,
                {.replays_experts = settings.share_backbone.value_or(false) && actor.routing_replay != "none",
                 .context_ranks = ranks_ ? ranks_->context() : nullptr}),
      optimizer_(trained_parameters(), settings.optimizer, total_updates,
                 {.data = ranks_ ? ranks_->data_parallel_group() : nullptr,
                  .tensor = ranks_ ? ranks_->tensor() : nullptr,
                  .stages = backbone.ranks().stages,
                  .tied = shares_backbone() ? nullptr : backbone.trained_at_both_ends()}),
      pass_memory_(backbone.device(), ranks_),
      resident_bytes_(largest_resident_bytes()) {
  actor_ = beside_critic(actor, this);
}

std::vector<Parameter*> Critic::trained_parameters() {
  std::vector<Parameter*> parameters;
  if (backbone_.stage().is_last()) parameters = head_.parameters();
  if (!shares_backbone())
    for (Parameter* parameter : backbone_.parameters()) parameters.push_back(parameter);
  return parameters;
}

Plan Critic::plan(const TrainBatch& batch) const {
  PlanRequest request = plan_request(batch, actor_.mb_spec, actor_.tree, costs_);
  if (costs_ && !request.memory_bytes) request.memory_bytes = pass_memory_.bytes();
  if (ranks_) request.pipeline = ranks_->pipeline();
  if (ranks_ && ranks_->num_replicas() > 1)
    return plan_shard(actor_.tree.strategy(), request, ranks_->replica(), ranks_->num_replicas());
  return make_plan(actor_.tree.strategy(), request);
}

at::Tensor Critic::values(const TrainBatch& batch) {
  ValueBlockHead head(head_, batch, {});
  executor_.execute_head(plan(batch), batch, head, /*backward=*/false);
  return result_of(head).values_R;
}

ValueExecution Critic::result_of(ValueBlockHead& head) {
  ValueExecution execution = head.finish();
  if (Communicator* const ranks = ranks_ ? ranks_->loss_group() : nullptr) {
    sum_values(execution.values_R, *ranks);
    sum_losses(execution.loss, execution.metrics, *ranks);
  }
  return execution;
}

ValueBlockHead::Options Critic::with_loss(bool reaches_backbone) const {
  return {true, reaches_backbone, settings_.loss_coef, settings_.eps_clip};
}

ValueExecution Critic::add_gradient(const Plan& plan, const TrainBatch& batch) {
  ValueBlockHead head(head_, batch, with_loss(!shares_backbone()));
  executor_.execute_head(plan, batch, head, /*backward=*/!shares_backbone());
  return result_of(head);
}

ValueBlockHead Critic::beside_policy(const TrainBatch& batch) {
  BOUGH_CHECK(shares_backbone(), "the critic has a backbone of its own");
  return {head_, batch, with_loss(/*reaches_backbone=*/true)};
}

int64_t Critic::largest_resident_bytes() {
  int64_t bytes = 0;
  for (const Parameter* parameter : trained_parameters()) {
    const auto type = parameter->value.scalar_type(), acc = accumulator_type(type);
    const auto accumulator = static_cast<int64_t>(c10::elementSize(acc));
    // The weight, the gradient and two moments. A weight of lower precision also has a master copy.
    const int64_t element = static_cast<int64_t>(c10::elementSize(type)) + (3 + (type != acc)) * accumulator;
    bytes += parameter->value.numel() * element;
  }
  return ranks_ ? std::ranges::max(ranks_->gather(bytes)) : bytes;
}

CriticSnapshot Critic::snapshot(bool copies) const {
  CriticSnapshot snapshot{nullptr, {}, optimizer_.snapshot(copies)};
  const auto take_head = [&](const std::string& name, const at::Tensor& tensor) {
    snapshot.head.emplace_back(name, copies ? HostCopier().copy(tensor) : tensor);
  };
  const NamedTensors own = backbone_.stage().is_last() ? named_head(head_) : NamedTensors();
  if (backbone_.ranks().stages) gather_to_first_stage(own, *backbone_.ranks().stages, take_head);
  else
    for (const auto& [name, tensor] : own) take_head(name, tensor);
  if (!shares_backbone() && (!ranks_ || ranks_->shares_with_leader()))
    snapshot.backbone = snapshot_of(backbone_, copies);
  return snapshot;
}

void Critic::load_head(const fs::path& directory) {
  const SafetensorsFile file(directory / kHeadFile);
  for (const auto& [name, tensor] : named_head(head_)) {
    const auto found = file.entries().find(name);
    if (found == file.entries().end() || at::IntArrayRef(found->second.shape) != tensor.sizes())
      throw UserError(bough::str(file.path().string(), ": tensor ", quoted(name), ": got ",
                                 found == file.entries().end() ? "none" : "another shape",
                                 "; expected shape ", tensor.sizes(),
                                 ", as a critic of this model saves it"));
    tensor.copy_(file.tensor(name));
  }
}

void Critic::load_head_if_saved(const fs::path& directory) {
  if (fs::exists(directory / kHeadFile)) load_head(directory);
}

void Critic::load(const fs::path& directory) {
  if (!shares_backbone()) load_weights(directory / "model", backbone_);
  load_head(directory);
  optimizer_.load(directory);
}

std::unique_ptr<Model> load_critic_backbone(const CriticSettings& settings, const std::string& actor_path,
                                            const Model& actor) {
  const fs::path directory = settings.path.empty() ? fs::path(actor_path) : backbone_directory(settings.path);
  ModelConfig config = load_model_config(directory);
  if (config.vocab_size != actor.config().vocab_size)
    throw UserError(str("critic.path: the model in ", quoted(directory.string(), 300), " has ",
                        config.vocab_size, " token ids; expected ", actor.config().vocab_size,
                        ", the vocabulary size of model.path"));
  // An lm_head would have weights, gradients and moments that nothing reads. If embeddings are tied, lm_head
  // has no weights in addition to the embedding.
  config.tie_word_embeddings = true;
  config.computes_logits = false;
  if (config.source.is_object() && !config.source.empty()) config.source["tie_word_embeddings"] = true;
  std::unique_ptr<Model> backbone = make_model(config, actor.dtype(), actor.device(), actor.ranks());
  load_weights(directory, *backbone);
  if (config.is_mixture()) backbone->set_router_type(actor.router_type());
  return backbone;
}

ActorSettings beside_critic(const ActorSettings& settings, const Critic* critic) {
  ActorSettings beside = settings;
  if (!critic || settings.mb_spec.memory.is_auto()) return beside;
  const int64_t held = critic->resident_bytes();
  if (held >= settings.mb_spec.memory.count)
    throw UserError(str("actor.mb_spec.memory: got ", settings.mb_spec.memory.to_string(),
                        ", but the critic's weights, gradients and optimizer state alone take ", held,
                        " bytes; expected more, for the passes; raise it, or set critic.share_backbone"));
  beside.mb_spec.memory.count -= held;
  return beside;
}

bool memory_holds_critic(const ActorSettings& settings, Model& actor, int64_t free) {
  int64_t elements = 0;
  for (const Parameter* parameter : actor.parameters()) elements += parameter->value.numel();
  const auto weight = static_cast<int64_t>(c10::elementSize(actor.dtype())),
             exact = static_cast<int64_t>(c10::elementSize(accumulator_type(actor.dtype())));
  // The gradient and two moments. A weight of lower precision than the accumulator also has a master copy.
  const int64_t state = elements * (3 * exact + (weight < exact ? exact : 0));
  const int64_t own = elements * weight + state;
  if (!settings.mb_spec.memory.is_auto()) return 2 * own <= settings.mb_spec.memory.count;
  return static_cast<double>(own + state) <= kCriticShare * static_cast<double>(free);
}

}  // namespace bough
