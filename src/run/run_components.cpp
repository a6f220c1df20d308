#include "run/run_components.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/log_softmax.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <utility>

#include "base/file.h"
#include "base/log.h"
#include "base/memory.h"
#include "control/prompt_check.h"
#include "cost/calibrate.h"
#include "cost/run_costs.h"
#include "engine/server_engine.h"
#include "kernels/common/device.h"
#include "models/checkpoint.h"
#include "models/lora.h"
#include "rollout/embedded_engine.h"
#include "text/stop_tokens.h"
#include "train/tree_context.h"

namespace bough {

namespace {

bool is_rank_zero(const Communicator* ranks) {
  return !ranks || ranks->rank() == 0;
}

int64_t planned_steps(const RunSettings& settings, const Dataset& problems) {
  if (settings.total_train_steps > 0) return settings.total_train_steps;
  const auto size = static_cast<int64_t>(problems.size());
  const int64_t batch = settings.train_dataset.batch_size;
  return (settings.total_train_epochs * size + batch - 1) / batch;
}

// Agents and some environments make prompts of their own: those cannot be checked before the run.
Dataset read_fitting(const RunSettings& settings, const DatasetSettings& of_dataset, const char* key,
                     const PromptEncoder& encoder, Communicator* ranks) {
  const bool is_for_agents = settings.serve.port && &of_dataset == &settings.train_dataset;
  Dataset dataset = read_dataset(of_dataset);
  if (is_for_agents || !settings.environment.begins_with_problem()) return dataset;
  return fit_prompts(dataset, of_dataset, encoder,
                     {.key = key,
                      .model = settings.model.path,
                      .limits = model_limits(load_model_config(settings.model.path)),
                      .shows_progress = is_rank_zero(ranks)});
}

// External agents may bring their own problems. The run then knows only that there is a problem.
Dataset training_problems(const RunSettings& settings, const PromptEncoder& encoder, Communicator* ranks) {
  if (!settings.train_dataset.path.empty())
    return read_fitting(settings, settings.train_dataset, "train_dataset", encoder, ranks);
  return {{Problem{.id = "agent", .prompt = "", .messages = {}, .answer = ""}}, "external agents"};
}

at::Device device_of(const RunSettings& settings) {
  return settings.device == "cuda" ? at::kCUDA : at::kCPU;
}

std::unique_ptr<Model> load(const RunSettings& settings, const std::string& path,
                            const ModelRanks& ranks = {}) {
  auto model =
      load_rollout_model(path, settings.rollout, scalar_type_of(settings.dtype), device_of(settings), ranks);
  // A reference or a teacher may be dense beside a policy with experts.
  if (path == settings.model.path || model->config().is_mixture())
    model->set_router_type(router_type_named(settings.model.router_dtype));
  model->set_head_type(head_type_named(settings.model.head_dtype));
  return model;
}

std::unique_ptr<Model> load_trained(const RunSettings& settings, const ModelRanks& ranks = {}) {
  auto model = load(settings, settings.model.path, ranks);
  if (settings.actor.lora.enabled())
    add_adapter(*model, settings.actor.lora, static_cast<uint64_t>(settings.seed));
  return model;
}

// If layers are sharded over ranks: the unsharded model on the CPU, for publishing and saving.
std::unique_ptr<Model> load_unsharded(const RunSettings& settings) {
  auto model =
      load_rollout_model(settings.model.path, settings.rollout, scalar_type_of(settings.dtype), at::kCPU);
  model->set_precisions(
      {router_type_named(settings.model.router_dtype), head_type_named(settings.model.head_dtype)});
  if (settings.actor.lora.enabled())
    add_adapter(*model, settings.actor.lora, static_cast<uint64_t>(settings.seed));
  return model;
}

// The reference has the trained model's element type and batch invariance, so that the log-probabilities of
// both models are bit-identical before the first step.
std::unique_ptr<Model> load_reference(const RunSettings& settings, const Model& model) {
  if (!settings.actor.loss.uses_reference()) return nullptr;
  if (settings.actor.lora.enabled() && settings.ref.path.empty()) return without_adapter(model);
  return load(settings, settings.ref.path.empty() ? settings.model.path : settings.ref.path, model.ranks());
}

// A model that reads the token ids which another model samples must have the same vocabulary. Vocabularies
// may be padded differently, but the reader must have every id that the sampler may sample. `key`: the
// setting of the reader's or the sampler's path, whichever is not model.path.
void check_same_tokens(const char* key, const std::filesystem::path& reader_path, const Model& reader,
                       const std::filesystem::path& sampler_path, const Model& sampler) {
  const auto own = reader_path / "tokenizer.json", other = sampler_path / "tokenizer.json";
  if (std::filesystem::exists(own) && std::filesystem::exists(other)) {
    const auto vocabulary = [](const std::filesystem::path& file) {
      const Json json = read_json(file);
      return json.contains("model") && json["model"].contains("vocab") ? json["model"]["vocab"] : Json();
    };
    if (vocabulary(own) != vocabulary(other))
      throw UserError(
          str("setting ", key, ": ", own.string(), " has another vocabulary than ", other.string(),
              ", so the same id means different tokens; expected models with the same tokenizer"));
  }
  if (reader.config().vocab_size < sampler.config().vocab_size)
    throw UserError(str("setting ", key, ": ", reader_path.string(), " has a vocabulary of ",
                        reader.config().vocab_size, " tokens, but it reads samples of ",
                        sampler_path.string(), ", which has ", sampler.config().vocab_size,
                        "; expected at least as many"));
}

std::unique_ptr<Model> load_teacher(const RunSettings& settings, const Model& trained) {
  const std::string& path = settings.actor.loss.teacher.path;
  if (path.empty()) return nullptr;
  auto teacher = load(settings, path, trained.ranks());
  check_same_tokens("teacher.path", path, *teacher, settings.model.path, trained);
  return teacher;
}

bool has_critic(const RunSettings& settings) {
  return settings.actor.advantages.needs_values();
}

// Whether the critic uses the actor's backbone. A resumed run keeps the decision of the first process.
bool shares_backbone(const RunSettings& settings, Model& actor) {
  if (settings.critic.share_backbone) return *settings.critic.share_backbone;
  if (!settings.critic.path.empty() || settings.actor.lora.enabled()) return false;
  if (const auto checkpoint = find_latest_checkpoint(run_folder_of(settings)))
    return !std::filesystem::exists(checkpoint->directory / "critic" / "model");
  const int64_t free = device_memory(actor.device()).free;
  if (memory_holds_critic(settings.actor, actor, free)) return false;
  log_info(
      "critic.share_backbone is null, and memory is too small for a second model's weights, gradients and "
      "optimizer: the critic is a value_head on the actor's hidden states");
  return true;
}

std::unique_ptr<Model> load_critic_model(const RunSettings& settings, Model& actor, Communicator* ranks) {
  if (!has_critic(settings)) return nullptr;
  bool shares = is_rank_zero(ranks) && shares_backbone(settings, actor);
  if (ranks && ranks->size() > 1) shares = ranks->broadcast(shares ? "shares" : "own") == "shares";
  if (shares) return nullptr;
  return load_critic_backbone(settings.critic, settings.model.path, actor);
}

// `own`: the critic's own backbone; nullptr if the critic uses the actor's.
std::unique_ptr<Critic> make_critic(const RunSettings& settings, Model& actor, Model* own,
                                    int64_t total_steps, const TrainingRanks& ranks) {
  if (!has_critic(settings)) return nullptr;
  CriticSettings of_critic = settings.critic;
  of_critic.share_backbone = own == nullptr;
  auto critic = std::make_unique<Critic>(own ? *own : actor, of_critic, settings.actor,
                                         total_steps * settings.actor.updates_per_batch(), &ranks);
  if (!settings.critic.path.empty()) critic->load_head_if_saved(settings.critic.path);
  return critic;
}

SparsePolicy sparse_of(const RunSettings& settings, at::Device device) {
  const SparseTrainingSettings& own = settings.sparse_training;
  const bool trains = own.trains_sparse() || (own.has_sparse_policy() && settings.rollout.sparse.is_sparse());
  if (trains && !device.is_cpu())
    throw UserError(str("sparse_training.mode is ", settings.sparse_training.mode, ", but the device is ",
                        device.str(),
                        ": a sparse policy is trained on the CPU only; expected mode sparse, or device cpu"));
  return sparse_policy(settings.rollout.sparse, device);
}

std::unique_ptr<SparsePolicyTrainer> make_sparse_trainer(const RunSettings& settings, Model& model,
                                                         const SparsePolicy& sparse, int64_t total_steps,
                                                         const TrainingRanks& ranks) {
  const SparseTrainingSettings& own = settings.sparse_training;
  if (!own.has_sparse_policy()) return nullptr;
  const SparsePolicyOptions options{.settings = own,
                                    .actor = settings.actor,
                                    .policy = sparse,
                                    .total_steps = total_steps,
                                    .has_stale_samples = settings.rollout.max_head_offpolicyness > 0,
                                    .ranks = &ranks};
  if (own.distills())
    return std::make_unique<SparsePolicyTrainer>(model, static_cast<uint64_t>(settings.seed), options);
  auto draft = load(settings, own.draft_path);
  check_same_tokens("sparse_training.draft_path", settings.model.path, model, own.draft_path, *draft);
  if (draft->config().max_length() > model.config().max_length())
    throw UserError(str("setting sparse_training.draft_path: ", own.draft_path, " takes ",
                        draft->config().max_length(), " tokens, but ", settings.model.path,
                        ", which is trained on its samples, takes ", model.config().max_length(),
                        "; expected no more"));
  return std::make_unique<SparsePolicyTrainer>(std::move(draft), options);
}

// The initial model equals the sparse policy of the ranks that train. They publish the weights of this
// policy.
std::unique_ptr<Model> load_generating(const RunSettings& settings) {
  const SparseTrainingSettings& sparse = settings.sparse_training;
  if (sparse.is_draft()) return load(settings, sparse.draft_path);
  auto model = load_trained(settings);
  if (sparse.distills()) {
    freeze_adapter(*model);
    add_adapter(*model, sparse.lora, static_cast<uint64_t>(settings.seed));
  }
  return model;
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
  return std::make_unique<CopiedWeights>(trained, *generating, takes_weights_in_place(settings, trained),
                                         what_changes(settings));
}

// Whether this rank has an engine. If servers generate, only rank 0 has one (ServerEngine). Else each rank
// has an embedded engine, unless other ranks only generate (rollout.ranks).
bool generates(const RunSettings& settings, const Communicator* ranks) {
  return settings.rollout.ranks == 0 && (is_rank_zero(ranks) || !settings.rollout.has_servers());
}

// All ranks use rank 0's profile, so that they make the same plans.
DeviceProfile ranks_profile(const RunSettings& settings, const std::function<bool()>& stop,
                            Communicator* ranks) {
  const auto own = [&] {
    return run_profile(run_folder_of(settings), settings.calibration, device_of(settings),
                       scalar_type_of(settings.dtype), stop);
  };
  if (!ranks || ranks->size() == 1) return own();
  const std::string shared = ranks->broadcast(ranks->rank() == 0 ? own().to_json().dump() : "");
  return DeviceProfile::from_json(Json::parse(shared), "rank 0's profile");
}

// The least memory of all ranks. The ranks of a host share its memory.
RunMemory memory_of_ranks(const RunMemory& own, Communicator& ranks) {
  const Json mine = {host_name(), own.device_total, own.device_free, own.host_free};
  std::vector<Json> all;
  for (const std::string& text : ranks.all_gather(mine.dump())) all.push_back(Json::parse(text));
  RunMemory least = own;
  int64_t of_each = std::numeric_limits<int64_t>::max();
  for (const Json& rank : all) {
    const int64_t beside = std::ranges::count(all, rank[0], [](const Json& other) { return other[0]; });
    least.device_total = std::min(least.device_total, rank[1].get<int64_t>());
    least.device_free = std::min(least.device_free, rank[2].get<int64_t>());
    of_each = std::min(of_each, rank[3].get<int64_t>() / beside);
    least.ranks_per_host = std::max(least.ranks_per_host, beside);
  }
  least.host_free = of_each;
  return least;
}

// Before any weight is on the GPU. Collective call: all ranks plan with the memory of the fullest GPU. A
// resumed run keeps its kind of critic.
MemoryPlan memory_plan(const RunSettings& settings, const DeviceProfile& profile, Communicator* ranks) {
  const DeviceMemory own = device_memory(device_of(settings));
  RunMemory memory{.device_total = own.total, .device_free = own.free, .host_free = host_memory().available};
  std::optional<bool> critic_shares;
  if (is_rank_zero(ranks))
    if (const auto checkpoint = find_latest_checkpoint(run_folder_of(settings)))
      critic_shares = !std::filesystem::exists(checkpoint->directory / "critic" / "model");
  const int64_t num_ranks = ranks ? ranks->size() : 1;
  if (num_ranks > 1) {
    memory = memory_of_ranks(memory, *ranks);
    // Other hosts need not see the run's folder.
    const Json of_rank_zero =
        Json::parse(ranks->broadcast((critic_shares ? Json(*critic_shares) : Json()).dump()));
    if (of_rank_zero.is_boolean()) critic_shares = of_rank_zero.get<bool>();
  }
  return plan_memory(settings, profile, memory, num_ranks, critic_shares);
}

// The adapters of a model are merged, because servers load no adapters. Other files of the initial model's
// directory are copied along.
void write_weights(const RunSettings& settings, const std::filesystem::path& directory, const Model& model) {
  std::unique_ptr<Model> written = has_adapter(model) ? copy_of(model, Changing::kAll) : model.share();
  if (has_adapter(*written)) merge_adapter(*written);
  save_model(directory, *written, {.copy_from = settings.model.path});
}

std::unique_ptr<Engine> make_run_engine(const RunSettings& settings, const Model& model,
                                        const std::optional<Tokenizer>& tokenizer) {
  const RolloutSettings& rollout = settings.rollout;
  if (!rollout.has_servers()) return make_engine(model, settings.model.path, tokenizer, rollout);
  if (model.config().tie_word_embeddings && model.head_adapter_elements() > 0)
    throw UserError(
        "lora.targets: got lm_head with rollout.servers and a model with tied embeddings: servers would take "
        "the embedding for the lm_head. Expected the embedded engine, targets without lm_head, or a model "
        "with "
        "an lm_head of its own (`bough merge`)");
  const std::filesystem::path own = std::filesystem::absolute(run_folder_of(settings)) / "weights";
  const std::filesystem::path given = rollout.servers.weights_path;
  const auto weights_folder =
      given.empty() ? own : std::filesystem::absolute(given) / settings.experiment_name / settings.trial_name;
  ServerEngineOptions options{.backend = rollout.backend_name(),
                              .settings = rollout.servers,
                              .api_key = load_api_key("BOUGH_ROLLOUT_API_KEY", "rollout.servers.api_key_file",
                                                      rollout.servers.api_key_file),
                              .max_concurrent = rollout.max_concurrent_rollouts,
                              .limits = model_limits(model.config()),
                              .stop_tokens = load_stop_tokens(settings.model.path, tokenizer),
                              .weights_folder = weights_folder};
  if (rollout.return_routed_experts) {
    const ModelConfig& config = model.config();
    if (!config.is_mixture())
      throw UserError("rollout.return_routed_experts is true, but the model has no experts; expected false");
    options.experts = ExpertLayout{.num_layers = config.num_layers,
                                   .dense_layers = config.dense_layers,
                                   .num_experts = config.num_experts,
                                   .num_chosen = config.experts_per_token};
  }
  if (tokenizer) options.token_bytes = [tokenizer](int32_t id) { return tokenizer->id_to_bytes(id); };
  options.write_weights = [settings](const std::filesystem::path& directory, const Model& of) {
    write_weights(settings, directory, of);
  };
  options.score = [](const Model& of, const std::vector<int32_t>& ids, size_t begin, double temperature,
                     const RoutedExperts& routed) {
    const at::NoGradGuard no_grad;
    const auto log_probs_TV =
        at::log_softmax(sequence_logits(of, ids, routed).to(at::kDouble) / temperature, -1);
    std::vector<double> out;
    for (size_t i = begin; i < ids.size(); ++i)
      out.push_back(log_probs_TV[static_cast<int64_t>(i) - 1][ids[i]].item<double>());
    return out;
  };
  return std::make_unique<ServerEngine>(std::move(options));
}

}  // namespace

ThreadSplit split_threads(const RunSettings& settings, int threads) {
  if (!settings.rollout.is_asynchronous()) return {threads, threads};
  const auto half = std::max(1, threads / 2);
  ThreadSplit split;
  if (settings.rollout.threads > 0) split.generating = static_cast<int>(settings.rollout.threads);
  else split.generating = settings.rollout.generates_elsewhere() ? 1 : half;
  if (settings.rollout.generates_elsewhere() && settings.actor.threads == 0) {
    split.training = threads;
    return split;
  }
  split.training = settings.actor.threads > 0 ? static_cast<int>(settings.actor.threads)
                                              : std::max(1, threads - split.generating);
  return split;
}

Changing what_changes(const RunSettings& settings) {
  const bool trains_base = !settings.actor.lora.enabled();
  return settings.sparse_training.distills() && trains_base ? Changing::kAll : Changing::kTrained;
}

bool takes_weights_in_place(const RunSettings& settings, const Model& model) {
  return model.device().is_cuda() || settings.rollout.quantization != "none";
}

bool only_generates(const RunSettings& settings, const Communicator& ranks) {
  return ranks.rank() >= ranks.size() - settings.rollout.ranks;
}

Json engine_job(const RunSettings& settings) {
  return {{"settings", settings_yaml(settings)}};
}

RunSettings settings_of_job(const Json& job) {
  return parse_settings<RunSettings>(job.at("settings").get<std::string>(), "the run's settings");
}

EngineParts::EngineParts(const RunSettings& run_settings)
    : settings(run_settings),
      encoder(PromptEncoder::from_directory(settings.model.path)),
      model(load_generating(settings)),
      engine(make_engine(*model, settings.model.path, encoder.tokenizer(), settings.rollout)) {
  if (settings.rollout.threads > 0) at::set_num_threads(static_cast<int>(settings.rollout.threads));
}

RunComponents::RunComponents(const RunSettings& run_settings, const std::function<bool()>& stop,
                             Communicator* ranks)
    : threads(split_threads(run_settings, at::get_num_threads())),
      encoder(PromptEncoder::from_directory(run_settings.model.path)),
      problems(training_problems(run_settings, encoder, ranks)),
      valid(run_settings.valid_dataset.path.empty()
                ? Dataset()
                : read_fitting(run_settings, run_settings.valid_dataset, "valid_dataset", encoder, ranks)),
      reward(is_rank_zero(ranks) ? make_reward(run_settings.reward, run_settings.reward_service) : nullptr),
      environment(is_rank_zero(ranks) ? make_environment(run_settings) : nullptr),
      filter(run_settings.filter.empty() || !is_rank_zero(ranks)
                 ? nullptr
                 : std::make_unique<GroupFilter>(run_settings.filter, run_settings.reward_service)),
      gpu_profile(device_of(run_settings).is_cpu() ? std::nullopt
                                                   : std::optional(ranks_profile(run_settings, stop, ranks))),
      memory(gpu_profile ? std::optional(memory_plan(run_settings, *gpu_profile, ranks)) : std::nullopt),
      settings(memory ? with_memory_plan(run_settings, *memory) : run_settings),
      training(ranks, settings.actor.sizes_of(ranks ? ranks->size() : 1)),
      model(load_trained(settings, training.model())),
      unsharded(!training.has_unsharded_model() && training.is_rank_zero() ? load_unsharded(settings)
                                                                           : nullptr),
      reference(load_reference(settings, *model)),
      teacher(load_teacher(settings, *model)),
      total_steps(planned_steps(settings, problems)),
      critic_model(load_critic_model(settings, *model, ranks)),
      critic(make_critic(settings, *model, critic_model.get(), total_steps, training)),
      sparse(sparse_of(settings, model->device())),
      sparse_trainer(make_sparse_trainer(settings, *model, sparse, total_steps, training)),
      generating(!settings.rollout.is_asynchronous() || !generates(settings, ranks)
                     ? nullptr
                     : copy_of(published(), what_changes(settings))),
      device_clock(clock, model->device()),
      trainer(*model, {reference.get(), teacher.get()}, settings.actor, total_steps, device_clock,
              {.critic = critic.get(),
               .sparse = settings.sparse_training.trains_sparse() ? sparse : SparsePolicy(),
               .sparse_trainer = sparse_trainer.get(),
               .ranks = &training}),
      weights(make_channel(settings, published(), generating.get())),
      engine(generates(settings, ranks)
                 ? make_run_engine(settings, generating ? *generating : published(), encoder.tokenizer())
                 : nullptr),
      folder(is_rank_zero(ranks) ? std::make_unique<RunFolder>(run_settings) : nullptr) {
  at::set_num_threads(threads.training);
  if (training.sizes().all() > training.sizes().data) {
    for (Model* shared : {model.get(), reference.get(), teacher.get(), critic_model.get()})
      if (shared) shared->set_batch_invariant(false);
  }
  if (unsharded) trainer.use_unsharded(*unsharded);
  const bool is_scored = settings.environment.is_scored_by_reward(!settings.reward.empty());
  for (const Dataset* dataset : {&std::as_const(problems), &std::as_const(valid)}) {
    if (dataset->size() == 0) continue;
    const bool is_rewarded_externally =
        settings.serve.port && dataset == &problems && settings.reward.empty();
    if (is_scored && !is_rewarded_externally && reward) reward->check(*dataset);
    if (environment) environment->check(*dataset);
  }
  if (environment)
    conversations.emplace(encoder, settings.environment, model->config().max_length(), is_scored);
  const DeviceProfile profile = gpu_profile ? *gpu_profile : ranks_profile(settings, stop, ranks);
  if (folder) save_run_profile(folder->path(), profile);
  if (folder && memory) log_info(str("memory of each GPU:\n", memory_table(*memory)));
  CostModel costs(profile, model_shape(*model, settings.actor.router_losses.is_used()));
  StepCosts of_critic;
  if (critic_model) of_critic = step_costs(critic_costs(costs, *critic_model));
  if (settings.sparse_training.is_draft())
    draft_costs = std::make_unique<CostModel>(costs.device(), model_shape(sparse_trainer->model()));
  trainer.use_costs(step_costs(std::move(costs)), std::move(of_critic));
  if (draft_costs) sparse_trainer->use_costs(draft_costs.get());
  if ((sparse.is_sparse() && !settings.sparse_training.trains_sparse()) || sparse_trainer)
    trainer.measure_acceptance();
  if (settings.saver.rollouts) trainer.keep_token_values();
}

}  // namespace bough
