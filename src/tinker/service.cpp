#include "tinker/service.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "models/lora.h"
#include "net/http_server.h"
#include "serve/access.h"
#include "tinker/futures.h"
#include "tinker/samplers.h"
#include "tinker/training_model.h"
#include "tinker/work_queue.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr const char* kPrefix = "/api/v1/";
constexpr double kPollSeconds = 25;  // a client's fetch of a result ends before its time limit of 45 s
constexpr double kAlpha = 32;        // of Tinker's adapters
constexpr size_t kMostName = 128;

std::string error_body(const std::string& message) {
  return dump_line({{"detail", message}});
}

// Fields of a request's JSON body.
std::string text_of(const Json& body, const char* name) {
  const auto found = body.find(name);
  if (found == body.end() || !found->is_string())
    throw ApiError(400,
                   str(name, ": got ", found == body.end() ? "nothing" : dump_line(*found).substr(0, 80),
                       ", expected a text"),
                   name);
  return found->get<std::string>();
}
std::optional<std::string> optional_text(const Json& body, const char* name) {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return {};
  return text_of(body, name);
}
int64_t integer_of(const Json& body, const char* name, int64_t low, int64_t high) {
  const auto found = body.find(name);
  if (found == body.end() || !found->is_number_integer() || found->get<int64_t>() < low ||
      found->get<int64_t>() > high)
    throw ApiError(400,
                   str(name, ": got ", found == body.end() ? "nothing" : dump_line(*found).substr(0, 80),
                       ", expected an integer from ", low, " to ", high),
                   name);
  return found->get<int64_t>();
}
int64_t integer_or(const Json& body, const char* name, int64_t low, int64_t high, int64_t otherwise) {
  const auto found = body.find(name);
  return found == body.end() || found->is_null() ? otherwise : integer_of(body, name, low, high);
}
bool flag_of(const Json& body, const char* name, bool otherwise) {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return otherwise;
  if (!found->is_boolean()) throw ApiError(400, str(name, ": expected true or false"), name);
  return found->get<bool>();
}
double number_or(const Json& body, const char* name, double low, double high, double otherwise) {
  const auto found = body.find(name);
  if (found == body.end() || found->is_null()) return otherwise;
  if (!found->is_number() || !(found->get<double>() >= low && found->get<double>() <= high))
    throw ApiError(
        400, str(name, ": got ", dump_line(*found).substr(0, 60), ", expected ", low, " to ", high), name);
  return found->get<double>();
}

// A checkpoint's name, which becomes the name of a folder.
std::string checked_name(const std::string& name) {
  const bool is_plain = !name.empty() && name.size() <= kMostName && name.front() != '.' &&
                        std::all_of(name.begin(), name.end(), [](unsigned char c) {
                          return std::isalnum(c) || c == '-' || c == '_' || c == '.' || c == ':';
                        });
  if (!is_plain)
    throw ApiError(
        400,
        str("path: got ", quoted(name, 80),
            ", expected a name of letters, digits, '-', '_', '.' and ':', at most ", kMostName, " of them"),
        "path");
  return name;
}

LoraSettings read_adapter(const Json& body, int64_t max_rank, uint64_t& seed) {
  const auto config = body.find("lora_config");
  if (config == body.end() || config->is_null())
    throw ApiError(400,
                   "lora_config: got nothing, expected the settings of an adapter; full fine-tuning is not "
                   "served",
                   "lora_config");
  if (!config->is_object()) throw ApiError(400, "lora_config: expected an object", "lora_config");
  LoraSettings adapter;
  adapter.rank = integer_of(*config, "rank", 1, max_rank);
  adapter.alpha = kAlpha;
  adapter.targets.clear();
  const auto add = [&](const char* flag, std::initializer_list<const char*> names) {
    if (flag_of(*config, flag, true))
      for (const char* name : names) adapter.targets.push_back({name});
  };
  add("train_attn", {"q_proj", "k_proj", "v_proj", "o_proj"});
  add("train_mlp", {"gate_proj", "up_proj", "down_proj"});
  add("train_unembed", {"lm_head"});
  if (adapter.targets.empty())
    throw ApiError(400,
                   "lora_config: train_attn, train_mlp and train_unembed are false; expected one to be true");
  seed = static_cast<uint64_t>(integer_or(*config, "seed", 0, int64_t{1} << 53, 0));
  return adapter;
}

bool has_target(const LoraSettings& adapter, const std::string& name) {
  return std::any_of(adapter.targets.begin(), adapter.targets.end(),
                     [&](const LoraTarget& target) { return target.name == name; });
}

}  // namespace

struct TrainingService::State {
  State(TrainingBase base_, TrainingServiceSettings settings_, std::string key);
  ~State() { http.close(); }

  struct Session {
    Clock::Time heartbeat;
    int64_t next_sampler = 0;
  };
  struct ClientModel {
    std::string session;
    LoraSettings adapter;
    bool is_ready = false;                 // created, or loaded
    std::unique_ptr<TrainingModel> model;  // computation thread only
    int64_t num_snapshots = 0;             // computation thread only
  };
  struct SamplingSession {
    std::string session;
    fs::path adapter;        // empty: the base model
    std::string model_path;  // as clients see it; empty: the base model
    std::string follows;     // the model whose later saves it takes; empty: a snapshot
  };
  struct Wait {
    std::string future;
    Clock::Time deadline;
    std::shared_ptr<HttpExchange> exchange;
  };

  // HTTP. handle() and those that send: I/O thread. The routes: preparation threads.
  void handle(HttpRequest request, const std::shared_ptr<HttpExchange>& exchange);
  void retrieve(const HttpRequest& request, const std::shared_ptr<HttpExchange>& exchange);
  void expire_waits();
  Json get(const std::string& route);
  Json post(const std::string& route, const HttpRequest& request);
  Json create_session();
  Json create_model(const Json& body);
  Json get_info(const Json& body);
  Json forward_backward(ForwardBackwardRequest request);
  Json optim_step(const Json& body);
  Json save_weights(const Json& body);
  Json load_weights(const Json& body);
  Json weights_info(const Json& body);
  Json save_for_sampler(const Json& body);
  Json create_sampling_session(const Json& body);
  Json sample(const Json& body);
  Json finish_session(const std::string& session);

  // Any thread.
  Json enqueue(const std::string& model, int64_t seq_id, Work work);
  Json enqueue_now(const std::string& session, const std::string& key, std::function<FutureResult()> run,
                   const std::string& model = "");
  std::string session_of(const std::string& model);
  void check_base(const std::string& name) const;
  fs::path checkpoint_folder(const std::string& path, const char* kind) const;  // of a tinker:// path
  fs::path model_folder(const std::string& model, const char* kind) const {
    return fs::path(settings.folder) / model / kind;
  }
  void end_session(const std::string& session);

  // Computation thread.
  void compute(WorkQueue::Group group);
  TrainingModel& training(const std::string& model);
  FutureResult guarded(const std::function<FutureResult()>& run) const;

  const TrainingBase base;
  const TrainingServiceSettings settings;
  const std::string api_key;
  std::set<std::string> names;  // of the base model; the first one is shown
  bool any_name = false;
  std::string shown_name;
  const SteadyClock clock;
  Futures futures{clock};
  WorkQueue queue;
  Samplers samplers;
  std::atomic<uint64_t> next_seed = 1, num_waiters = 0, num_sessions = 0;
  const std::string epoch;  // makes the ids of this process unique

  mutable Mutex mutex;
  std::map<std::string, Session> sessions GUARDED_BY(mutex);
  std::map<std::string, ClientModel> models GUARDED_BY(mutex);
  std::map<std::string, SamplingSession> sampling GUARDED_BY(mutex);
  std::set<std::string> ended GUARDED_BY(mutex);  // models whose memory the computation thread must free

  std::map<uint64_t, Wait> waits;  // I/O thread only
  HttpServer http;                 // last, because its threads use the members above
};

TrainingService::State::State(TrainingBase base_, TrainingServiceSettings settings_, std::string key)
    : base(std::move(base_)),
      settings(std::move(settings_)),
      api_key(std::move(key)),
      samplers(*base.model, base.engine),
      epoch([] {
        std::random_device device;
        return str(std::hex, device() & 0xffffffU);
      }()),
      http({.host = settings.host,
            .port = static_cast<int>(settings.port),
            .limits = settings.http,
            .error_body = [](int, const std::string& message,
                             const std::string&) { return error_body(message); }},
           [this](HttpRequest request, const std::shared_ptr<HttpExchange>& exchange) {
             handle(std::move(request), exchange);
           }) {
  fs::create_directories(settings.folder);
  for (const std::string& name : settings.served_model_name) {
    if (name == "*") any_name = true;
    else names.insert(name);
    if (shown_name.empty() && name != "*") shown_name = name;
  }
  if (shown_name.empty()) shown_name = fs::weakly_canonical(base.directory).filename().string();
  names.insert({shown_name, base.directory.string(), fs::absolute(base.directory).string()});
  http.every(0.25, [this] { expire_waits(); });
  http.every(1, [this] {
    futures.drop_old();
    std::vector<std::string> late;
    {
      const MutexLock lock(mutex);
      for (const auto& [id, session] : sessions)
        if (seconds_between(session.heartbeat, clock.now()) > settings.heartbeat_seconds) late.push_back(id);
    }
    for (const std::string& id : late) {
      log_warning(str("serve: session ", id, ": no heartbeat for ", settings.heartbeat_seconds,
                      " s; its models leave the memory, saved checkpoints stay"));
      end_session(id);
    }
  });
}

// ---- HTTP

void TrainingService::State::handle(HttpRequest request, const std::shared_ptr<HttpExchange>& exchange) {
  const auto refuse = [&](const ApiError& error) {
    HttpHeaders headers;
    if (error.status == 429) headers.emplace_back("Retry-After", "1");
    exchange->respond({.status = error.status, .body = error_body(error.what()), .headers = headers});
  };
  try {
    if (!request.path.starts_with(kPrefix))
      throw ApiError(404,
                     str("unknown path ", quoted(request.path, 100), "; docs/tinker.md lists the paths"));
    const std::string route = request.path.substr(std::string(kPrefix).size());
    if (api_key.empty()) {
      check_local(request);
    } else if (route != "healthz") {
      std::string given = request.header("x-api-key");
      if (given.empty() && request.header("authorization").starts_with("Bearer "))
        given = request.header("authorization").substr(7);
      if (given.empty() || !same_key(given, api_key))
        throw ApiError(
            401, "the key is missing or wrong: send X-API-Key, which Tinker's SDK takes from TINKER_API_KEY");
    }
    if (request.method == "GET") {
      exchange->respond({.body = dump_line(get(route))});
      return;
    }
    if (request.method != "POST")
      throw ApiError(
          405, str(request.path.substr(0, 80), ": got ", quoted(request.method, 20), ", expected POST"));
    if (!request.header("content-encoding").empty())
      throw ApiError(415, "content-encoding: expected none; client/config says so");
    if (route == "retrieve_future") return retrieve(request, exchange);
    const size_t bytes = request.body.size();
    http.prepare(bytes, [this, route, exchange, request = std::move(request)] {
      HttpResponse response;
      try {
        response.body = dump_line(post(route, request));
      } catch (const ApiError& error) {
        response = {.status = error.status, .body = error_body(error.what())};
        if (error.status == 429) response.headers.emplace_back("Retry-After", "1");
      } catch (const UserError& error) {
        response = {.status = 400, .body = error_body(error.what())};
      } catch (const std::exception& error) {
        log_warning(str("serve: ", route, ": ", error.what()));
        response = {.status = 500, .body = error_body(error.what())};
      }
      http.post(
          [exchange, response = std::move(response)]() mutable { exchange->respond(std::move(response)); });
    });
  } catch (const ApiError& error) {
    refuse(error);
  }
}

void TrainingService::State::retrieve(const HttpRequest& request,
                                      const std::shared_ptr<HttpExchange>& exchange) {
  Json body;
  try {
    body = parse_json(request.body, "body");
  } catch (const UserError& error) {
    throw ApiError(400, error.what());
  }
  if (!body.is_object()) throw ApiError(400, "the body is no JSON object");
  const std::string id = text_of(body, "request_id");
  const bool wants_protobuf = request.header("accept").find("x-protobuf") != std::string::npos;
  const uint64_t waiter = ++num_waiters;
  waits[waiter] = {id, clock.now() + std::chrono::milliseconds(static_cast<int64_t>(kPollSeconds * 1000)),
                   exchange};
  const auto found = futures.wait_for(id, waiter, [this, waiter, wants_protobuf](const FutureResult& result) {
    HttpResponse response;
    if (wants_protobuf && !result.protobuf.empty()) {
      response.body = result.protobuf;
      response.content_type = "application/x-protobuf";
    } else {
      response.body = dump_line(result.json);
    }
    http.post([this, waiter, response = std::move(response)]() mutable {
      const auto wait = waits.extract(waiter);
      if (wait) wait.mapped().exchange->respond(std::move(response));
    });
  });
  if (found == Futures::Found::kReady || found == Futures::Found::kWaits) return;
  waits.erase(waiter);
  if (found == Futures::Found::kGone)
    throw ApiError(
        410, str("request_id ", quoted(id, 60), ": its result is no longer kept; send the request again"));
  throw ApiError(404, str("request_id: got ", quoted(id, 60), ", which this service never gave"));
}

void TrainingService::State::expire_waits() {
  const Clock::Time now = clock.now();
  std::erase_if(waits, [&](const auto& entry) {
    const Wait& wait = entry.second;
    if (now < wait.deadline && wait.exchange->is_open()) return false;
    futures.stop_waiting(wait.future, entry.first);
    wait.exchange->respond(
        {.body = dump_line({{"type", "try_again"}, {"request_id", wait.future}, {"queue_state", "active"}})});
    return true;
  });
}

Json TrainingService::State::get(const std::string& route) {
  if (route == "healthz") return {{"status", "ok"}};
  if (route == "get_server_capabilities") {
    Json list = Json::array();
    for (const std::string& name : names)
      if (name == shown_name || !name.starts_with("/"))
        list.push_back({{"model_name", name},
                        {"max_context_length", base.model->config().max_length()},
                        {"trainable", true},
                        {"sampleable", true}});
    return {{"supported_models", list}};
  }
  constexpr std::string_view kSamplers = "samplers/";
  if (route.starts_with(kSamplers)) {
    const std::string id = route.substr(kSamplers.size());
    const MutexLock lock(mutex);
    const auto found = sampling.find(id);
    if (found == sampling.end()) throw ApiError(404, str("sampler ", quoted(id, 100), " is unknown"));
    Json answer = {{"sampler_id", id}, {"base_model", shown_name}};
    if (!found->second.model_path.empty()) answer["model_path"] = found->second.model_path;
    return answer;
  }
  throw ApiError(404, str("unknown path ", quoted(route, 100), "; docs/tinker.md lists the paths"));
}

Json TrainingService::State::post(const std::string& route, const HttpRequest& request) {
  const bool is_batch = route == "forward_backward" || route == "forward";
  if (is_batch && request.header("content-type").find("x-protobuf") != std::string::npos)
    return forward_backward(read_forward_backward(std::string_view(request.body)));
  const Json body = parse_json(request.body.empty() ? "{}" : request.body, "body");
  if (!body.is_object()) throw ApiError(400, "the body is no JSON object");
  if (is_batch) return forward_backward(read_forward_backward(body, route == "forward"));
  if (route == "client/config")
    return {{"parallel_fwdbwd_chunks", true},
            {"proto_compress_fwdbwd", false},
            {"use_pyqwest_transport", false},
            {"fwdbwd_max_chunk_len", 65'536},
            {"fwdbwd_max_chunk_bytes_count", settings.http.max_body.count * 3 / 4},
            {"fwdbwd_dispatch_bytes_semaphore_size", settings.http.max_body.count},
            {"sample_max_concurrent_requests", settings.http.max_connections / 2}};
  if (route == "create_session") return create_session();
  if (route == "session_heartbeat") {
    const std::string id = text_of(body, "session_id");
    const MutexLock lock(mutex);
    const auto found = sessions.find(id);
    if (found == sessions.end()) throw ApiError(410, str("session ", quoted(id, 80), " has ended"));
    found->second.heartbeat = clock.now();
    return {{"type", "session_heartbeat"}};
  }
  if (route == "telemetry") return {{"status", "accepted"}};
  if (route == "create_model") return create_model(body);
  if (route == "get_info") return get_info(body);
  if (route == "optim_step") return optim_step(body);
  if (route == "save_weights") return save_weights(body);
  if (route == "load_weights") return load_weights(body);
  if (route == "weights_info") return weights_info(body);
  if (route == "save_weights_for_sampler") return save_for_sampler(body);
  if (route == "create_sampling_session") return create_sampling_session(body);
  if (route == "asample") return sample(body);
  if (route.starts_with("sessions/") && route.ends_with("/finish"))
    return finish_session(route.substr(9, route.size() - 9 - 7));
  throw ApiError(404, str("unknown path ", quoted(route, 100), "; docs/tinker.md lists the paths"));
}

// ---- Sessions and models

Json TrainingService::State::create_session() {
  const std::string id = str("session-", epoch, "-", ++num_sessions);
  const MutexLock lock(mutex);
  sessions[id] = {.heartbeat = clock.now()};
  return {{"type", "create_session"}, {"session_id", id}};
}

Json TrainingService::State::finish_session(const std::string& session) {
  end_session(session);
  return {{"status", "finished"}};
}

void TrainingService::State::end_session(const std::string& session) {
  std::vector<std::string> its;
  {
    const MutexLock lock(mutex);
    sessions.erase(session);
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

std::string TrainingService::State::session_of(const std::string& model) {
  const MutexLock lock(mutex);
  const auto found = models.find(model);
  if (found == models.end())
    throw ApiError(404, str("model_id: got ", quoted(model, 100), ", which does not exist"));
  return found->second.session;
}

void TrainingService::State::check_base(const std::string& name) const {
  if (!any_name && !names.contains(name))
    throw ApiError(400,
                   str("base_model: got ", quoted(name, 100), ", expected ", quoted(shown_name),
                       "; served_model_name sets the names, '*' allows any"),
                   "base_model");
}

Json TrainingService::State::enqueue(const std::string& model, int64_t seq_id, Work work) {
  const std::string session = session_of(model);
  if (futures.num_pending() >= settings.max_requests)
    throw ApiError(429, str("more than ", settings.max_requests, " requests wait or run"));
  const auto [id, is_new] = futures.add(session, str(model, "/", seq_id));
  if (is_new) {
    work.future = id;
    if (!queue.add(model, seq_id, std::move(work))) {
      futures.complete(id, failed_result(str("seq_id ", seq_id, " of ", model,
                                             " has been used, and its result is "
                                             "no longer kept"),
                                         "user"));
    }
  }
  return {{"request_id", id}, {"model_id", model}};
}

Json TrainingService::State::enqueue_now(const std::string& session, const std::string& key,
                                         std::function<FutureResult()> run, const std::string& model) {
  if (futures.num_pending() >= settings.max_requests)
    throw ApiError(429, str("more than ", settings.max_requests, " requests wait or run"));
  const auto [id, is_new] = futures.add(session, key);
  if (is_new) queue.add_now({.future = id, .request = nullptr, .loss = {}, .run = std::move(run)});
  Json answer = {{"request_id", id}};
  if (!model.empty()) answer["model_id"] = model;
  return answer;
}

Json TrainingService::State::create_model(const Json& body) {
  const std::string session = text_of(body, "session_id");
  const std::string id = str(session, ":train:", integer_of(body, "model_seq_id", 0, int64_t{1} << 40));
  check_base(text_of(body, "base_model"));
  if (const auto config = body.find("optimizer_config"); config != body.end() && config->is_object())
    if (const std::string type = config->value("type", "adamw"); type != "adamw")
      throw ApiError(400, str("optimizer_config.type: got ", quoted(type, 40), ", expected adamw"));
  uint64_t seed = 0;
  const LoraSettings adapter = read_adapter(body, settings.max_rank, seed);
  {
    const MutexLock lock(mutex);
    if (!sessions.contains(session))
      throw ApiError(404, str("session_id: got ", quoted(session, 80), ", which does not exist"));
    if (!models.contains(id) && std::ssize(models) - std::ssize(ended) >= settings.max_models)
      throw ApiError(400, str("more than ", settings.max_models, " models are in training (max_models)"));
    models.try_emplace(
        id,
        ClientModel{
            .session = session, .adapter = adapter, .is_ready = false, .model = nullptr, .num_snapshots = 0});
  }
  queue.add_model(id);
  return enqueue_now(
      session, id,
      [this, id, adapter, seed] {
        auto model = std::make_unique<TrainingModel>(
            *base.model, adapter, seed,
            TrainingPlans{settings.plan, settings.max_tokens_per_pass,
                          settings.memory.is_auto() ? std::nullopt : std::optional(settings.memory.count)});
        const MutexLock lock(mutex);
        if (const auto found = models.find(id); found != models.end()) found->second.model = std::move(model);
        return FutureResult{{{"model_id", id}, {"type", "create_model"}}, ""};
      },
      id);
}

Json TrainingService::State::get_info(const Json& body) {
  const std::string id = text_of(body, "model_id");
  const MutexLock lock(mutex);
  const auto found = models.find(id);
  if (found == models.end())
    throw ApiError(404, str("model_id: got ", quoted(id, 100), ", which does not exist"));
  return {
      {"type", "get_info"},
      {"model_id", id},
      {"model_data", {{"model_name", shown_name}, {"tokenizer_id", fs::absolute(base.directory).string()}}},
      {"is_lora", true},
      {"lora_rank", found->second.adapter.rank},
      {"model_name", shown_name}};
}

// ---- Training

Json TrainingService::State::forward_backward(ForwardBackwardRequest request) {
  const TinkerLossSettings loss = read_loss_settings(request);
  if (request.data.empty()) throw ApiError(400, "data: got no datum, expected 1 or more", "data");
  if (request.seq_id < 1)
    throw ApiError(400, str("seq_id: got ", request.seq_id, ", expected 1 or more"), "seq_id");
  for (size_t i = 0; i < request.data.size(); ++i)
    check_datum(request.data[i], loss, base.model->config().vocab_size,
                base.model->config().max_exact_length - 1, str("data[", i, "]"));
  const std::string model = request.model_id;
  const int64_t seq_id = request.seq_id;
  return enqueue(model, seq_id,
                 {.future = "",
                  .request = std::make_shared<ForwardBackwardRequest>(std::move(request)),
                  .loss = loss,
                  .run = {}});
}

Json TrainingService::State::optim_step(const Json& body) {
  const std::string id = text_of(body, "model_id");
  const AdamParameters parameters = read_adam(body);
  return enqueue(
      id, integer_of(body, "seq_id", 1, int64_t{1} << 40),
      {.future = "", .request = nullptr, .loss = {}, .run = [this, id, parameters] {
         return FutureResult{{{"type", "optim_step"}, {"metrics", training(id).optim_step(parameters)}}, ""};
       }});
}

Json TrainingService::State::save_weights(const Json& body) {
  const std::string id = text_of(body, "model_id");
  const int64_t seq_id = integer_of(body, "seq_id", 1, int64_t{1} << 40);
  const std::string name = checked_name(optional_text(body, "path").value_or(str("checkpoint-", seq_id)));
  const bool overwrites = flag_of(body, "overwrite", false);
  return enqueue(id, seq_id,
                 {.future = "", .request = nullptr, .loss = {}, .run = [this, id, name, overwrites] {
                    const fs::path folder = model_folder(id, "weights") / name;
                    if (fs::exists(folder) && !overwrites)
                      throw UserError(str("path: a checkpoint named ", quoted(name),
                                          " exists; choose another name, or overwrite"));
                    training(id).save(folder, base.directory.string(), /*with_optimizer=*/true);
                    return FutureResult{
                        {{"path", str("tinker://", id, "/weights/", name)}, {"type", "save_weights"}}, ""};
                  }});
}

fs::path TrainingService::State::checkpoint_folder(const std::string& path, const char* kind) const {
  constexpr std::string_view kScheme = "tinker://";
  const auto refuse = [&](const char* why) {
    throw ApiError(400, str("path: got ", quoted(path, 160), ": ", why), "path");
  };
  if (!path.starts_with(kScheme))
    refuse("expected tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME");
  const std::string rest = path.substr(kScheme.size());
  const size_t first = rest.find('/'),
               second = first == std::string::npos ? first : rest.find('/', first + 1);
  if (second == std::string::npos) refuse("expected tinker://MODEL/weights/NAME");
  const std::string found_kind = rest.substr(first + 1, second - first - 1);
  if (found_kind != "weights" && found_kind != "sampler_weights")
    refuse("expected weights or sampler_weights");
  if (std::string_view(kind) == "weights" && found_kind != kind)
    refuse("expected a checkpoint of save_weights");
  const fs::path folder = model_folder(checked_name(rest.substr(0, first)), found_kind.c_str()) /
                          checked_name(rest.substr(second + 1));
  if (!fs::exists(folder / "adapter_config.json")) refuse("there is no such checkpoint");
  return folder;
}

Json TrainingService::State::weights_info(const Json& body) {
  const fs::path folder =
      checkpoint_folder(text_of(body, body.contains("tinker_path") ? "tinker_path" : "path"), "");
  const Json config = read_json(folder / "adapter_config.json");
  LoraSettings adapter;
  adapter.targets.clear();
  for (const Json& name : config["target_modules"]) adapter.targets.push_back({name.get<std::string>()});
  return {{"base_model", shown_name},
          {"is_lora", true},
          {"lora_rank", config["r"]},
          {"train_unembed", has_target(adapter, "lm_head")},
          {"train_mlp", has_target(adapter, "up_proj")},
          {"train_attn", has_target(adapter, "q_proj")}};
}

Json TrainingService::State::load_weights(const Json& body) {
  const fs::path folder = checkpoint_folder(text_of(body, "path"), "weights");
  const bool with_optimizer = flag_of(body, "optimizer", false);
  const auto load = [this, folder, with_optimizer](const std::string& id) {
    training(id).load(folder, with_optimizer);
    return FutureResult{{{"path", folder.filename().string()}, {"model_id", id}, {"type", "load_weights"}},
                        ""};
  };
  if (const auto id = optional_text(body, "model_id"))
    return enqueue(
        *id, integer_of(body, "seq_id", 1, int64_t{1} << 40),
        {.future = "", .request = nullptr, .loss = {}, .run = [load, id = *id] { return load(id); }});
  // The load creates the model.
  const Json config = read_json(folder / "adapter_config.json");
  Json create = {{"session_id", text_of(body, "session_id")},
                 {"model_seq_id", integer_of(body, "model_seq_id", 0, int64_t{1} << 40)},
                 {"base_model", optional_text(body, "base_model").value_or(shown_name)}};
  const std::set<std::string> targets(config["target_modules"].begin(), config["target_modules"].end());
  create["lora_config"] = {{"rank", config["r"]},
                           {"train_attn", targets.contains("q_proj")},
                           {"train_mlp", targets.contains("up_proj")},
                           {"train_unembed", targets.contains("lm_head")}};
  create_model(create);
  const std::string id =
      str(create["session_id"].get<std::string>(), ":train:", create["model_seq_id"].get<int64_t>());
  return enqueue_now(
      session_of(id), str(id, "/load"), [load, id] { return load(id); }, id);
}

// ---- Sampling

Json TrainingService::State::save_for_sampler(const Json& body) {
  const std::string id = text_of(body, "model_id");
  const int64_t seq_id = integer_of(body, "seq_id", 1, int64_t{1} << 40);
  const std::optional<std::string> given = optional_text(body, "path");
  const std::string name = given ? checked_name(*given) : str("snapshot-", seq_id);
  const std::string kind = optional_text(body, "kind").value_or("snapshot");
  if (kind != "snapshot" && kind != "inflight")
    throw ApiError(400, str("kind: got ", quoted(kind, 40), ", expected snapshot or inflight"), "kind");
  const std::string session = session_of(id);
  const bool is_ephemeral = !given;
  if (is_ephemeral) integer_of(body, "sampling_session_seq_id", 0, int64_t{1} << 40);
  return enqueue(
      id, seq_id,
      {.future = "", .request = nullptr, .loss = {}, .run = [this, id, name, kind, session, is_ephemeral] {
         const fs::path folder = model_folder(id, "sampler_weights") / name;
         const std::string path = str("tinker://", id, "/sampler_weights/", name);
         training(id).save(folder, base.directory.string(), /*with_optimizer=*/false);
         samplers.forget(folder);
         if (!is_ephemeral) return FutureResult{{{"path", path}, {"type", "save_weights_for_sampler"}}, ""};
         const MutexLock lock(mutex);
         const std::string sampler = str(session, ":sample:", name, "-", ++sessions[session].next_sampler);
         const std::string follows = kind == "inflight" ? id : "";
         if (!follows.empty())
           for (auto& [other, each] : sampling)
             if (each.follows == follows) each.adapter = folder;
         sampling[sampler] = {session, folder, path, follows};
         return FutureResult{{{"sampling_session_id", sampler}, {"type", "save_weights_for_sampler"}}, ""};
       }});
}

Json TrainingService::State::create_sampling_session(const Json& body) {
  const std::string session = text_of(body, "session_id");
  const int64_t number = integer_of(body, "sampling_session_seq_id", 0, int64_t{1} << 40);
  const auto path = optional_text(body, "model_path");
  fs::path adapter;
  if (path) adapter = checkpoint_folder(*path, "");
  else check_base(text_of(body, "base_model"));
  const MutexLock lock(mutex);
  if (!sessions.contains(session))
    throw ApiError(404, str("session_id: got ", quoted(session, 80), ", which does not exist"));
  const std::string id = str(session, ":sample:", number);
  sampling[id] = {session, adapter, path.value_or(""), ""};
  return {{"type", "create_sampling_session"}, {"sampling_session_id", id}};
}

namespace {

void refuse_unserved(const Json& body) {
  for (const char* name : {"prompt_alt_tokens_k", "target_prompt_logprobs"}) {
    const auto found = body.find(name);
    if (found != body.end() && !found->is_null() && *found != 0)
      throw ApiError(400, str(name, ": not served; prompt_logprobs and topk_prompt_logprobs are"), name);
  }
  if (flag_of(body, "record_stability_info", false))
    throw ApiError(
        400,
        "record_stability_info: not served, as stable_reinforce is not; use importance_sampling or cispo",
        "record_stability_info");
}

void read_stop(const Json& given, SamplingParameters& sampling) {
  const auto stop = given.find("stop");
  if (stop == given.end() || stop->is_null()) return;
  if (stop->is_string()) {
    sampling.stop = {stop->get<std::string>()};
    return;
  }
  if (!stop->is_array()) throw ApiError(400, "sampling_params.stop: expected a text, texts or token ids");
  sampling.ignore_eos = true;  // a list replaces the model's own stop tokens
  for (const Json& each : *stop) {
    if (each.is_string()) sampling.stop.push_back(each.get<std::string>());
    else if (each.is_number_integer()) sampling.stop_token_ids.push_back(each.get<int64_t>());
    else throw ApiError(400, "sampling_params.stop: expected a text, texts or token ids");
  }
}

SamplingParameters read_sampling_params(const Json& body, int64_t prompt_length, int64_t max_length) {
  SamplingParameters sampling;
  static const Json kNone = Json::object();
  const auto found = body.find("sampling_params");
  const Json& given = found == body.end() || found->is_null() ? kNone : *found;
  if (!given.is_object()) throw ApiError(400, "sampling_params: expected an object");
  for (const auto& [name, value] : given.items())
    if (name != "max_tokens" && name != "seed" && name != "stop" && name != "temperature" &&
        name != "top_k" && name != "top_p")
      throw ApiError(400, str("sampling_params.", name.substr(0, 60), ": unknown"));
  const int64_t rest = max_length - prompt_length;
  if (rest < 1)
    throw ApiError(400, str("prompt: got ", prompt_length, " tokens, expected at most ", max_length - 1));
  sampling.n_samples = integer_or(body, "num_samples", 1, 100'000, 1);
  sampling.max_new_tokens = std::min(integer_or(given, "max_tokens", 1, int64_t{1} << 40, rest), rest);
  sampling.temperature = number_or(given, "temperature", 0, 100, 1);
  sampling.top_p = number_or(given, "top_p", 0, 1, 1);
  sampling.top_k = std::max(int64_t{0}, integer_or(given, "top_k", -1, int64_t{1} << 30, -1));
  sampling.top_logprobs = integer_or(body, "topk_sample_logprobs", 0, 1000, 0);
  read_stop(given, sampling);
  return sampling;
}

}  // namespace

Json TrainingService::State::sample(const Json& body) {
  refuse_unserved(body);
  const std::string sampler = text_of(body, "sampling_session_id");
  const int64_t seq_id = integer_of(body, "seq_id", 0, std::numeric_limits<int64_t>::max());
  SampleRequest request;
  if (!body.contains("prompt")) throw ApiError(400, "prompt: got nothing, expected a model input");
  request.prompt = read_model_input(body["prompt"], "prompt");
  const auto length = std::ssize(request.prompt);
  if (length == 0) throw ApiError(400, "prompt: got no tokens, expected 1 or more");
  for (const int32_t id : request.prompt)
    if (id >= base.model->config().vocab_size)
      throw ApiError(400,
                     str("prompt: got token id ", id, ", expected below ", base.model->config().vocab_size));
  request.sampling = read_sampling_params(body, length, base.model->config().max_length());
  request.wants_prompt_log_probs = flag_of(body, "prompt_logprobs", false);
  request.prompt_top_k = integer_or(body, "topk_prompt_logprobs", 0, 1000, 0);
  request.prompt_last_n = integer_or(body, "prompt_logprobs_last_n", 1, std::max<int64_t>(1, length - 1), 0);
  if (!request.wants_prompt_log_probs && (request.prompt_top_k > 0 || request.prompt_last_n > 0))
    request.wants_prompt_log_probs = request.prompt_top_k > 0;
  std::string session;
  {
    const MutexLock lock(mutex);
    const auto found = sampling.find(sampler);
    if (found == sampling.end())
      throw ApiError(404, str("sampling_session_id: got ", quoted(sampler, 100), ", which does not exist"));
    request.adapter = found->second.adapter;
    session = found->second.session;
  }
  const auto seed = body.find("sampling_params") != body.end() && body["sampling_params"].contains("seed") &&
                            body["sampling_params"]["seed"].is_number_integer()
                        ? static_cast<uint64_t>(body["sampling_params"]["seed"].get<int64_t>())
                        : (next_seed++ << 20U);
  request.seed = seed;
  if (futures.num_pending() >= settings.max_requests)
    throw ApiError(429, str("more than ", settings.max_requests, " requests wait or run"));
  const int64_t count = request.sampling.n_samples;
  const auto [id, is_new] = futures.add(session, str(sampler, "/", seq_id));
  if (is_new)
    queue.add_now(
        {.future = "", .request = nullptr, .loss = {}, .run = [this, id = id, request = std::move(request)] {
           const FutureResult early = guarded([&] {
             samplers.submit(request, [this, id](const SampleResult& result) {
               futures.complete(id, {result.json(), result.protobuf()});
             });
             return FutureResult{};
           });
           if (!early.json.is_null()) futures.complete(id, early);
           return FutureResult{};
         }});
  Json sequences = Json::array();
  for (int64_t i = 0; i < count; ++i) sequences.push_back(str(id, "-", i));
  return {{"request_id", id}, {"sample_sequence_ids", sequences}};
}

// ---- Computation

TrainingModel& TrainingService::State::training(const std::string& model) {
  const MutexLock lock(mutex);
  const auto found = models.find(model);
  if (found == models.end() || !found->second.model)
    throw UserError(str("model ", model, " does not exist: its creation failed, or its session has ended"));
  return *found->second.model;  // removed by this thread only
}

FutureResult TrainingService::State::guarded(const std::function<FutureResult()>& run) const {
  try {
    return run();
  } catch (const ApiError& error) {
    return failed_result(error.what(), "user");
  } catch (const UserError& error) {
    return failed_result(error.what(), "user");
  } catch (const std::exception& error) {
    log_warning(str("serve: ", error.what()));
    return failed_result(error.what(), "server");
  }
}

void TrainingService::State::compute(WorkQueue::Group group) {
  if (!group.works.front().request) {
    Work& work = group.works.front();
    FutureResult result = guarded(work.run);
    if (!work.future.empty()) futures.complete(work.future, std::move(result));
    return;
  }
  std::vector<const ForwardBackwardRequest*> requests;
  for (const Work& work : group.works) requests.push_back(work.request.get());
  std::vector<ForwardBackwardResult> results;
  const FutureResult failed = guarded([&] {
    results = training(group.model).forward_backward(requests, group.works.front().loss);
    return FutureResult{};
  });
  for (size_t i = 0; i < group.works.size(); ++i)
    futures.complete(group.works[i].future,
                     results.empty() ? failed : FutureResult{results[i].json(), results[i].protobuf()});
}

TrainingService::TrainingService(TrainingBase base, TrainingServiceSettings settings, std::string api_key)
    : state_(std::make_unique<State>(std::move(base), std::move(settings), std::move(api_key))) {}
TrainingService::~TrainingService() = default;

std::string TrainingService::url() const {
  return state_->http.url();
}

void TrainingService::run(const std::function<bool()>& stop) {
  State& state = *state_;
  while (!stop()) {
    {
      const MutexLock lock(state.mutex);
      for (const std::string& model : state.ended) state.models.erase(model);
      state.ended.clear();
    }
    WorkQueue::Group group = state.queue.take();
    bool worked = !group.works.empty();
    if (worked) state.compute(std::move(group));
    worked = state.samplers.step() || worked;
    if (!worked) state.queue.wait_until(std::chrono::steady_clock::now() + std::chrono::milliseconds(100));
  }
}

}  // namespace bough
