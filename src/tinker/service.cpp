#include "tinker/service.h"

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "base/log.h"
#include "kernels/common/device.h"
#include "serve/access.h"
#include "tinker/service_state.h"
#include "tinker/zstd_body.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "/api/v1/";
// Requests to the samplers that come within this time join the same pass.
constexpr double kSecondsBetweenPasses = 0.02;
constexpr double kExpirySeconds = 60;  // between looks for expired checkpoints

std::string error_body(const std::string& message) {
  return dump_line({{"detail", message}});
}

HttpResponse error_response(int status, const std::string& message) {
  HttpResponse response{.status = status, .body = error_body(message)};
  if (status == 429) response.headers.emplace_back("Retry-After", "1");
  return response;
}

uint64_t random_seed() {
  std::random_device device;
  return device();
}

std::string first_name(const TrainingBase& base, const TrainingServiceSettings& settings) {
  for (const std::string& name : settings.served_model_name)
    if (name != "*") return name;
  return fs::weakly_canonical(base.directory).filename().string();
}

TrainingBase with_memory(TrainingBase base, const ServiceMemory& memory) {
  base.engine.settings.kv_memory = {memory.sampler};
  return base;
}

}  // namespace

OrderedJson parse_body(const HttpRequest& request) {
  try {
    return parse_ordered_json(request.body.empty() ? "{}" : request.body, "the body");
  } catch (const UserError& error) {
    throw ApiError(400, error.what());
  }
}

TrainingService::State::State(TrainingBase base_, TrainingServiceSettings settings_, ApiKeys keys_)
    : memory(plan_memory(settings_, base_.model->device(), device_memory(base_.model->device()).free)),
      base(with_memory(std::move(base_), memory)),
      settings(std::move(settings_)),
      keys(std::move(keys_)),
      shown_name(first_name(base, settings)),
      names([this] {
        std::set<std::string> all(settings.served_model_name.begin(), settings.served_model_name.end());
        all.insert({shown_name, base.directory.string(), fs::absolute(base.directory).string()});
        return all;
      }()),
      any_name(names.contains("*")),
      checkpoints(settings.folder),
      folder_lock(settings.folder, "folder"),
      journal(checkpoints.hidden_folder("state"), settings.journal,
              base_identity(base.directory, c10::toString(base.model->dtype()))),
      residents(memory.models, settings.folder, clock),
      samplers(*base.model, base.engine),
      next_seed(random_seed()),  // another one than before a restart
      num_restored(restore()),
      http({.host = settings.host,
            .port = static_cast<int>(settings.port),
            .limits = settings.http,
            .error_body = [](int, const std::string& message,
                             const std::string&) { return error_body(message); }},
           [this](HttpRequest request, const std::shared_ptr<HttpExchange>& exchange) {
             handle(std::move(request), exchange);
           }) {
  http.every(0.25, [this] { expire_waits(); });
  http.every(1, [this] {
    futures.drop_old();
    end_late_sessions();
  });
  http.every(kExpirySeconds, [this] { http.prepare(0, [this] { clean_up(); }); });
}

void TrainingService::State::clean_up() {
  checkpoints.remove_expired();
  try {
    journal.drop_answers([this](const std::string& model, int64_t seq_id) {
      return futures.result(str(model, "/", seq_id)) != nullptr;
    });
  } catch (const std::exception& error) {
    log_warning(str("serve: ", error.what()));
  }
}

std::string TrainingService::State::check_access(const HttpRequest& request, const std::string& route) const {
  if (keys.empty()) {
    check_local(request);
    return "";
  }
  if (route == "healthz" || route.starts_with("download/")) return "";
  const std::optional<std::string> tenant = keys.tenant(given_key(request));
  if (!tenant)
    throw ApiError(
        401, "the key is missing or wrong: send X-API-Key, which Tinker's SDK takes from TINKER_API_KEY");
  return *tenant;
}

void TrainingService::State::handle(HttpRequest request, const std::shared_ptr<HttpExchange>& exchange) {
  try {
    const bool is_ours = request.path.starts_with(kPrefix);
    const std::string route = is_ours ? request.path.substr(kPrefix.size()) : "";
    const std::string tenant = check_access(request, route);
    if (!is_ours)
      throw ApiError(404,
                     str("unknown path ", quoted(request.path, 100), "; docs/tinker.md lists the paths"));
    const std::string encoding = request.header("content-encoding");
    if (!encoding.empty() && (encoding != "zstd" || route.starts_with("retrieve_future")))
      throw ApiError(415, str("content-encoding: got ", quoted(encoding, 40), ", expected zstd or none"));
    if (request.method == "POST" && route == "retrieve_future") return retrieve(request, tenant, exchange);
    if (request.method == "POST" && route == "retrieve_futures")
      return retrieve_several(request, tenant, exchange);
    const size_t bytes = request.body.size();
    http.prepare(bytes, [this, route, tenant, exchange, request = std::move(request), encoding]() mutable {
      HttpResponse response;
      try {
        if (!encoding.empty()) request.body = decompress_body(request.body, settings.http.max_body.count);
        response = respond(route, request, tenant);
      } catch (const ApiError& error) {
        response = error_response(error.status, error.what());
      } catch (const UserError& error) {
        response = error_response(400, error.what());
      } catch (const Json::exception& error) {  // a field of another type than expected
        response = error_response(400, error.what());
      } catch (const std::exception& error) {
        log_warning(str("serve: ", quoted(route, 80), ": ", error.what()));
        response = error_response(500, error.what());
      }
      http.post(
          [exchange, response = std::move(response)]() mutable { exchange->respond(std::move(response)); });
    });
  } catch (const ApiError& error) {
    exchange->respond(error_response(error.status, error.what()));
  }
}

void TrainingService::State::retrieve(const HttpRequest& request, const std::string& tenant,
                                      const std::shared_ptr<HttpExchange>& exchange) {
  const OrderedJson body = parse_body(request);
  Fields fields(body);
  const std::string id = fields.required_text("request_id");
  fields.ignore({"allow_metadata_only", "model_id"});
  fields.done();
  check_names(body, tenant);
  const bool wants_protobuf = request.header("accept").find("x-protobuf") != std::string::npos;
  const uint64_t waiter = ++num_waiters;
  waits[waiter] = {id, clock.now() + kPoll, exchange};
  const auto found = futures.wait_for(id, waiter, [this, waiter, wants_protobuf](const FutureResult& result) {
    HttpResponse response;
    if (wants_protobuf && !result.protobuf.empty()) {
      response.body = result.protobuf;
      response.content_type = "application/x-protobuf";
    } else {
      response.body = dump_line(result.as_json());
    }
    http.post([this, waiter, response = std::move(response)]() mutable {
      if (auto wait = waits.extract(waiter)) wait.mapped().exchange->respond(std::move(response));
    });
  });
  if (found == Futures::Found::kReady || found == Futures::Found::kWaits) return;
  waits.erase(waiter);
  bool is_of_session = false;
  {
    const MutexLock guard(mutex);
    is_of_session = sessions.contains(id.substr(0, id.find(':')));
  }
  if (is_of_session)
    throw ApiError(
        410, str("request_id: the result of ", quoted(id, 100), " is not kept; send the request again"));
  throw ApiError(404, str("request_id: got ", quoted(id, 100), ", which does not exist"), "request_id");
}

void TrainingService::State::expire_waits() {
  const Clock::Time now = clock.now();
  std::erase_if(waits, [&](const auto& entry) {
    const auto& [waiter, wait] = entry;
    if (now < wait.deadline && wait.exchange->is_open()) return false;
    futures.stop_waiting(wait.future, waiter);
    wait.exchange->respond(
        {.body = dump_line({{"type", "try_again"}, {"request_id", wait.future}, {"queue_state", "active"}})});
    return true;
  });
  std::erase_if(polls, [&](Poll& poll) { return answer_poll(poll, now >= poll.deadline); });
  num_polls = polls.size();
}

void TrainingService::State::end_late_sessions() {
  std::vector<std::string> late;
  {
    const MutexLock lock(mutex);
    for (const auto& [id, session] : sessions)
      if (seconds_between(session.heartbeat, clock.now()) > settings.heartbeat_seconds) late.push_back(id);
  }
  for (const std::string& id : late) {
    log_warning(str("serve: ", id, ": no heartbeat for ", settings.heartbeat_seconds,
                    " s; its models leave the memory, saved checkpoints stay"));
    end_session(id);
  }
}

HttpResponse TrainingService::State::respond(const std::string& route, const HttpRequest& request,
                                             const std::string& tenant) {
  if (route.starts_with("download/")) return download(route, request.method);
  const Json result = answer(route, request, tenant);
  keep_request(result, route, request);
  return result.is_null() ? HttpResponse{.status = 204} : HttpResponse{.body = dump_line(result)};
}

Json TrainingService::State::answer(const std::string& route, const HttpRequest& request,
                                    const std::string& tenant) {
  if (std::optional<Json> found = rest(route, request, tenant)) return *std::move(found);

  using Route = Json (State::*)(Fields&);
  static const std::map<std::string, Route> kRoutes = {
      {"session_heartbeat", &State::heartbeat},
      {"create_model", &State::create_model},
      {"get_info", &State::get_info},
      {"optim_step", &State::optim_step},
      {"save_weights", &State::save_weights},
      {"load_weights", &State::load_weights},
      {"weights_info", &State::weights_info},
      {"save_weights_for_sampler", &State::save_for_sampler},
      {"save_weights_external", &State::save_external},
      {"create_sampling_session", &State::create_sampling_session},
      {"asample", &State::sample},
      {"cancel_future", &State::cancel},
  };
  const auto known = kRoutes.find(route);
  const bool is_batch = route == "forward_backward" || route == "forward";
  const bool is_finish = route.starts_with("sessions/") && route.ends_with("/finish");
  const bool is_other = route == "client/config" || route == "client/dynamic_config" ||
                        route == "telemetry" || route == "create_session";
  if (known == kRoutes.end() && !is_batch && !is_finish && !is_other)
    throw ApiError(404, str("unknown path ", quoted(route, 100), "; docs/tinker.md lists the paths"));
  if (request.method != "POST")
    throw ApiError(405, str(route.substr(0, 80), ": got ", quoted(request.method, 20), ", expected POST"));
  if (is_batch && request.header("content-type").find("x-protobuf") != std::string::npos) {
    ForwardBackwardRequest batch = read_forward_backward(std::string_view(request.body));
    check_owner("model_id", batch.model_id, tenant);
    return forward_backward(std::move(batch));
  }
  const OrderedJson body = parse_body(request);
  check_names(body, tenant);
  if (is_batch) return forward_backward(read_forward_backward(body, route == "forward"));
  if (route == "client/config") return client_config();
  if (route == "client/dynamic_config") return {{"sample_cancel_enabled", true}};
  if (route == "telemetry") return {{"status", "accepted"}};
  if (is_finish) {
    const std::string session = route.substr(9, route.size() - 9 - 7);
    check_owner("session_id", session, tenant);
    end_session(session);
    return {{"status", "finished"}};
  }
  Fields fields(body);
  if (route == "create_session") return create_session(fields, tenant);
  return (this->*known->second)(fields);
}

Json TrainingService::State::client_config() const {
  const int64_t most = settings.http.max_body.count;
  return {{"parallel_fwdbwd_chunks", true},
          {"proto_compress_fwdbwd", settings.compress_requests},
          {"use_pyqwest_transport", false},
          {"fwdbwd_max_chunk_len", 65'536},
          {"fwdbwd_max_chunk_bytes_count", most / 4 * 3},
          {"fwdbwd_dispatch_bytes_semaphore_size", most},
          {"sample_max_concurrent_requests", std::max<int64_t>(1, settings.http.max_connections / 2)}};
}

Json TrainingService::State::capabilities() const {
  Json list = Json::array();
  for (const std::string& name : names)
    if (name != "*" && (name == shown_name || !name.starts_with("/")))
      list.push_back({{"model_name", name},
                      {"max_context_length", base.model->config().max_length()},
                      {"trainable", true},
                      {"sampleable", true}});
  return {{"supported_models", list}};
}

// ---- The computation thread

TrainingModel& TrainingService::State::training(const std::string& model) {
  {
    const MutexLock lock(mutex);
    const auto lost = models.find(model);
    if (lost != models.end() && !lost->second.failure.empty()) throw UserError(lost->second.failure);
  }
  TrainingModel* const found = residents.use(model);
  if (!found)
    throw UserError(str("model ", model, " does not exist: its creation failed, or its session has ended"));
  return *found;
}

void TrainingService::State::free_ended_models() {
  std::map<std::string, ClientModel> freed;
  std::set<std::string> finished;
  {
    const MutexLock lock(mutex);
    for (const std::string& model : ended)
      if (auto found = models.extract(model)) freed.insert(std::move(found));
    ended.clear();
    finished.swap(ended_sessions);
  }
  const auto log_failure = [](const std::string& what, const std::function<void()>& run) {
    try {
      run();
    } catch (const std::exception& error) {
      log_warning(str("serve: ", what, ": ", error.what()));
    }
  };
  for (const auto& [id, model] : freed)
    log_failure(id, [&] {
      residents.remove(id);
      checkpoints.end_run(id, model.last_request);
    });
  for (const std::string& session : finished) log_failure(session, [&] { journal.remove_session(session); });
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

void TrainingService::State::compute_now(const Work& work) {
  FutureResult result = guarded(work.run);
  if (!work.future.empty()) futures.complete(work.future, std::move(result));
}

// Runs works that belong to no model, and passes of the samplers' engines, for about `seconds`, and at least
// one of each. Returns false if there are none.
bool TrainingService::State::serve_others(double seconds, const std::function<bool()>& stop) {
  const Clock::Time start = clock.now();
  bool worked = false;
  while (true) {
    const Clock::Time pass = clock.now();
    bool did = false;
    while (const std::optional<Work> work = queue.take_now()) {
      compute_now(*work);
      did = true;
      if (seconds_between(pass, clock.now()) > kSecondsBetweenPasses) break;
    }
    did = samplers.step() || did;
    worked = worked || did;
    if (!did || seconds_between(start, clock.now()) >= seconds || stop()) return worked;
  }
}

void TrainingService::State::compute(ModelQueue::Group group) {
  const Work& first = group.works.front();
  if (!first.request) {
    FutureResult result = guarded(first.run);
    if (!first.future.empty())
      futures.complete(first.future, journalled(group.model, first, std::move(result)));
    return;
  }
  std::vector<const ForwardBackwardRequest*> requests;
  for (const Work& work : group.works) requests.push_back(work.request.get());
  std::vector<ForwardBackwardResult> results;
  const FutureResult failed = guarded([&] {
    results = training(group.model).forward_backward(requests, first.loss);
    return FutureResult{};
  });
  for (size_t i = 0; i < group.works.size(); ++i)
    futures.complete(group.works[i].future,
                     journalled(group.model, group.works[i],
                                results.empty() ? failed : future_result(std::move(results[i]))));
}

TrainingService::TrainingService(TrainingBase base, TrainingServiceSettings settings, ApiKeys keys)
    : state_(std::make_unique<State>(std::move(base), std::move(settings), std::move(keys))) {}
TrainingService::~TrainingService() = default;

std::string TrainingService::url() const {
  return state_->http.url();
}

void TrainingService::run(const std::function<bool()>& stop) {
  State& state = *state_;
  // Restored models are made before their requests run.
  while (const std::optional<Work> work = state.queue.take_now()) state.compute_now(*work);
  while (!stop()) {
    state.free_ended_models();
    state.residents.park_unused(state.settings.idle_seconds);
    const Clock::Time start = state.clock.now();
    ModelQueue::Group group = state.queue.take();
    bool worked = !group.works.empty();
    if (worked) state.compute(std::move(group));
    // Samples get as much time as training.
    worked = state.serve_others(seconds_between(start, state.clock.now()), stop) || worked;
    if (!worked) state.queue.wait_until(std::chrono::steady_clock::now() + std::chrono::milliseconds(100));
  }
  state.http.close();
  if (state.settings.journal) return;  // sessions go on when the service starts again
  std::vector<std::string> sessions;
  {
    const MutexLock lock(state.mutex);
    for (const auto& [id, session] : state.sessions) sessions.push_back(id);
  }
  for (const std::string& id : sessions) state.end_session(id);
  state.free_ended_models();
}

}  // namespace bough
