// Sessions, models, training and checkpoints.
#include <algorithm>
#include <iomanip>
#include <random>
#include <sstream>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "net/secrets.h"
#include "tinker/service_state.h"

namespace bough {

namespace {

constexpr double kAlpha = 32;  // of Tinker's adapters
constexpr std::initializer_list<const char*> kAttention = {"q_proj", "k_proj", "v_proj", "o_proj"};
constexpr std::initializer_list<const char*> kMlp = {"gate_proj", "up_proj", "down_proj"};

LoraSettings read_adapter(const OrderedJson& config, int64_t max_rank, uint64_t& seed) {
  Fields fields(config, "lora_config");
  LoraSettings adapter;
  adapter.rank = fields.required_integer("rank", 1, max_rank);
  adapter.alpha = kAlpha;
  adapter.targets.clear();
  const auto add = [&](const char* flag, std::initializer_list<const char*> names) {
    if (fields.boolean(flag).value_or(true))
      for (const char* name : names) adapter.targets.push_back({name});
  };
  add("train_attn", kAttention);
  add("train_mlp", kMlp);
  add("train_unembed", {"lm_head"});
  seed = static_cast<uint64_t>(fields.integer("seed", 0, int64_t{1} << 53).value_or(0));
  fields.done();
  if (adapter.targets.empty())
    throw ApiError(400,
                   "lora_config: train_attn, train_mlp and train_unembed are false; expected one to be true");
  return adapter;
}

void check_optimizer(Fields& fields) {
  const OrderedJson* const config = fields.object("optimizer_config");
  if (!config) return;
  const OrderedJson type = config->value("type", OrderedJson("adamw"));
  if (type != "adamw")
    throw ApiError(400,
                   str("optimizer_config.type: got ", dump_ordered(type).substr(0, 40), ", expected adamw"),
                   "optimizer_config");
}

bool has_target(const LoraSettings& adapter, const char* name) {
  return std::any_of(adapter.targets.begin(), adapter.targets.end(),
                     [&](const LoraTarget& target) { return target.name == name; });
}

std::string model_id(const std::string& session, int64_t number) {
  return str(session, ":train:", number);
}

Json read_metadata(Fields& fields) {
  const OrderedJson* const metadata = fields.object("user_metadata");
  return metadata ? Json(*metadata) : Json(nullptr);
}

}  // namespace

Checkpoints::Terms read_terms(Fields& fields) {
  return {fields.integer("ttl_seconds", kLeastTtl, kMostTtl), read_metadata(fields)};
}

Json TrainingService::State::create_session(Fields& fields, const std::string& tenant) {
  Json description = {{"user_metadata", read_metadata(fields)}};
  if (const auto name = fields.text("display_name")) description["display_name"] = *name;
  fields.ignore({"tags", "sdk_version", "project_id", "type"});
  fields.done();
  const std::string id = "session-" + random_hex(16);
  const Json kept = {{"tenant", tenant}, {"description", description}};
  {
    const MutexLock lock(mutex);
    const int64_t its = std::count_if(sessions.begin(), sessions.end(),
                                      [&](const auto& entry) { return entry.second.tenant == tenant; });
    if (its >= settings.max_sessions)
      throw ApiError(400, str("got a session more than ", settings.max_sessions,
                              "; expected fewer at once (max_sessions): finish a session"));
    sessions[id] = {clock.now(), tenant, ++num_sessions, std::move(description)};
  }
  journal.add_session(id, kept);
  return {{"type", "create_session"}, {"session_id", id}};
}

Json TrainingService::State::heartbeat(Fields& fields) {
  const std::string id = fields.required_text("session_id");
  fields.ignore({"type"});
  fields.done();
  const MutexLock lock(mutex);
  const auto found = sessions.find(id);
  if (found == sessions.end()) throw ApiError(410, str("session ", quoted(id, 80), " has ended"));
  found->second.heartbeat = clock.now();
  return {{"type", "session_heartbeat"}};
}

void TrainingService::State::end_session(const std::string& session) {
  std::vector<std::string> its;
  {
    const MutexLock lock(mutex);
    if (sessions.erase(session) > 0) ended_sessions.insert(session);
    for (const auto& [id, model] : models)
      if (model.session == session) its.push_back(id);
    std::erase_if(sampling, [&](const auto& entry) { return entry.second.session == session; });
    ended.insert(its.begin(), its.end());
  }
  for (const std::string& id : its)
    for (const Work& work : queue.remove_model(id))
      futures.complete(work.future, failed_result("the session has ended", "user"));
  futures.drop_session(session);
}

bool TrainingService::State::exists(const std::string& model) const {
  const MutexLock lock(mutex);
  return models.contains(model) && !ended.contains(model);
}

std::string TrainingService::State::session_of(const std::string& model) const {
  const MutexLock lock(mutex);
  const auto found = models.find(model);
  if (found == models.end() || ended.contains(model))
    throw ApiError(404, str("model_id: got ", quoted(model, 100), ", which does not exist"), "model_id");
  return found->second.session;
}

void TrainingService::State::check_session(const std::string& session) const {
  const MutexLock lock(mutex);
  if (!sessions.contains(session))
    throw ApiError(404, str("session_id: got ", quoted(session, 80), ", which does not exist"), "session_id");
}

void TrainingService::State::check_base(const std::string& name) const {
  if (!any_name && !names.contains(name))
    throw ApiError(400,
                   str("base_model: got ", quoted(name, 100), ", expected ", quoted(shown_name),
                       "; the setting served_model_name has the names, '*' allows any"),
                   "base_model");
}

// The future of requests to a model that is gone: it fails with the model's last save, from which clients can
// go on. Throws ApiError 404 if there is none.
std::string TrainingService::State::future_of_gone(const std::string& model) {
  const std::string last = checkpoints.newest(model);
  if (last.empty())
    throw ApiError(404, str("model_id: got ", quoted(model, 100), ", which does not exist"), "model_id");
  const std::string id = model + "/gone";  // one for all requests, so they take no memory
  const bool is_new = futures.add("", id);
  const std::string why = "its session ended, or the service was started again";
  if (is_new)
    futures.complete(id,
                     failed_result(str("model ", model, " is gone: ", why, "; its last save is ", last,
                                       ": create_training_client_from_state_with_optimizer goes on there"),
                                   "user"));
  return id;
}

Json TrainingService::State::enqueue(const std::string& model, int64_t seq_id, Work work) {
  if (!exists(model)) return {{"request_id", future_of_gone(model)}, {"model_id", model}};
  const std::string session = session_of(model);
  check_queue(session);
  std::string failure;
  {
    const MutexLock lock(mutex);
    if (const auto found = models.find(model); found != models.end()) {
      found->second.last_request = now_seconds();
      failure = found->second.failure;
    }
  }
  const std::string id = str(model, "/", seq_id);
  const bool is_new = futures.add(session, id);
  work.future = id;
  // The requests of a lost model fail at once: those before them may never come.
  if (is_new && !failure.empty()) futures.complete(id, failed_result(failure, "user"));
  else if (is_new && !queue.add(model, seq_id, std::move(work)))
    futures.complete(id, failed_result(str("seq_id ", seq_id, " of ", model,
                                           " was used before, and its result is no longer kept"),
                                       "user"));
  return {{"request_id", id}, {"model_id", model}};
}

Json TrainingService::State::enqueue_now(const std::string& session, const std::string& id,
                                         std::function<FutureResult()> run) {
  check_queue(session);
  if (futures.add(session, id)) queue.add_now(session, {.future = id, .run = std::move(run)});
  return {{"request_id", id}};
}

// Throws ApiError 400 if there are too many models, or one more does not fit into the memory.
void TrainingService::State::check_new_model(const ModelNeed& need, const LoraSettings& adapter,
                                             const std::set<std::string>& of_tenant) const {
  ModelsHeld held{.place = memory.on_host ? settings.folder : "host memory"};
  for (const auto& [id, model] : models) {
    if (ended.contains(id)) continue;
    held.count += of_tenant.contains(model.session);
    held.bytes += model.bytes;
    if (!adapter.enabled() && !model.adapter.enabled())
      throw ApiError(400, str("all weights are trained in ", id,
                              ", and one model at a time can do so: finish "
                              "its session, or train an adapter"));
  }
  if (held.count >= settings.max_models)
    throw ApiError(400, str("got a model more than ", settings.max_models,
                            "; expected fewer at once (max_models): finish a session"));
  held.parking = residents.parked_bytes() + parking_space(settings.folder, memory.on_host);
  if (const std::string reason = why_no_memory(need, adapter, memory, held); !reason.empty())
    throw ApiError(400, reason);
}

Json TrainingService::State::add_model(const std::string& session, const std::string& id,
                                       const ModelStart& start, const Json& metadata) {
  const ModelNeed need = need_of(*base.model, start.adapter);
  const std::string tenant = tenant_of(session).value_or("");
  const std::set<std::string> of_tenant = sessions_of(tenant);
  {
    const MutexLock lock(mutex);
    if (!is_restoring && !models.contains(id)) check_new_model(need, start.adapter, of_tenant);
    models.try_emplace(id, ClientModel{session, start.adapter, need.bytes(), now_seconds()});
  }
  journal.add_model(id, start);
  queue.add_model(id);
  checkpoints.begin_run(id, {{"tenant", tenant},
                             {"base_model", shown_name},
                             {"lora_rank", start.adapter.rank},
                             {"user_metadata", metadata}});
  Json answer = enqueue_now(
      session, id, [this, id, start, bytes = need.bytes()] { return make_training(id, start, bytes); });
  if (!start.path.empty())
    answer = enqueue_now(session, id + "/load", [this, id, start] {
      FutureResult result{{{"path", start.path}, {"model_id", id}, {"type", "load_weights"}}};
      if (journal.snapshot(id)) return result;  // done before a restart
      result = load(id, start.path, start.with_optimizer);
      journal_step(id, 0, result);
      return result;
    });
  answer["model_id"] = id;
  return answer;
}

FutureResult TrainingService::State::make_training(const std::string& id, const ModelStart& start,
                                                   int64_t bytes) {
  residents.add(id, bytes, [&] {
    auto model = std::make_unique<TrainingModel>(
        *base.model, start.adapter, start.seed,
        TrainingPlans{settings.plan, settings.max_tokens_per_pass, memory.passes});
    if (const auto snapshot = journal.snapshot(id)) try {
        model->load(*snapshot, /*with_optimizer=*/true);
      } catch (const UserError& error) {
        throw UserError(lose_model(session_of(id), id, str("its journal is damaged: ", error.what())));
      }
    return model;
  });
  const MutexLock lock(mutex);
  if (!models.contains(id)) ended.insert(id);  // its session has ended meanwhile
  return {{{"model_id", id}, {"type", "create_model"}}};
}

Json TrainingService::State::create_model(Fields& fields) {
  const std::string session = fields.required_text("session_id");
  const int64_t number = fields.required_integer("model_seq_id", 0, kMostSeqId);
  check_base(fields.required_text("base_model"));
  check_optimizer(fields);
  const OrderedJson* const config = fields.object("lora_config");
  if (!config && !settings.full_fine_tuning)
    fields.wrong("lora_config", "the settings of an adapter; all weights are trained with full_fine_tuning");
  ModelStart start;
  if (config) start.adapter = read_adapter(*config, settings.max_rank, start.seed);
  if (settings.full_fine_tuning) start.adapter = {};
  const Json metadata = read_metadata(fields);
  fields.ignore({"type"});
  fields.done();
  check_session(session);
  const std::string id = model_id(session, number);
  return add_model(session, id, start, metadata);
}

Json TrainingService::State::get_info(Fields& fields) {
  const std::string id = fields.required_text("model_id");
  fields.ignore({"type"});
  fields.done();
  session_of(id);
  const MutexLock lock(mutex);
  const LoraSettings& adapter = models.at(id).adapter;
  Json answer = {
      {"type", "get_info"},
      {"model_id", id},
      {"model_data",
       {{"model_name", shown_name}, {"tokenizer_id", std::filesystem::absolute(base.directory).string()}}},
      {"is_lora", adapter.enabled()},
      {"model_name", shown_name}};
  if (adapter.enabled()) answer["lora_rank"] = adapter.rank;
  return answer;
}

// ---- Training

Json TrainingService::State::forward_backward(ForwardBackwardRequest request) {
  const TinkerLossSettings loss = read_loss_settings(request);
  if (request.data.empty()) throw ApiError(400, "data: got no datum, expected 1 or more", "data");
  if (request.seq_id < 1 || request.seq_id > kMostSeqId)
    throw ApiError(400, str("seq_id: got ", request.seq_id, ", expected 1 or more"), "seq_id");
  const ModelConfig& config = base.model->config();
  for (size_t i = 0; i < request.data.size(); ++i)
    check_datum(request.data[i], loss, config.vocab_size,
                std::min(config.max_length(), config.max_exact_length - 1), str("data[", i, "]"));
  const std::string model = request.model_id;
  const int64_t seq_id = request.seq_id;
  auto shared = std::make_shared<const ForwardBackwardRequest>(std::move(request));
  return enqueue(model, seq_id, {.request = std::move(shared), .loss = loss});
}

Json TrainingService::State::optim_step(Fields& fields) {
  const std::string id = fields.required_text("model_id");
  const int64_t seq_id = fields.required_integer("seq_id", 1, kMostSeqId);
  const AdamParameters parameters = read_adam(fields);
  fields.ignore({"type"});
  fields.done();
  return enqueue(
      id, seq_id,
      run_later(
          [this, id, parameters] {
            return FutureResult{{{"type", "optim_step"}, {"metrics", training(id).optim_step(parameters)}}};
          },
          /*changes_weights=*/true));
}

Json TrainingService::State::save_weights(Fields& fields) {
  const std::string id = fields.required_text("model_id");
  const int64_t seq_id = fields.required_integer("seq_id", 1, kMostSeqId);
  const CheckpointName name =
      Checkpoints::checked(id, "weights", fields.text("path").value_or(str("checkpoint-", seq_id)));
  const bool overwrites = fields.boolean("overwrite").value_or(false);
  Checkpoints::Terms terms = read_terms(fields);
  terms.request = str(id, "/", seq_id);
  fields.ignore({"type"});
  fields.done();
  return enqueue(id, seq_id, run_later([this, id, name, overwrites, terms] {
                   const FutureResult result{{{"path", name.path()}, {"type", "save_weights"}}};
                   const std::string made_by = checkpoints.made_by(name);
                   if (made_by == terms.request) return result;  // done before a restart
                   if (!made_by.empty() && !overwrites)
                     throw UserError(str("path: a checkpoint named ", quoted(name.name),
                                         " exists; choose another name, or set overwrite"));
                   checkpoints.publish(name, terms, [&](const std::filesystem::path& folder) {
                     training(id).save(folder, base.directory.string(), /*with_optimizer=*/true);
                   });
                   return result;
                 }));
}

Json TrainingService::State::load_weights(Fields& fields) {
  const CheckpointName name = checkpoints.existing(fields.required_text("path"), "weights", "path");
  const bool with_optimizer = fields.boolean("optimizer").value_or(false);
  check_optimizer(fields);
  const Json metadata = read_metadata(fields);
  fields.ignore({"type"});
  if (const auto id = fields.text("model_id")) {
    const int64_t seq_id = fields.required_integer("seq_id", 1, kMostSeqId);
    fields.done();
    return enqueue(*id, seq_id,
                   run_later([this, id = *id, path = name.path(),
                              with_optimizer] { return load(id, path, with_optimizer); },
                             /*changes_weights=*/true));
  }
  const std::string session = fields.required_text("session_id");
  const int64_t number = fields.required_integer("model_seq_id", 0, kMostSeqId);
  check_base(fields.text("base_model").value_or(shown_name));
  fields.done();
  check_session(session);
  return add_model(
      session, model_id(session, number),
      {.adapter = checkpoints.adapter(name), .path = name.path(), .with_optimizer = with_optimizer},
      metadata);
}

FutureResult TrainingService::State::load(const std::string& id, const std::string& path,
                                          bool with_optimizer) {
  training(id).load(checkpoints.folder(checkpoints.existing(path, "weights", "path")), with_optimizer);
  return {{{"path", path}, {"model_id", id}, {"type", "load_weights"}}};
}

Json TrainingService::State::weights_info(Fields& fields) {
  const char* const field = fields.text("tinker_path") ? "tinker_path" : "path";
  const CheckpointName name = checkpoints.existing(fields.required_text(field), "", field);
  fields.done();
  const LoraSettings adapter = checkpoints.adapter(name);
  if (!adapter.enabled()) return {{"base_model", shown_name}, {"is_lora", false}};
  return {{"base_model", shown_name},
          {"is_lora", true},
          {"lora_rank", adapter.rank},
          {"train_unembed", has_target(adapter, "lm_head")},
          {"train_mlp", has_target(adapter, "up_proj")},
          {"train_attn", has_target(adapter, "q_proj")}};
}

}  // namespace bough
