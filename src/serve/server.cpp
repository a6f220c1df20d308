#include "serve/server.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <span>
#include <thread>
#include <unordered_map>

#include "base/clock.h"
#include "base/format.h"
#include "base/log.h"
#include "net/http_server.h"
#include "serve/engine_loop.h"

namespace bough {

namespace {

using Time = std::chrono::steady_clock::time_point;

constexpr int64_t kMostUndelivered = 8;
constexpr const char* kStopping = "the server is shutting down";
constexpr const char* kOver = "the session of this request has ended, or its lease has expired";
constexpr const char* kFailed = "the server failed to answer this request; its log says why";

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

constexpr const char* kAgentPaths[] = {"/rl/start_session", "/rl/set_reward", "/rl/end_session"};

// Compares in a time that tells nothing about the key.
bool same_key(const std::string& given, const std::string& key) {
  unsigned char difference = given.size() != key.size();
  for (size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned char>(given[i] ^ key[i % key.size()]);
  return difference == 0;
}

// Whether a Host or Origin header names this machine. A page in a browser may send requests to loopback, but
// cannot choose these headers. Without a key they distinguish such a page from this machine's programs.
bool names_this_machine(std::string name) {
  if (const size_t scheme = name.find("://"); scheme != std::string::npos) name.erase(0, scheme + 3);
  if (name.starts_with('[')) name = name.substr(1, name.find(']') - 1);
  else name.resize(std::min(name.size(), name.rfind(':')));
  if (name == "localhost") return true;
  try {
    return is_loopback(name);
  } catch (const UserError&) {
    return false;
  }
}

// A token as answers show it. Its `top` has log-probabilities at temperature 1. p_T is the probability at the
// request's temperature T. The engine gives log p_T of the sampled token s and of each top token a, and log
// p_1 of s only. So log p_1(a) = log p_1(s) + T (log p_T(a) - log p_T(s)).
AnswerToken answer_token(const ServedModel& model, const SamplingParameters& sampling,
                         const StreamedToken& sampled) {
  AnswerToken token{sampled.token, model.logprob_of(sampled.raw_logprob, sampled.sampling_logprob), {}};
  const double temperature = sampling.temperature > 0 ? sampling.temperature : 1.0;
  for (size_t i = 0; i < sampled.top_ids.size(); ++i)
    token.top.emplace_back(sampled.top_ids[i],
                           sampled.raw_logprob + temperature * (sampled.top_logprobs[i] - sampled.logprob));
  return token;
}

// The token at position `at` of a whole sample.
StreamedToken token_at(const GeneratedSample& sample, size_t at) {
  StreamedToken token{.token = sample.token_ids[at],
                      .logprob = sample.logprobs[at],
                      .raw_logprob = sample.raw_logprobs[at],
                      .sampling_logprob = sample.sampling_logprobs[at],
                      .is_last = at + 1 == sample.token_ids.size()};
  if (!sample.top_ids.empty()) token.top_ids = sample.top_ids[at];
  if (!sample.top_ids.empty()) token.top_logprobs = sample.top_logprobs[at];
  return token;
}

// A request being answered.
struct Job {
  std::shared_ptr<HttpExchange> exchange;
  const Api* api = nullptr;
  ReadRequest read;
  std::string id;
  Time start;
  std::vector<uint64_t> engine_ids;              // by prompt
  std::vector<SampleText> texts;                 // by choice
  std::vector<ChoiceDelta> choices;              // all output so far, by choice
  std::vector<std::optional<AnswerToken>> last;  // by choice: the sample's last token
  std::vector<size_t> seen;                      // tokens taken, by choice
  RequestIdentity identity;  // set if `session` is: tells whether a later request is a retry
  SessionPointer session;
  size_t num_accepted = 0, num_finished = 0;
  std::string unsent;  // of a stream
  std::optional<double> first_token_seconds;
  bool is_streaming = false, is_over = false;

  const ServedRequest& request() const { return read.request; }
};
using JobPointer = std::shared_ptr<Job>;

struct Counters {
  std::map<std::pair<std::string, int>, int64_t> requests;  // by path and status
  int64_t prompt_tokens = 0, completion_tokens = 0, cancelled = 0, malformed_calls = 0;
};

}  // namespace

// Renders and tokenizes for the conversation rows of agents' sessions.
class ServedCodec final : public ChatCodec {
 public:
  explicit ServedCodec(const ServedModel& model) : model_(model) {}
  std::string render(const Conversation& conversation) const override {
    if (!model_.chat_template) throw UserError(str("agents need a chat template: ", model_.no_template));
    return model_.chat_template->render(conversation);
  }
  std::vector<int32_t> encode_chat(std::string_view text, bool continues) const override {
    return continues ? model_.tokenizer.encode_continuation(text) : model_.tokenizer.encode(text);
  }
  std::string text_of(std::span<const int32_t> ids) const override {
    return model_.tokenizer.decode(ids, /*skip_special_tokens=*/false);
  }

 private:
  const ServedModel& model_;
};

// Sessions of trained agents.
struct Agents {
  Agents(const ServedModel& model, const AgentSessionsOptions& options)
      : codec(model),
        format(codec, environment_of(model), model.max_length),
        agent_sessions(format, options) {}
  static EnvironmentSettings environment_of(const ServedModel& model) {
    EnvironmentSettings settings;
    settings.tool_call_parser = model.settings.tool_call_parser;
    settings.reasoning_parser = model.settings.reasoning_parser;
    return settings;
  }
  const ServedCodec codec;
  const ConversationFormat format;
  AgentSessions agent_sessions;
};

struct Server::State {
  State(Engine& engine, ServedModel served, std::string key,
        const std::optional<AgentSessionsOptions>& options);
  ~State() {
    http.close();
    jobs.clear();  // the jobs' sockets belong to the server
    agent_jobs.clear();
  }

  void handle(const HttpRequest& request, const std::shared_ptr<HttpExchange>& exchange);
  void handle_get(const HttpRequest& request, HttpExchange& exchange);
  SessionPointer check_access(const HttpRequest& request) const;
  void handle_agent(const HttpRequest& request, HttpExchange& exchange);
  void prepare(const Api& api, HttpRequest request, const std::shared_ptr<HttpExchange>& exchange,
               const SessionPointer& session);
  void take_identity(Job& job, const HttpRequest& request);
  void answer_again(const JobPointer& job, const GenerationResult& result);
  void end_jobs();
  void submit(const JobPointer& job);
  void take(std::vector<EngineEvent> events);
  void take(const JobPointer& job, size_t prompt, EngineEvent event);
  void begin(Job& job);
  void take_token(Job& job, size_t choice, const StreamedToken& sampled);
  void finish_prompt(Job& job, size_t prompt, const GenerationResult& result);
  void add(Job& job, size_t choice, ChoiceDelta delta);
  void send(Job& job);
  void complete(const JobPointer& job);
  void fail(Job& job, const ApiError& error);
  void fail_all(const ApiError& error);
  void abandon(Job& job);
  void close(Job& job, int status, const std::string& how);
  void refuse(HttpExchange& exchange, const Api& api, const std::string& path, const ApiError& error);
  std::string metrics() const;
  Json models() const;
  HttpHeaders headers_of(const std::string& id) const { return {{"X-Request-Id", id}, {"Request-Id", id}}; }

  const ServedModel model;
  std::unique_ptr<Agents> agents;  // nullptr: no agents are trained
  const std::string api_key;
  const Time start = std::chrono::steady_clock::now();
  EngineLoop loop;
  std::atomic<int64_t> in_flight = 0;
  std::atomic<int64_t> undelivered = 0;  // engine passes whose events the I/O thread has not handled yet
  std::atomic<int64_t> num_untrained = 0;
  // I/O thread only.
  struct Place {
    JobPointer job;
    size_t prompt;
  };
  std::unordered_map<uint64_t, Place> jobs;  // by the engine's request id
  std::set<JobPointer> agent_jobs;           // the jobs of agents' sessions
  uint64_t next_id = 0;
  Counters counters;
  bool is_stopping = false;

  HttpServer http;  // last, because its threads use the members above
};

Server::State::State(Engine& engine, ServedModel served, std::string key,
                     const std::optional<AgentSessionsOptions>& options)
    : model(std::move(served)),
      agents(options ? std::make_unique<Agents>(model, *options) : nullptr),
      api_key(std::move(key)),
      loop(engine,
           [this](std::vector<EngineEvent> events) {
             // The engine's thread waits here if the I/O thread is behind. Otherwise events would pile up.
             while (undelivered.load() > kMostUndelivered)
               std::this_thread::sleep_for(std::chrono::milliseconds(1));
             ++undelivered;
             http.post([this, all = std::move(events)]() mutable {
               --undelivered;
               take(std::move(all));
             });
           }),
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
    if (agents->agent_sessions.expire(std::chrono::steady_clock::now())) end_jobs();
  });
}

void Server::State::refuse(HttpExchange& exchange, const Api& api, const std::string& path,
                           const ApiError& error) {
  ++counters.requests[{path, error.status}];
  HttpHeaders headers = headers_of(new_id("req_"));
  if (error.status == 429 || error.status == 503) headers.emplace_back("Retry-After", "1");
  if (error.status == 401) headers.emplace_back("WWW-Authenticate", "Bearer");
  exchange.respond({.status = error.status, .body = dump_line(api.error(error)), .headers = headers});
  if (model.settings.log_requests)
    log_info(str("serve: ", path, " ", error.status, ": ", quoted(std::string(error.what()), 200)));
}

// Returns the session of the request's API key. nullptr if the key is not that of a session.
SessionPointer Server::State::check_access(const HttpRequest& request) const {
  std::string given = request.header("authorization");
  if (given.size() > 7 && (given.starts_with("Bearer ") || given.starts_with("bearer "))) given.erase(0, 7);
  else given = request.header("x-api-key");
  if (api_key.empty()) {
    const std::string host = request.header("host"), origin = request.header("origin");
    if ((!host.empty() && !names_this_machine(host)) || (!origin.empty() && !names_this_machine(origin)))
      throw ApiError(403,
                     "without a key this server answers only programs on its own machine (headers Host and "
                     "Origin); start it with a key: BOUGH_API_KEY or api_key_file");
  }
  if (agents && AgentSessions::is_session_key(given)) return agents->agent_sessions.find(given);
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
  const bool is_agent = agents && std::find(std::begin(kAgentPaths), std::end(kAgentPaths), request.path) !=
                                      std::end(kAgentPaths);
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
      ++counters.requests[{path, 200}];
      return;
    }
    if (is_agent) {
      handle_agent(request, *exchange);
      ++counters.requests[{path, 200}];
      return;
    }
    if (is_stopping) throw ApiError(503, kStopping);
    if (in_flight.load() >= model.settings.max_requests)
      throw ApiError(429, str("more than ", model.settings.max_requests, " requests are in flight"), "",
                     "rate_limit_exceeded");
  } catch (const ApiError& error) {
    return refuse(*exchange, api, path, error);
  }
  if (agents && !session) ++num_untrained;
  prepare(api, std::move(request), exchange, session);
}

// AReaL's routes (areal.experimental.openai.proxy), and additional ones for groups of sessions.
void Server::State::handle_agent(const HttpRequest& request, HttpExchange& exchange) {
  constexpr size_t kLongest = 64 << 10;
  if (request.body.size() > kLongest)
    throw ApiError(413, str("the body is longer than ", kLongest, " bytes"));
  OrderedJson body = OrderedJson::object();
  try {
    if (!request.body.empty()) body = parse_ordered_json(request.body, "the body");
  } catch (const UserError& error) {
    throw ApiError(400, error.what());
  }
  Fields fields(body);
  std::string key = request.header("authorization");
  key = key.size() > 7 ? key.substr(7) : request.header("x-api-key");
  AgentSessions& agent_sessions = agents->agent_sessions;
  if (request.path == "/rl/start_session") {
    if (!api_key.empty() && !same_key(key, api_key))
      throw ApiError(401, "a session's key cannot start a session: send the server's key", "",
                     "invalid_api_key");
    const std::string task_id = fields.text("task_id").value_or("");
    const std::string old_key = fields.text("api_key").value_or("");
    fields.done();
    const AgentSessions::Started started = agent_sessions.start_session(
        task_id, old_key, request.header("idempotency-key"), std::chrono::steady_clock::now());
    OrderedJson answer = {{"session_id", started.session->id()},
                          {"api_key", started.key},
                          {"group_id", std::to_string(started.session->group())},
                          {"sessions_left", started.sessions_left},
                          {"lease_seconds", started.lease_seconds}};
    if (!started.problem.is_null()) answer["problem"] = started.problem;
    exchange.respond({.body = answer.dump(-1, ' ', false, OrderedJson::error_handler_t::replace)});
    end_jobs();  // jobs of the session that had the key before
    return;
  }
  const SessionPointer session = agent_sessions.find(key);
  Json answer = {{"message", "success"}};
  if (request.path == "/rl/set_reward") {
    const auto interaction = fields.text("interaction_id");
    const auto reward = fields.number("reward", -1e30, 1e30);
    if (!reward) fields.wrong("reward", "a number");
    std::map<std::string, double> parts;
    if (const OrderedJson* rewards = fields.object("rewards")) {
      Fields inner(*rewards, "rewards");
      for (const auto& [name, value] : rewards->items())
        parts[name] = inner.number(name, -1e30, 1e30).value_or(0);
    }
    fields.done();
    if (!session->set_reward(interaction, *reward, parts))
      throw ApiError(interaction ? 404 : 400,
                     interaction ? str("this session has no answer ", quoted(*interaction))
                                 : "this session has no answer yet, so it cannot get a reward",
                     "interaction_id");
  } else {
    fields.done();
    answer["interaction_count"] = session->num_interactions();
    agent_sessions.end_session(key);
    end_jobs();
  }
  exchange.respond({.body = dump_line(answer)});
}

// Ends requests of sessions that are over.
void Server::State::end_jobs() {
  const std::vector<JobPointer> all(agent_jobs.begin(), agent_jobs.end());
  for (const JobPointer& job : all)
    if (!job->is_over && !agents->agent_sessions.is_open(*job->session))
      fail(*job, ApiError(410, kOver, "", "session_ended"));
}

// A client that sends a request again has abandoned its first attempt.
void Server::State::take_identity(Job& job, const HttpRequest& request) {
  const std::string retries = request.header("x-stainless-retry-count");
  job.identity = {.fingerprint = std::hash<std::string>()(str(request.path, "\n", request.body)),
                  .idempotency_key = request.header("idempotency-key"),
                  .is_retry = !retries.empty() && retries != "0"};
  const std::vector<JobPointer> all(agent_jobs.begin(), agent_jobs.end());
  for (const JobPointer& other : all)
    if (other->session == job.session && !other->is_over && other->identity.is_repeated_by(job.identity))
      fail(*other, ApiError(409, "the same request was sent again, and the later one gets the answer"));
}

void Server::State::handle_get(const HttpRequest& request, HttpExchange& exchange) {
  if (request.path == "/health") {
    exchange.respond({.status = is_stopping ? 503 : 200,
                      .body = dump_line({{"status", is_stopping ? "stopping" : "ok"}})});
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

// Parses JSON, applies the template and tokenizes on a preparation thread, then goes on on the I/O thread.
void Server::State::prepare(const Api& api, HttpRequest request,
                            const std::shared_ptr<HttpExchange>& exchange, const SessionPointer& session) {
  const auto job = std::make_shared<Job>();
  job->session = session;
  if (session) take_identity(*job, request);
  ++in_flight;
  if (session) agent_jobs.insert(job);
  job->exchange = exchange;
  job->api = &api;
  job->start = std::chrono::steady_clock::now();
  job->id = new_id("req_");
  exchange->on_gone([this, weak = std::weak_ptr<Job>(job)] {
    if (const JobPointer gone = weak.lock()) abandon(*gone);
  });
  const size_t size = request.body.size();
  http.prepare(size, [this, job, request = std::move(request)]() mutable {
    auto read = std::make_shared<ReadRequest>();  // the job belongs to the I/O thread
    std::optional<ApiError> error;
    try {
      *read = job->api->read(parse_ordered_json(request.body, "the body"), model, job->session);
    } catch (const ApiError& refused) {
      error = refused;
    } catch (const UserError& refused) {
      error = ApiError(400, refused.what());
    } catch (const std::exception& failure) {
      log_error(str("serve: ", job->api->path, ": ", failure.what()));
      error = ApiError(500, kFailed);
    }
    request = {};
    http.post([this, job, read, error] {
      if (job->is_over) return;
      job->read = std::move(*read);
      if (error) return fail(*job, *error);
      if (is_stopping) return fail(*job, ApiError(503, kStopping));
      if (job->session && !agents->agent_sessions.is_open(*job->session))
        return fail(*job, ApiError(410, kOver, "", "session_ended"));
      submit(job);
    });
  });
}

void Server::State::submit(const JobPointer& job) {
  if (job->read.ready) {
    job->exchange->respond({.body = dump_line(*job->read.ready), .headers = headers_of(job->id)});
    return close(*job, 200, "counted");
  }
  const ServedRequest& request = job->request();
  const auto num_choices = static_cast<size_t>(request.num_choices());
  const OutputParser parser(request.reasoning_parser, request.tool_call_parser, request.tools, request.begun);
  const bool skips_special =
      !has_special_markers(model.tokenizer, request.reasoning_parser, request.tool_call_parser);
  for (size_t i = 0; i < num_choices; ++i)
    job->texts.emplace_back(model.tokenizer, parser, &job->read.request.sampling, skips_special);
  job->choices.resize(num_choices);
  job->last.resize(num_choices);
  job->seen.resize(num_choices);
  if (job->session)
    if (const auto result = job->session->answered(job->identity)) return answer_again(job, *result);
  std::vector<GenerationRequest> requests;
  for (size_t prompt = 0; prompt < request.prompts.size(); ++prompt) {
    const uint64_t id = next_id++;
    jobs[id] = {job, prompt};
    job->engine_ids.push_back(id);
    GenerationRequest& asked = requests.emplace_back();
    asked.id = id;
    asked.prompt_ids = request.prompts[prompt];
    asked.sampling = request.sampling;
    asked.adapter = request.adapter;
    asked.seed = request.seed.value_or(static_cast<uint64_t>(model.settings.seed));
    if (request.seed) asked.sequence = prompt;
  }
  loop.submit(std::move(requests));
}

// Sends the answer that the same request got before.
void Server::State::answer_again(const JobPointer& job, const GenerationResult& result) {
  if (job->request().stream) begin(*job);
  finish_prompt(*job, 0, result);
  job->session->take_again(job->identity, job->read.answer->id());
  complete(job);
}

void Server::State::begin(Job& job) {
  job.is_streaming = true;
  job.exchange->begin_stream(headers_of(job.id));
  job.unsent += job.read.answer->begin();
}

void Server::State::take(std::vector<EngineEvent> events) {
  std::vector<JobPointer> touched;
  for (EngineEvent& event : events) {
    const auto found = jobs.find(event.id);
    if (found == jobs.end()) continue;
    const auto [job, prompt] = found->second;
    try {
      take(job, prompt, std::move(event));
    } catch (const std::exception& failure) {
      log_error(str("serve: ", job->api->path, " ", job->id, ": ", failure.what()));
      fail(*job, ApiError(500, kFailed));
    }
    if (touched.empty() || touched.back() != job) touched.push_back(job);
  }
  for (const JobPointer& job : touched)
    if (!job->is_over) send(*job);
}

void Server::State::take(const JobPointer& job, size_t prompt, EngineEvent event) {
  const ServedRequest& request = job->request();
  switch (event.kind) {
    case EngineEvent::Kind::kAccepted:
      if (++job->num_accepted == request.prompts.size() && request.stream) begin(*job);
      return;
    case EngineEvent::Kind::kRefused: {
      const std::string prefix = str("request ", event.id, ": ");
      if (event.message.starts_with(prefix)) event.message.erase(0, prefix.size());
      return fail(*job, ApiError(400, event.message));
    }
    case EngineEvent::Kind::kToken: {
      if (!job->first_token_seconds) job->first_token_seconds = seconds_since(job->start);
      const size_t choice =
          prompt * static_cast<size_t>(request.sampling.n_samples) + static_cast<size_t>(event.token.sample);
      ++job->seen[choice];
      take_token(*job, choice, event.token);
      return;
    }
    case EngineEvent::Kind::kFinished:
      finish_prompt(*job, prompt, event.result);
      if (job->session)
        job->session->take(*request.asked, event.result, request.sampling, job->identity,
                           job->read.answer->id());
      if (++job->num_finished == request.prompts.size()) complete(job);
      return;
  }
}

// Whether a sample's last token is a stop token is known only in finish_prompt(), so the token is kept.
void Server::State::take_token(Job& job, size_t choice, const StreamedToken& sampled) {
  AnswerToken token = answer_token(model, job.request().sampling, sampled);
  if (sampled.is_last) {
    job.last[choice] = std::move(token);
    return;
  }
  ChoiceDelta delta;
  delta.parts = job.texts[choice].push(token.id);
  delta.tokens.push_back(std::move(token));
  add(job, choice, std::move(delta));
}

// The finish reason of a sample is known only when all samples of its prompt have ended.
void Server::State::finish_prompt(Job& job, size_t prompt, const GenerationResult& result) {
  const auto n_samples = static_cast<size_t>(job.request().sampling.n_samples);
  for (size_t sample = 0; sample < result.samples.size() && sample < n_samples; ++sample) {
    const GeneratedSample& sampled = result.samples[sample];
    const size_t choice = prompt * n_samples + sample;
    // Takes all tokens that the engine did not stream; some engines stream none.
    for (size_t& seen = job.seen[choice]; seen < sampled.token_ids.size(); ++seen)
      take_token(job, choice, token_at(sampled, seen));
    ChoiceDelta delta;
    std::optional<int32_t> last;
    if (job.last[choice]) {
      last = job.last[choice]->id;
      delta.tokens.push_back(*job.last[choice]);
    }
    delta.parts = job.texts[choice].finish(last, sampled.finish_reason);
    delta.end = job.texts[choice].end();
    counters.malformed_calls += job.texts[choice].malformed_calls();
    add(job, choice, std::move(delta));
  }
}

void Server::State::add(Job& job, size_t choice, ChoiceDelta delta) {
  if (job.is_streaming || job.read.answer->wants_deltas()) {
    const std::string text = job.read.answer->add(choice, delta);
    if (job.is_streaming) job.unsent += text;
  }
  ChoiceDelta& sum = job.choices[choice];
  sum.parts.append(std::move(delta.parts));
  sum.tokens.insert(sum.tokens.end(), delta.tokens.begin(), delta.tokens.end());
  sum.end = std::move(delta.end);
}

void Server::State::send(Job& job) {
  if (job.is_streaming && !job.unsent.empty()) job.exchange->write(job.unsent);
  job.unsent.clear();
}

void Server::State::complete(const JobPointer& job) {
  if (job->is_streaming) {
    job->unsent += job->read.answer->end(job->choices);
    send(*job);
    job->exchange->finish();
    return close(*job, 200, "streamed");
  }
  for (const uint64_t id : job->engine_ids) jobs.erase(id);
  constexpr size_t kBytesPerToken = 16;  // estimates an answer's size, to choose its preparation thread
  http.prepare(kBytesPerToken * static_cast<size_t>(count_tokens(job->choices)), [this, job] {
    auto body = std::make_shared<std::string>();
    try {
      *body = dump_line(job->read.answer->whole(job->choices));
    } catch (const std::exception& failure) {
      log_error(str("serve: ", job->api->path, " ", job->id, ": ", failure.what()));
    }
    http.post([this, job, body] {
      if (job->is_over) return;
      if (body->empty()) return fail(*job, ApiError(500, kFailed));
      job->exchange->respond({.body = std::move(*body), .headers = headers_of(job->id)});
      close(*job, 200, "answered");
    });
  });
}

void Server::State::fail(Job& job, const ApiError& error) {
  for (const uint64_t id : job.engine_ids)
    if (jobs.contains(id)) loop.cancel(id);
  if (job.is_streaming) {
    job.unsent += job.read.answer->fail(error);
    send(job);
    job.exchange->finish();
  } else {
    HttpHeaders headers = headers_of(job.id);
    if (error.status == 503) headers.emplace_back("Retry-After", "1");
    job.exchange->respond(
        {.status = error.status, .body = dump_line(job.api->error(error)), .headers = std::move(headers)});
  }
  close(job, error.status, quoted(std::string(error.what()), 200));
}

void Server::State::fail_all(const ApiError& error) {
  std::vector<JobPointer> all;
  for (const auto& [id, place] : jobs) all.push_back(place.job);
  all.insert(all.end(), agent_jobs.begin(), agent_jobs.end());
  for (const JobPointer& job : all)
    if (!job->is_over) fail(*job, error);
}

// The client has closed the connection.
void Server::State::abandon(Job& job) {
  if (job.is_over) return;
  for (const uint64_t id : job.engine_ids)
    if (jobs.contains(id)) loop.cancel(id);
  ++counters.cancelled;
  close(job, 499, "the client went away");
}

void Server::State::close(Job& job, int status, const std::string& how) {
  job.is_over = true;
  for (const uint64_t id : job.engine_ids) jobs.erase(id);
  if (job.session) std::erase_if(agent_jobs, [&](const JobPointer& each) { return each.get() == &job; });
  --in_flight;
  const int64_t prompt_tokens = job.request().prompt_tokens(), new_tokens = count_tokens(job.choices);
  counters.prompt_tokens += prompt_tokens;
  counters.completion_tokens += new_tokens;
  ++counters.requests[{job.api->path, status}];
  if (!model.settings.log_requests) return;
  log_info(
      str("serve: ", job.api->path, " ", status, " ", job.id, ": ", how, "; ", prompt_tokens, " + ",
          new_tokens, " tokens in ", format_duration(seconds_since(job.start)),
          job.first_token_seconds ? ", the first after " + format_duration(*job.first_token_seconds) : ""));
}

std::string Server::State::metrics() const {
  std::string text;
  const auto add = [&](const char* name, const char* type, const char* help, auto value) {
    text += str("# HELP bough_serve_", name, " ", help, "\n# TYPE bough_serve_", name, " ", type,
                "\nbough_serve_", name, " ", value, "\n");
  };
  const EngineStatistics engine = loop.statistics();
  const HttpStatistics& clients = http.statistics();
  text += "# HELP bough_serve_requests_total Answers by path and status; 499: the client went away.\n";
  text += "# TYPE bough_serve_requests_total counter\n";
  for (const auto& [key, count] : counters.requests)
    text +=
        str("bough_serve_requests_total{path=\"", key.first, "\",status=\"", key.second, "\"} ", count, "\n");
  add("requests_in_flight", "gauge", "Requests being prepared or generated.", in_flight.load());
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
    const AgentSessions::Counts agent = agents->agent_sessions.counts();
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
  const OutputParser names(settings.reasoning_parser, settings.tool_call_parser);
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
  return state_->agents->agent_sessions;
}

int64_t Server::num_untrained() const {
  return state_->num_untrained.load();
}

void Server::close() {
  state_->http.stop_accepting();
  state_->http.post([state = state_.get()] {
    state->is_stopping = true;
    state->fail_all(ApiError(503, kStopping));
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
    state.http.post([&state] { state.is_stopping = true; });
    const int64_t in_flight = state.in_flight.load();
    if (in_flight > 0)
      log_info(str("serve: stopping; ", in_flight, " requests have ", state.model.settings.shutdown_seconds,
                   " s to finish"));
    const Time begin = std::chrono::steady_clock::now();
    state.loop.run([&] {
      return state.in_flight.load() == 0 || seconds_since(begin) >= state.model.settings.shutdown_seconds;
    });
  } catch (const std::exception& error) {
    log_error(str("serve: the engine failed: ", error.what()));
    state.http.post(
        [&state] { state.fail_all(ApiError(500, "the engine failed; the server's log says why")); });
    state.http.close();
    throw;
  }
  state.http.post([&state] { state.fail_all(ApiError(503, kStopping)); });
  state.http.close();
}

}  // namespace bough
