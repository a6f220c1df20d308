#include "report/view_server.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "net/http_client.h"
#include "net/http_server.h"
#include "net/secrets.h"
#include "report/html_text.h"
#include "report/run_control.h"
#include "report/run_follower.h"
#include "report/run_page.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kUnreadBytes = int64_t{1} << 20;
constexpr int kPollsPerSign = 30;      // a sign of life every 15 seconds
constexpr double kRelaySeconds = 0.1;  // between looks for an answer, and the parts of a streamed one
constexpr size_t kMostRelays = 16;
constexpr double kConnectSeconds = 0.2;  // on this machine
constexpr uint64_t kMostAnswerBytes = uint64_t{64} << 20;
constexpr const char* kServerEnds = "the server of the page ends";

using Exchange = std::shared_ptr<HttpExchange>;
// A command or a chat that waits for its answer. It is called again and again until it returns false. `ends`:
// the server ends, so the answer must end now.
using Relay = std::function<bool(bool ends)>;

const HttpHeaders& page_headers() {
  static const HttpHeaders headers = {{"Cache-Control", "no-store"},
                                      {"X-Content-Type-Options", "nosniff"},
                                      {"X-Frame-Options", "DENY"},
                                      {"Cross-Origin-Resource-Policy", "same-origin"},
                                      {"Referrer-Policy", "no-referrer"}};
  return headers;
}

std::string error_json(int /*status*/, const std::string& message, const std::string& /*path*/) {
  return dump_line({{"error", message}});
}

void respond(HttpExchange& exchange, int status, const Json& body) {
  exchange.respond({.status = status, .body = dump_line(body), .headers = page_headers()});
}

std::string query_value(const HttpRequest& request, std::string_view name, const std::string& missing = "") {
  const auto found = std::ranges::find(request.query, name, [](const auto& pair) { return pair.first; });
  return found == request.query.end() ? missing : found->second;
}

int64_t number_in_query(const HttpRequest& request, const std::string& name, const std::string& missing) {
  const std::string value = query_value(request, name, missing);
  const Json number = Json::parse(value, nullptr, /*allow_exceptions=*/false);
  if (!number.is_number_integer())
    throw UserError(str(name, ": got ", quoted(value), ", expected a whole number"));
  return number.get<int64_t>();
}

// A command to a run. A run that works answers within moments, or at the end of its step.
Relay command_relay(const fs::path& run, const std::string& command, const Exchange& exchange) {
  return [exchange, control = std::make_shared<ControlRequest>(run, command)](bool ends) {
    if (!exchange->is_open()) return false;
    auto answer = control->poll();
    if (!answer && ends) answer = {.done = false, .text = kServerEnds};
    if (answer)
      respond(*exchange, answer->done ? 200 : 409, {{answer->done ? "text" : "error", answer->text}});
    return !answer.has_value();
  };
}

// The page's box to talk to a run that serves its model (serve.port): passes the conversation, {"messages"}
// as in OpenAI's chat completions, on to the run's server, and streams the answer as that server does. It is
// a request without a session (docs/serve.md), so nobody trains on it. Throws UserError if the body is
// malformed, or the run is not alive, serves no model or does not answer.
Relay chat_relay(const fs::path& run, const std::string& body, const Exchange& exchange) {
  Json request = Json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (!request.is_object() || request.size() != 1 || !request.contains("messages"))
    throw UserError("the body of a chat: expected {\"messages\": [...]}");
  if (!is_run_alive(run)) throw UserError("the run is not alive");
  const fs::path file = control_file(run, kModelServer);
  if (!fs::exists(file)) throw UserError("the run does not serve its model: start it with serve.port");
  const Json server = Json::parse(read_file(file));
  const HttpUrl url = parse_http_url(server.at("url").get<std::string>() + "/v1/chat/completions", "serve");
  const HttpAddress address = wait_for_endpoint("the run's server", url, kConnectSeconds, "serve.port");
  const auto call =
      std::make_shared<HttpCall>(url, address, server.at("api_key").get<std::string>(), kMostAnswerBytes);
  request["model"] = "policy";
  request["stream"] = true;
  call->post(dump_line(request));
  return [exchange, call, streams = false](bool ends) mutable {
    if (!exchange->is_open()) return false;
    const std::optional<HttpAnswer> answer = call->advance();
    std::string part = call->take_body();
    if (answer && answer->is_success()) part += answer->body;
    if (!part.empty() && !std::exchange(streams, true)) exchange->begin_stream(page_headers());
    if (!part.empty()) exchange->write(part);
    if (!answer && !ends) return true;
    if (streams && answer && answer->is_success()) {
      exchange->finish();
      return false;
    }
    // The server's own words, if it has any.
    std::string message = answer ? "the run's server: " + answer->message : kServerEnds;
    const Json error = answer ? Json::parse(answer->body, nullptr, /*allow_exceptions=*/false) : Json();
    if (const Json::json_pointer place("/error/message"); error.contains(place) && error[place].is_string())
      message = error[place].get<std::string>();
    if (!streams) {
      respond(*exchange, 409, {{"error", message}});
    } else {
      exchange->write("data: " + dump_line({{"error", {{"message", message}}}}) + "\n\n");
      exchange->finish();
    }
    return false;
  };
}

}  // namespace

struct ViewServer::State {
  struct Run {
    ViewedRun given;
    RunFollower follower;
  };

  void answer(const HttpRequest& request, const Exchange& exchange);
  void answer_step(const HttpRequest& request, const Exchange& exchange);
  void begin_relay(const HttpRequest& request, const Exchange& exchange);
  Run& run_of(const HttpRequest& request);
  Json snapshot();
  std::string prometheus();
  void poll();
  void on_time();

  // All members are used on the I/O thread only, except for ViewedRun::step.
  std::vector<Run> runs;
  std::string page;
  const std::string token = random_hex(16);
  std::vector<Relay> relays;
  std::vector<Exchange> streams;
  int64_t serial = 0;  // of the last event
  int num_polls = 0;
  std::optional<HttpServer> server;
};

void ViewServer::State::poll() {
  for (size_t i = 0; i < runs.size(); ++i)
    for (Json& event : runs[i].follower.poll()) {
      event["run"] = i;
      const std::string text = str("id: ", ++serial, "\ndata: ", dump_line(event), "\n\n");
      for (const Exchange& stream : streams) stream->write(text);
    }
}

void ViewServer::State::on_time() {
  std::erase_if(streams, [](const Exchange& stream) { return !stream->is_open(); });
  if (streams.empty()) return;
  poll();
  if (++num_polls % kPollsPerSign == 0)
    for (const Exchange& stream : streams) stream->write(": alive\n\n");
}

Json ViewServer::State::snapshot() {
  poll();
  Json list = Json::array();
  for (const Run& run : runs) {
    list.push_back(run.follower.snapshot());
    list.back().update(run.given.about);
  }
  return {{"runs", std::move(list)}, {"serial", serial}};
}

// A name has letters, digits and '_' only. "rollout/length_mean" becomes bough_rollout_length_mean.
std::string ViewServer::State::prometheus() {
  poll();
  std::map<std::string, std::string> lines;  // by name: a name's samples stand together
  for (const Run& run : runs) {
    const std::string labels =
        str("{run=", dump_line(without_controls(run.follower.folder().string(), "")), "} ");
    const auto add = [&](const std::string& key, double value) {
      std::string name = "bough_" + key;
      for (char& c : name)
        if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
      if (std::isfinite(value)) lines[name] += name + labels + format_shortest(value) + "\n";
    };
    add("step", static_cast<double>(run.follower.last_step()));
    for (const auto& [key, curve] : run.follower.curves()) add(key, curve.values.back());
  }
  std::string out;
  for (const auto& [name, samples] : lines) out += str("# TYPE ", name, " gauge\n", samples);
  return out;
}

ViewServer::State::Run& ViewServer::State::run_of(const HttpRequest& request) {
  const int64_t run = number_in_query(request, "run", "0");
  if (run < 0 || run >= std::ssize(runs)) throw UserError(str("run: ", run, " of ", runs.size()));
  return runs[static_cast<size_t>(run)];
}

void ViewServer::State::answer_step(const HttpRequest& request, const Exchange& exchange) {
  const auto step = number_in_query(request, "step", "-1"), first = number_in_query(request, "first", "0");
  server->prepare(0, [this, exchange, call = run_of(request).given.step, step, first] {
    int status = 200;
    Json body;
    try {
      body = call(step, first);
    } catch (const std::exception& error) {
      status = dynamic_cast<const UserError*>(&error) ? 404 : 500;
      body = {{"error", error.what()}};
    }
    server->post([exchange, status, body = std::move(body)] { respond(*exchange, status, body); });
  });
}

void ViewServer::State::begin_relay(const HttpRequest& request, const Exchange& exchange) {
  if (relays.size() >= kMostRelays) throw UserError("too many commands and chats wait for an answer");
  const fs::path& folder = run_of(request).given.folder;
  if (request.path == "/api/chat") relays.push_back(chat_relay(folder, request.body, exchange));
  else relays.push_back(command_relay(folder, query_value(request, "command"), exchange));
}

void ViewServer::State::answer(const HttpRequest& request, const Exchange& exchange) {
  const std::string& path = request.path;
  const auto refuse = [&](int status, const std::string& message) {
    respond(*exchange, status, {{"error", message}});
  };
  if (!is_for_this_machine(request))
    return refuse(403, "only programs on this machine are answered (headers Host and Origin)");
  const bool is_change = path == "/api/chat" || path == "/api/control";
  if (is_change && request.method != "POST") return refuse(405, path + " takes POST only");
  if (is_change && !same_key(request.header("x-bough-token"), token))
    return refuse(403, "this needs the header X-Bough-Token: open the page by the URL with its token");
  if (!is_change && request.method != "GET" && request.method != "HEAD")
    return refuse(405, "only GET is answered");
  try {
    if (is_change) {
      begin_relay(request, exchange);
    } else if (path == "/") {
      exchange->respond(
          {.body = page, .content_type = "text/html; charset=utf-8", .headers = page_headers()});
    } else if (path == "/api/snapshot") {
      respond(*exchange, 200, snapshot());
    } else if (path == "/metrics") {
      exchange->respond({.body = prometheus(), .content_type = "text/plain; version=0.0.4"});
    } else if (path == "/api/events") {
      exchange->begin_stream(page_headers());
      streams.push_back(exchange);
    } else if (path == "/api/step") {
      answer_step(request, exchange);
    } else {
      refuse(404, str("there is no ", path));
    }
  } catch (const std::exception& error) {
    refuse(is_change ? 409 : 400, error.what());
  }
}

ViewServer::ViewServer(std::vector<ViewedRun> runs, int64_t port) : state_(std::make_unique<State>()) {
  for (ViewedRun& run : runs) {
    RunFollower follower(run.folder);
    state_->runs.push_back({std::move(run), std::move(follower)});
  }
  state_->page = run_page("Bough", nullptr);
  HttpServerOptions options{.host = "127.0.0.1", .port = static_cast<int>(port), .error_body = error_json};
  options.limits.max_unsent = {kUnreadBytes};
  options.limits.max_connections = 64;
  options.limits.max_body = {int64_t{256} << 10};
  state_->server.emplace(std::move(options), [state = state_.get()](HttpRequest request, auto exchange) {
    state->answer(request, exchange);
  });
  state_->server->every(kPollSeconds, [state = state_.get()] { state->on_time(); });
  state_->server->every(kRelaySeconds, [state = state_.get()] {
    std::erase_if(state->relays, [](const auto& relay) { return !relay(/*ends=*/false); });
  });
}

// Streams and relays refer to connections of the server, so they end before it. A run that a command stopped
// answers it here.
ViewServer::~ViewServer() {
  state_->server->post([state = state_.get()] {
    for (const auto& stream : state->streams) stream->finish();
    state->streams.clear();
    for (const auto& relay : state->relays) relay(/*ends=*/true);
    state->relays.clear();
  });
  state_->server->close();
}

std::string ViewServer::url() const {
  return state_->server->url();
}

std::string ViewServer::url_with_token() const {
  return url() + "/?token=" + state_->token;
}

}  // namespace bough
