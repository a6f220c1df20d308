#include "tinker/service.h"

#include <algorithm>
#include <chrono>
#include <random>

#include "base/error.h"
#include "base/log.h"
#include "serve/access.h"
#include "tinker/service_state.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "/api/v1/";
// A fetch of a result that is not ready ends after this time: before the client's limit of 45 s.
constexpr std::chrono::seconds kPoll{25};
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

OrderedJson parse_body(const HttpRequest& request) {
  try {
    return parse_ordered_json(request.body.empty() ? "{}" : request.body, "the body");
  } catch (const UserError& error) {
    throw ApiError(400, error.what());
  }
}

}  // namespace

TrainingService::State::State(TrainingBase base_, TrainingServiceSettings settings_, std::string key)
    : base(std::move(base_)),
      settings(std::move(settings_)),
      api_key(std::move(key)),
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

void TrainingService::State::check_access(const HttpRequest& request, const std::string& route) const {
  if (api_key.empty()) return check_local(request);
  if (route == "healthz") return;
  std::string given = request.header("x-api-key");
  if (const std::string bearer = request.header("authorization");
      given.empty() && bearer.starts_with("Bearer "))
    given = bearer.substr(7);
  if (given.empty() || !same_key(given, api_key))
    throw ApiError(
        401, "the key is missing or wrong: send X-API-Key, which Tinker's SDK takes from TINKER_API_KEY");
}

void TrainingService::State::handle(HttpRequest request, const std::shared_ptr<HttpExchange>& exchange) {
  try {
    const bool is_ours = request.path.starts_with(kPrefix);
    const std::string route = is_ours ? request.path.substr(kPrefix.size()) : "";
    check_access(request, route);
    if (!is_ours)
      throw ApiError(404,
                     str("unknown path ", quoted(request.path, 100), "; docs/tinker.md lists the paths"));
    if (!request.header("content-encoding").empty())
      throw ApiError(415, "content-encoding: expected none, as client/config says");
    if (route == "retrieve_future" && request.method == "POST") return retrieve(request, exchange);
    const size_t bytes = request.body.size();
    http.prepare(bytes, [this, route, exchange, request = std::move(request)] {
      HttpResponse response;
      try {
        const Json result = answer(route, request);
        keep_request(result, route, request);
        response = result.is_null() ? HttpResponse{.status = 204} : HttpResponse{.body = dump_line(result)};
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

void TrainingService::State::retrieve(const HttpRequest& request,
                                      const std::shared_ptr<HttpExchange>& exchange) {
  const OrderedJson body = parse_body(request);
  Fields fields(body);
  const std::string id = fields.required_text("request_id");
  fields.ignore({"allow_metadata_only", "model_id"});
  fields.done();
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
  throw ApiError(404, str("request_id: got ", quoted(id, 100), ", which is of no session"));
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

Json TrainingService::State::answer(const std::string& route, const HttpRequest& request) {
  const auto after = [&](std::string_view prefix) { return route.substr(prefix.size()); };
  if (route.starts_with("training_runs/")) {
    const std::string rest = after("training_runs/");
    const size_t slash = rest.find('/');
    return training_run(rest.substr(0, slash), slash == std::string::npos ? "" : rest.substr(slash + 1),
                        request);
  }
  const bool is_get = request.method == "GET";
  if (is_get && route == "healthz") return {{"status", "ok"}};
  if (is_get && route == "get_server_capabilities") return capabilities();
  if (is_get && route.starts_with("samplers/")) return sampler(after("samplers/"));

  using Route = Json (State::*)(Fields&);
  static const std::map<std::string, Route> kRoutes = {
      {"create_session", &State::create_session},
      {"session_heartbeat", &State::heartbeat},
      {"create_model", &State::create_model},
      {"get_info", &State::get_info},
      {"optim_step", &State::optim_step},
      {"save_weights", &State::save_weights},
      {"load_weights", &State::load_weights},
      {"weights_info", &State::weights_info},
      {"save_weights_for_sampler", &State::save_for_sampler},
      {"create_sampling_session", &State::create_sampling_session},
      {"asample", &State::sample},
      {"cancel_future", &State::cancel},
  };
  const auto known = kRoutes.find(route);
  const bool is_batch = route == "forward_backward" || route == "forward";
  const bool is_finish = route.starts_with("sessions/") && route.ends_with("/finish");
  const bool is_other = route == "client/config" || route == "telemetry";
  if (known == kRoutes.end() && !is_batch && !is_finish && !is_other)
    throw ApiError(404, str("unknown path ", quoted(route, 100), "; docs/tinker.md lists the paths"));
  if (request.method != "POST")
    throw ApiError(405, str(route.substr(0, 80), ": got ", quoted(request.method, 20), ", expected POST"));
  if (is_batch && request.header("content-type").find("x-protobuf") != std::string::npos)
    return forward_backward(read_forward_backward(std::string_view(request.body)));
  const OrderedJson body = parse_body(request);
  if (is_batch) return forward_backward(read_forward_backward(body, route == "forward"));
  if (route == "client/config") return client_config();
  if (route == "telemetry") return {{"status", "accepted"}};
  if (is_finish) {
    end_session(route.substr(9, route.size() - 9 - 7));
    return {{"status", "finished"}};
  }
  Fields fields(body);
  return (this->*known->second)(fields);
}

Json TrainingService::State::client_config() const {
  const int64_t most = settings.http.max_body.count;
  return {{"parallel_fwdbwd_chunks", true},
          {"proto_compress_fwdbwd", false},
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
  const MutexLock lock(mutex);
  const auto found = models.find(model);
  if (found != models.end() && !found->second.failure.empty()) throw UserError(found->second.failure);
  if (found == models.end() || !found->second.model)
    throw UserError(str("model ", model, " does not exist: its creation failed, or its session has ended"));
  return *found->second.model;  // only this thread removes it
}

void TrainingService::State::free_ended_models() {
  std::vector<std::unique_ptr<TrainingModel>> freed;
  std::set<std::string> finished;
  {
    const MutexLock guard(mutex);
    for (const std::string& model : ended) {
      const auto found = models.find(model);
      if (found == models.end()) continue;
      freed.push_back(std::move(found->second.model));
      models.erase(found);
    }
    ended.clear();
    finished.swap(ended_sessions);
  }
  for (const std::string& session : finished)
    guarded([&] {
      journal.remove_session(session);
      return FutureResult{};
    });
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

TrainingService::TrainingService(TrainingBase base, TrainingServiceSettings settings, std::string api_key)
    : state_(std::make_unique<State>(std::move(base), std::move(settings), std::move(api_key))) {}
TrainingService::~TrainingService() = default;

std::string TrainingService::url() const {
  return state_->http.url();
}

void TrainingService::run(const std::function<bool()>& stop) {
  State& state = *state_;
  while (!stop()) {
    state.free_ended_models();
    ModelQueue::Group group = state.queue.take();
    bool worked = !group.works.empty();
    if (worked) state.compute(std::move(group));
    worked = state.samplers.step() || worked;
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
}

}  // namespace bough
