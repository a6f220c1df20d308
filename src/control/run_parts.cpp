#include "control/run_parts.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/file.h"
#include "cost/run_costs.h"
#include "models/lora.h"

namespace bough {

namespace {

int64_t planned_steps(const RunSettings& settings, const Dataset& problems) {
  if (settings.total_train_steps > 0) return settings.total_train_steps;
  const auto size = static_cast<int64_t>(problems.size());
  const int64_t batch = settings.train_dataset.batch_size;
  return (settings.total_train_epochs * size + batch - 1) / batch;
}

// Agents outside may bring problems of their own: then all that the run knows of one is that there is one.
Dataset training_problems(const RunSettings& settings) {
  if (!settings.train_dataset.path.empty()) return read_dataset(settings.train_dataset);
  return {{Problem{.id = "agent", .prompt = "", .messages = {}, .answer = ""}}, "agents outside"};
}

std::unique_ptr<Model> load(const RunSettings& settings, const std::string& path) {
  return load_rollout_model(path, settings.rollout, scalar_type_of(settings.dtype),
                            settings.device == "cuda" ? at::kCUDA : at::kCPU);
}

std::unique_ptr<Model> load_trained(const RunSettings& settings) {
  auto model = load(settings, settings.model.path);
  if (settings.actor.lora.enabled())
    add_adapter(*model, settings.actor.lora, static_cast<uint64_t>(settings.seed));
  return model;
}

// The reference has the model's element type and batch invariance, so that before the first step the two
// agree bit for bit.
std::unique_ptr<Model> load_reference(const RunSettings& settings, const Model& model) {
  if (!settings.actor.loss.uses_reference()) return nullptr;
  if (settings.actor.lora.enabled() && settings.ref.path.empty()) return without_adapter(model);
  return load(settings, settings.ref.path.empty() ? settings.model.path : settings.ref.path);
}

// It reads the student's token ids, so they must mean the same to it. Vocabularies may be padded differently,
// but each id that the student may have must be there.
std::unique_ptr<Model> load_teacher(const RunSettings& settings, const Model& student) {
  const std::string& path = settings.actor.loss.teacher.path;
  if (path.empty()) return nullptr;
  const std::filesystem::path own = std::filesystem::path(settings.model.path) / "tokenizer.json",
                              other = std::filesystem::path(path) / "tokenizer.json";
  if (std::filesystem::exists(own) && std::filesystem::exists(other)) {
    const auto vocabulary = [](const std::filesystem::path& file) {
      const Json json = read_json(file);
      return json.contains("model") && json["model"].contains("vocab") ? json["model"]["vocab"] : Json();
    };
    if (vocabulary(own) != vocabulary(other))
      throw UserError(str("setting teacher.path: ", other.string(), " has another vocabulary than ",
                          own.string(),
                          ", so that its probabilities are of other tokens; expected a teacher "
                          "with the tokenizer of the model that is trained"));
  }
  auto teacher = load(settings, path);
  if (teacher->config().vocab_size < student.config().vocab_size)
    throw UserError(str("setting teacher.path: ", path, " has a vocabulary of ", teacher->config().vocab_size,
                        " tokens, the model that is trained one of ", student.config().vocab_size,
                        "; expected no fewer"));
  return teacher;
}

bool has_critic(const RunSettings& settings) {
  return settings.actor.advantages.needs_values();
}

std::unique_ptr<Model> load_critic_model(const RunSettings& settings, const Model& actor) {
  if (!has_critic(settings) || settings.critic.share_backbone) return nullptr;
  return load_critic_backbone(settings.critic, settings.model.path, actor);
}

// `own`: its backbone, or null.
std::unique_ptr<Critic> make_critic(const RunSettings& settings, Model& actor, Model* own,
                                    int64_t total_steps) {
  if (!has_critic(settings)) return nullptr;
  auto critic = std::make_unique<Critic>(own ? *own : actor, settings.critic, settings.actor,
                                         total_steps * settings.actor.updates_per_batch());
  if (!settings.critic.path.empty()) critic->load_head_if_saved(settings.critic.path);
  return critic;
}

std::unique_ptr<SparseStudent> make_student(const RunSettings& settings, Model& model,
                                            const SparsePolicy& sparse, int64_t total_steps) {
  if (!settings.sparse_training.distills()) return nullptr;
  return std::make_unique<SparseStudent>(model, settings.sparse_training, settings.actor, sparse, total_steps,
                                         static_cast<uint64_t>(settings.seed));
}

std::unique_ptr<Environment> make_environment(const RunSettings& settings) {
  if (settings.environment.type.empty()) return nullptr;
  EnvironmentSettings environment = settings.environment;
  if (environment.python.empty()) environment.python = settings.reward_service.python;
  return make_environment(environment);
}

std::unique_ptr<WeightChannel> make_channel(const RunSettings& settings, const Model& trained,
                                            Model* generating) {
  if (!generating) return std::make_unique<SharedWeights>(&trained);
  const bool in_place = trained.device().is_cuda() || settings.rollout.quantization != "none";
  return std::make_unique<CopiedWeights>(
      trained, *generating, in_place,
      settings.sparse_training.distills() ? Changing::kAll : Changing::kTrained);
}

bool leads(const Communicator* ranks) {
  return !ranks || ranks->rank() == 0;
}

// Rank 0's, of all: they plan alike.
CostModel ranks_costs(Communicator* ranks, const Model& model, const std::function<CostModel()>& of_rank_0) {
  std::optional<CostModel> own;
  if (leads(ranks)) own.emplace(of_rank_0());
  if (!ranks || ranks->size() == 1) return std::move(*own);
  const std::string profile = ranks->broadcast(own ? own->device().to_json().dump() : "");
  return CostModel(DeviceProfile::from_json(Json::parse(profile), "rank 0's profile"), model_shape(model));
}

}  // namespace

ThreadSplit split_threads(const RunSettings& settings, int threads) {
  if (settings.rollout.max_head_offpolicyness == 0) return {threads, threads};
  const auto half = std::max(1, threads / 2);
  ThreadSplit split;
  split.generating = settings.rollout.threads > 0 ? static_cast<int>(settings.rollout.threads) : half;
  split.training = settings.actor.threads > 0 ? static_cast<int>(settings.actor.threads)
                                              : std::max(1, threads - split.generating);
  return split;
}

RunParts::RunParts(const RunSettings& run_settings, const std::function<bool()>& stop, Communicator* ranks)
    : settings(run_settings),
      threads(split_threads(settings, at::get_num_threads())),
      problems(training_problems(settings)),
      valid(settings.valid_dataset.path.empty() ? Dataset() : read_dataset(settings.valid_dataset)),
      encoder(PromptEncoder::from_directory(settings.model.path)),
      reward(leads(ranks) ? make_reward(settings.reward, settings.reward_service) : nullptr),
      environment(leads(ranks) ? make_environment(settings) : nullptr),
      filter(settings.filter.empty() || !leads(ranks)
                 ? nullptr
                 : std::make_unique<GroupFilter>(settings.filter, settings.reward_service)),
      model(load_trained(settings)),
      reference(load_reference(settings, *model)),
      teacher(load_teacher(settings, *model)),
      total_steps(planned_steps(settings, problems)),
      critic_model(load_critic_model(settings, *model)),
      critic(make_critic(settings, *model, critic_model.get(), total_steps)),
      sparse(sparse_policy(settings.rollout.sparse, model->device())),
      student(make_student(settings, *model, sparse, total_steps)),
      generating(settings.rollout.max_head_offpolicyness == 0 ? nullptr
                 : student                                    ? copy_of(student->model(), Changing::kAll)
                                                              : copy_of(*model)),
      trainer(*model, {reference.get(), teacher.get()}, settings.actor, total_steps, clock, critic.get(),
              settings.sparse_training.trains_sparse() ? sparse : SparsePolicy(), student.get(), ranks),
      weights(make_channel(settings, student ? student->model() : *model, generating.get())),
      engine(make_engine(generating ? *generating
                         : student  ? student->model()
                                    : *model,
                         settings.model.path, encoder.tokenizer(), settings.rollout,
                         kDeviceShareBesideTraining)),
      folder(leads(ranks) ? std::make_unique<RunFolder>(settings) : nullptr) {
  at::set_num_threads(threads.training);
  const bool is_scored = settings.environment.is_scored_by_reward(!settings.reward.empty());
  for (const Dataset* dataset : {&std::as_const(problems), &std::as_const(valid)}) {
    if (dataset->size() == 0) continue;
    const bool is_rewarded_outside = settings.serve.port && dataset == &problems && settings.reward.empty();
    if (is_scored && !is_rewarded_outside && reward) reward->check(*dataset);
    if (environment) environment->check(*dataset);
  }
  if (environment)
    conversations.emplace(encoder, settings.environment, model->config().max_length(), is_scored);
  CostModel costs = ranks_costs(
      ranks, *model, [&] { return run_costs(folder->path(), settings.calibration, *model, stop); });
  StepCosts of_critic;
  if (critic_model) of_critic = step_costs(critic_costs(costs, *critic_model));
  trainer.use_costs(step_costs(std::move(costs)), std::move(of_critic));
  if (sparse.is_sparse() && !settings.sparse_training.trains_sparse()) trainer.measure_acceptance();
}

}  // namespace bough
