#include "serve/server.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "base/clock.h"
#include "base/format.h"
#include "base/log.h"
#include "net/http_server.h"
#include "net/secrets.h"
#include "serve/access.h"
#include "serve/agent_routes.h"
#include "serve/engine_loop.h"
#include "serve/jobs.h"

namespace bough {

namespace {

using Time = std::chrono::steady_clock::time_point;

constexpr int64_t kMostUndelivered = 8;

const Api kApis[] = {{"/v1/chat/completions", read_chat_completion, openai_error},
                     {"/v1/completions", read_completion, openai_error},
                     {"/v1/responses", read_response, openai_error},
                     {"/v1/messages", read_message, anthropic_error},
                     {"/v1/messages/count_tokens", read_token_count, anthropic_error}};

// Errors have the format of the API that the path belongs to.
const Api& api_of(const std::string& path) {
  for (const Api& api : kApis)
    if (path == api.path) return api;
  return kApis[path.starts_with("/v1/messages") ? 3 : 0];
}

// A path is the same with and without /v1, because some clients include it in their base_url.
std::string canonical_path(const std::string& path) {
  constexpr std::string_view kVersion = "/v1";
  if (path.starts_with("/v1/rl/")) return path.substr(kVersion.size());
  for (const Api& api : kApis)
    if (path == std::string_view(api.path).substr(kVersion.size())) return api.path;
  return path;
}

}  // namespace

struct Server::State {
  State(Engine& engine, ServedModel served, std::string key,
        const std::optional<AgentSessionsOptions>& options);
  ~State() {
    http.close();
    jobs.clear();
  }

  void handle(const HttpRequest& request, const std::shared_ptr<HttpExchange>& exchange);
  void handle_get(const HttpRequest& request, HttpExchange& exchange);
  SessionPointer check_access(const HttpRequest& request) const;
  void refuse(HttpExchange& exchange, const Api& api, const std::string& path, const ApiError& error);
  std::string metrics() const;
  Json models() const;

  const ServedModel model;
  const std::unique_ptr<AgentRoutes> agents;  // nullptr: no agents are trained
  const std::string api_key;
  const Time start = std::chrono::steady_clock::now();
  EngineLoop loop;
  std::atomic<int64_t> undelivered = 0;  // engine passes whose events the I/O thread has not handled yet
  std::atomic<int64_t> num_untrained = 0;
  Jobs jobs;
  HttpServer http;  // last, because its threads use the members above
};

Server::State::State(Engine& engine, ServedModel served, std::string key,
                     const std::optional<AgentSessionsOptions>& options)
    : model(std::move(served)),
      agents(options ? std::make_unique<AgentRoutes>(model, *options) : nullptr),
      api_key(std::move(key)),
      loop(engine,
           [this](std::vector<EngineEvent> events) {
             // The engine's thread waits here if the I/O thread is behind. Otherwise events would pile up.
             while (undelivered.load() > kMostUndelivered)
               std::this_thread::sleep_for(std::chrono::milliseconds(1));
             ++undelivered;
             http.post([this, all = std::move(events)]() mutable {
               --undelivered;
               jobs.take(std::move(all));
             });
           }),
      jobs(model, agents ? &agents->sessions() : nullptr, loop, http),
      http({.host = model.settings.host,
            .port = static_cast<int>(model.settings.port),
            .limits = model.settings.http,
            .error_body =
                [](int status, const std::string& message, const std::string& path) {
                  return dump_line(api_of(path).error(ApiError(status, message)));
                }},
           [this](HttpRequest request, const std::shared_ptr<HttpExchange>& exchange) {
             handle(request, exchange);
           }) {
  constexpr double kLookAtLeases = 0.05;
  if (!agents) return;
  http.every(kLookAtLeases, [this] {
    if (agents->sessions().expire(std::chrono::steady_clock::now())) jobs.fail_ended_sessions();
  });
}

void Server::State::refuse(HttpExchange& exchange, const Api& api, const std::string& path,
                           const ApiError& error) {
  ++jobs.counters().requests[{path, error.status}];
  HttpHeaders headers = headers_for(new_id("req_"));
  if (error.status == 429 || error.status == 503) headers.emplace_back("Retry-After", "1");
  if (error.status == 401) headers.emplace_back("WWW-Authenticate", "Bearer");
  exchange.respond({.status = error.status, .body = dump_line(api.error(error)), .headers = headers});
  if (model.settings.log_requests)
    log_info(str("serve: ", path, " ", error.status, ": ", quoted(std::string(error.what()), 200)));
}

// Returns the session of the request's API key. nullptr if the key is not that of a session.
SessionPointer Server::State::check_access(const HttpRequest& request) const {
  const std::string given = given_key(request);
  if (api_key.empty()) check_local(request);
  if (agents && AgentSessions::is_session_key(given)) return agents->sessions().find(given);
  if (!api_key.empty() && !same_key(given, api_key))
    throw ApiError(401, "the key is missing or wrong: send Authorization: Bearer KEY", "", "invalid_api_key");
  return nullptr;
}

void Server::State::handle(const HttpRequest& sent, const std::shared_ptr<HttpExchange>& exchange) {
  HttpRequest request = sent;
  request.path = canonical_path(sent.path);
  const Api& api = api_of(request.path);
  const auto known = std::find_if(std::begin(kApis), std::end(kApis),
                                  [&](const Api& each) { return request.path == each.path; });
  const bool is_api = known != std::end(kApis);
  const bool is_page = request.path == "/health" || request.path == "/metrics" ||
                       request.path == "/v1/models" || request.path.starts_with("/v1/models/");
  const bool is_agent = agents && AgentRoutes::is_route(request.path);
  // Metrics by path have few distinct paths, whatever paths clients request.
  const std::string path = is_api || is_agent ? request.path : is_page ? request.path.substr(0, 10) : "other";
  SessionPointer session;
  try {
    if (request.path != "/health") session = check_access(request);
    if (!is_api && !is_page && !is_agent)
      throw ApiError(404, str("unknown path ", quoted(request.path), "; docs/serve.md lists the paths"));
    const char* method = is_page ? "GET" : "POST";
    if (request.method != method)
      throw ApiError(
          405, str(request.path.substr(0, 80), ": got ", quoted(request.method), ", expected ", method));
    if (is_page) {
      handle_get(request, *exchange);
      ++jobs.counters().requests[{path, 200}];
      return;
    }
    if (is_agent) {
      agents->handle(request, *exchange, api_key, jobs);
      ++jobs.counters().requests[{path, 200}];
      return;
    }
    if (jobs.is_stopping()) throw ApiError(503, kStopping);
    if (jobs.in_flight() >= model.settings.max_requests)
      throw ApiError(429, str("more than ", model.settings.max_requests, " requests are in flight"), "",
                     "rate_limit_exceeded");
  } catch (const ApiError& error) {
    return refuse(*exchange, api, path, error);
  }
  if (agents && !session) ++num_untrained;
  jobs.start(api, std::move(request), exchange, session);
}

void Server::State::handle_get(const HttpRequest& request, HttpExchange& exchange) {
  if (request.path == "/health") {
    exchange.respond({.status = jobs.is_stopping() ? 503 : 200,
                      .body = dump_line({{"status", jobs.is_stopping() ? "stopping" : "ok"}})});
  } else if (request.path == "/metrics") {
    exchange.respond({.body = metrics(), .content_type = "text/plain; version=0.0.4; charset=utf-8"});
  } else if (request.path == "/v1/models") {
    exchange.respond({.body = dump_line(models())});
  } else {
    const std::string name = model.name_for(request.path.substr(std::string("/v1/models/").size()));
    const Json all = models()["data"];
    Json entry = all[0];
    for (const Json& each : all)
      if (each["id"] == name) entry = each;
    entry["id"] = name;
    exchange.respond({.body = dump_line(entry)});
  }
}

Json Server::State::models() const {
  Json list = Json::array();
  for (const std::string& name : model.names)
    list.push_back({{"id", name},
                    {"object", "model"},
                    {"created", model.created},
                    {"owned_by", "bough"},
                    {"max_model_len", model.max_length}});
  for (const std::string& name : model.adapters) {
    list.push_back(list[0]);
    list.back()["id"] = name;
    list.back()["parent"] = model.names.front();  // as vLLM reports it
  }
  return {{"object", "list"}, {"data", std::move(list)}};
}

std::string Server::State::metrics() const {
  std::string text;
  const auto add = [&](const char* name, const char* type, const char* help, auto value) {
    text += str("# HELP bough_serve_", name, " ", help, "\n# TYPE bough_serve_", name, " ", type,
                "\nbough_serve_", name, " ", value, "\n");
  };
  const EngineStatistics engine = loop.statistics();
  const HttpStatistics& clients = http.statistics();
  const ServeCounters& counters = jobs.counters();
  text += "# HELP bough_serve_requests_total Answers by path and status; 499: the client went away.\n";
  text += "# TYPE bough_serve_requests_total counter\n";
  for (const auto& [key, count] : counters.requests)
    text +=
        str("bough_serve_requests_total{path=\"", key.first, "\",status=\"", key.second, "\"} ", count, "\n");
  add("requests_in_flight", "gauge", "Requests being prepared or generated.", jobs.in_flight());
  add("connections", "gauge", "Open connections.", clients.connections.load());
  add("connections_accepted_total", "counter", "Connections accepted.", clients.accepted.load());
  add("connections_refused_total", "counter", "Connections refused beyond http.max_connections.",
      clients.refused.load());
  add("clients_gone_total", "counter", "Clients that went away before their answer was complete.",
      clients.gone.load());
  add("clients_cut_off_total", "counter", "Clients cut off because they did not read.",
      clients.cut_off.load());
  add("malformed_requests_total", "counter", "Requests that were not HTTP, too long or too slow.",
      clients.malformed.load());
  add("prompt_tokens_total", "counter", "Tokens of prompts.", counters.prompt_tokens);
  add("completion_tokens_total", "counter", "Tokens of answers.", counters.completion_tokens);
  add("malformed_tool_calls_total", "counter", "Tool calls that could not be read.",
      counters.malformed_calls);
  add("engine_new_tokens_total", "counter", "Tokens sampled.", engine.new_tokens);
  add("engine_prefill_tokens_total", "counter", "Tokens computed to fill keys and values.",
      engine.prefill_tokens);
  add("engine_cached_tokens_total", "counter", "Prompt tokens reused from the prefix cache.",
      engine.cached_tokens);
  add("engine_preemptions_total", "counter", "Samples preempted because memory ran out.", engine.preemptions);
  add("engine_steps_total", "counter", "Passes of the model.", engine.steps);
  add("engine_seconds_total", "counter", "Seconds inside passes.", engine.seconds);
  add("weights_version", "gauge", "Version of the weights.", loop.version());
  if (agents) {
    const AgentSessions::Counts agent = agents->sessions().counts();
    add("groups_free", "gauge", "Groups that agents may start.", agent.waiting);
    add("groups_begun", "gauge", "Groups that agents have started and not ended.", agent.leased);
    add("sessions_open", "gauge", "Sessions started and not ended.", agent.sessions_open);
    add("sessions_started_total", "counter", "Sessions started.", agent.started);
    add("sessions_without_reward_total", "counter", "Sessions that ended without a reward.",
        agent.without_reward);
    add("leases_granted_total", "counter", "Groups that agents have started.", agent.granted);
    add("leases_refused_total", "counter", "Sessions refused because no group could start.", agent.refused);
    add("leases_expired_total", "counter", "Groups whose lease expired.", agent.expired);
    add("requests_without_session_total", "counter", "Requests outside sessions, which are not trained on.",
        num_untrained.load());
  }
  add("uptime_seconds", "gauge", "Seconds since the server began to listen.", seconds_since(start));
  return text;
}

void check_serving(const ServeSettings& settings, const std::string& api_key) {
  if (api_key.empty() && !is_loopback(settings.host))
    throw UserError(str("host: ", settings.host,
                        " can be reached from other machines, but there is no key; set BOUGH_API_KEY or "
                        "api_key_file, or listen at 127.0.0.1"));
  // Throws an error that lists the known parsers.
  const bool is_auto = settings.tool_call_parser == kAutoParser;
  const OutputParser names(settings.reasoning_parser, is_auto ? "" : settings.tool_call_parser);
}

Server::Server(Engine& engine, ServedModel model, std::string api_key,
               std::optional<AgentSessionsOptions> agents) {
  check_serving(model.settings, api_key);
  BOUGH_CHECK(!model.names.empty(), "the model has no name");
  state_ = std::make_unique<State>(engine, std::move(model), std::move(api_key), agents);
}

bool Server::pass() {
  return state_->loop.pass();
}

int64_t Server::num_running() const {
  return state_->loop.num_running();
}

void Server::on_commands(std::function<void()> wake) {
  state_->loop.on_commands(std::move(wake));
}

AgentSessions& Server::agent_sessions() const {
  BOUGH_CHECK(state_->agents, "this server has no agent sessions");
  return state_->agents->sessions();
}

int64_t Server::num_untrained() const {
  return state_->num_untrained.load();
}

void Server::close() {
  state_->http.stop_accepting();
  state_->http.post([state = state_.get()] {
    state->jobs.stop();
    state->jobs.fail_all(ApiError(503, kStopping));
  });
  state_->http.close();
}

Server::~Server() = default;

std::string Server::url() const {
  return state_->http.url();
}

void Server::run(const std::function<bool()>& stop) {
  State& state = *state_;
  try {
    state.loop.run(stop);
    state.http.stop_accepting();
    state.http.post([&state] { state.jobs.stop(); });
    const int64_t in_flight = state.jobs.in_flight();
    if (in_flight > 0)
      log_info(str("serve: stopping; ", in_flight, " requests have ", state.model.settings.shutdown_seconds,
                   " s to finish"));
    const Time begin = std::chrono::steady_clock::now();
    state.loop.run([&] {
      return state.jobs.in_flight() == 0 || seconds_since(begin) >= state.model.settings.shutdown_seconds;
    });
  } catch (const std::exception& error) {
    log_error(str("serve: the engine failed: ", error.what()));
    state.http.post(
        [&state] { state.jobs.fail_all(ApiError(500, "the engine failed; the server's log says why")); });
    state.http.close();
    throw;
  }
  state.http.post([&state] { state.jobs.fail_all(ApiError(503, kStopping)); });
  state.http.close();
}

}  // namespace bough
