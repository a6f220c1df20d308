#include "report/view_server.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <deque>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/format.h"
#include "net/http_server.h"
#include "net/secrets.h"
#include "report/chat_relay.h"
#include "report/run_control.h"
#include "report/run_follower.h"
#include "report/run_page.h"

namespace bough {

namespace {

constexpr size_t kMostKeptBytes = size_t{256} << 10;  // of past events, for readers that connect again
constexpr int64_t kUnreadBytes = int64_t{1} << 20;
constexpr int kPollsPerSign = 30;     // a sign of life every 15 seconds
constexpr double kChatSeconds = 0.1;  // between the parts of a streamed answer
constexpr size_t kMostChats = 4;

const HttpHeaders& page_headers() {
  static const HttpHeaders headers = {{"Cache-Control", "no-store"},
                                      {"X-Content-Type-Options", "nosniff"},
                                      {"X-Frame-Options", "DENY"},
                                      {"Cross-Origin-Resource-Policy", "same-origin"},
                                      {"Referrer-Policy", "no-referrer"}};
  return headers;
}

std::string error_json(int status, const std::string& message, const std::string& path) {
  return dump_line({{"error", message}});
}

int64_t number_in_query(const HttpRequest& request, std::string_view name, int64_t missing) {
  for (const auto& [key, value] : request.query) {
    if (key != name) continue;
    int64_t number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size())
      throw UserError(str(name, ": got ", quoted(value), ", expected a whole number"));
    return number;
  }
  return missing;
}

std::string label_value(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out;
}

}  // namespace

struct ViewServer::State {
  struct Run {
    ViewedRun given;
    RunFollower follower;
  };
  struct Event {
    int64_t serial;
    std::string text;
  };

  void answer(const HttpRequest& request, const std::shared_ptr<HttpExchange>& exchange);
  void answer_step(const HttpRequest& request, const std::shared_ptr<HttpExchange>& exchange);
  void open_stream(const HttpRequest& request, const std::shared_ptr<HttpExchange>& exchange);
  void begin_command(const HttpRequest& request, const std::shared_ptr<HttpExchange>& exchange);
  void begin_chat(const HttpRequest& request, const std::shared_ptr<HttpExchange>& exchange);
  void answer_commands(bool server_ends);
  Run& run_of(const HttpRequest& request);
  std::string snapshot();
  std::string prometheus();
  void poll();
  void on_time();

  // All members are used on the I/O thread only, except for ViewedRun::step.
  std::vector<Run> runs;
  std::string page;
  const std::string token = random_hex(16);
  struct OpenCommand {
    std::unique_ptr<ControlRequest> request;
    std::shared_ptr<HttpExchange> exchange;
  };
  std::vector<OpenCommand> commands;
  std::vector<std::unique_ptr<ChatRelay>> chats;
  std::vector<std::shared_ptr<HttpExchange>> streams;
  std::deque<Event> events;  // the last ones
  size_t kept_bytes = 0;
  // Begins with the time, so that a reader of an earlier server notices that its events are gone.
  int64_t serial = now_seconds() * 1'000'000;
  int num_polls = 0;
  std::optional<HttpServer> server;
};

void ViewServer::State::poll() {
  for (size_t i = 0; i < runs.size(); ++i)
    for (Json& event : runs[i].follower.poll()) {
      event["run"] = i;
      ++serial;
      events.push_back({serial, str("id: ", serial, "\ndata: ", dump_line(event), "\n\n")});
      kept_bytes += events.back().text.size();
      for (const auto& stream : streams) stream->write(events.back().text);
      while (kept_bytes > kMostKeptBytes && events.size() > 1) {
        kept_bytes -= events.front().text.size();
        events.pop_front();
      }
    }
}

void ViewServer::State::on_time() {
  answer_commands(/*server_ends=*/false);
  std::erase_if(streams, [](const auto& stream) { return !stream->is_open(); });
  if (streams.empty()) return;
  poll();
  if (++num_polls % kPollsPerSign == 0)
    for (const auto& stream : streams) stream->write(": alive\n\n");
}

std::string ViewServer::State::snapshot() {
  poll();
  Json list = Json::array();
  for (const Run& run : runs) {
    Json one = run.follower.snapshot();
    one.update(run.given.about);
    list.push_back(std::move(one));
  }
  return dump_line({{"runs", std::move(list)}, {"serial", serial}});
}

// A name has letters, digits and '_' only. "rollout/length_mean" becomes bough_rollout_length_mean.
std::string ViewServer::State::prometheus() {
  poll();
  std::map<std::string, std::string> lines;  // by name: a name's samples stand together
  for (const Run& run : runs) {
    const std::string labels = str("{run=\"", label_value(run.follower.folder().string()), "\"} ");
    std::map<std::string, double> values = run.follower.last_values();
    values["step"] = static_cast<double>(run.follower.last_step());
    for (const auto& [key, value] : values) {
      std::string name = "bough_" + key;
      for (char& c : name)
        if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
      if (std::isfinite(value)) lines[name] += name + labels + format_shortest(value) + "\n";
    }
  }
  std::string out;
  for (const auto& [name, samples] : lines) out += str("# TYPE ", name, " gauge\n", samples);
  return out;
}

void ViewServer::State::open_stream(const HttpRequest& request,
                                    const std::shared_ptr<HttpExchange>& exchange) {
  int64_t after = number_in_query(request, "after", serial);
  // A browser that lost its connection says which event it got last.
  if (const std::string last = request.header("last-event-id"); !last.empty())
    std::from_chars(last.data(), last.data() + last.size(), after);
  exchange->begin_stream(page_headers());
  poll();
  const int64_t oldest = events.empty() ? serial : events.front().serial - 1;
  if (after < oldest || after > serial) {
    exchange->write(str("id: ", serial, "\ndata: {\"kind\":\"reload\",\"run\":0}\n\n"));
  } else {
    for (const Event& event : events)
      if (event.serial > after) exchange->write(event.text);
  }
  streams.push_back(exchange);
}

ViewServer::State::Run& ViewServer::State::run_of(const HttpRequest& request) {
  const int64_t run = number_in_query(request, "run", 0);
  if (run < 0 || run >= std::ssize(runs)) throw UserError(str("run: ", run, " of ", runs.size()));
  return runs[static_cast<size_t>(run)];
}

void ViewServer::State::answer_step(const HttpRequest& request,
                                    const std::shared_ptr<HttpExchange>& exchange) {
  const int64_t step = number_in_query(request, "step", -1), first = number_in_query(request, "first", 0);
  server->prepare(0, [this, exchange, call = run_of(request).given.step, step, first] {
    HttpResponse response{.headers = page_headers()};
    try {
      if (!call) throw UserError("this run's rollouts cannot be read");
      response.body = dump_line(call(step, first));
    } catch (const std::exception& error) {
      response.status = dynamic_cast<const UserError*>(&error) ? 404 : 500;
      response.body = error_json(response.status, error.what(), "");
    }
    server->post([exchange, response = std::move(response)] { exchange->respond(response); });
  });
}

// A run that works answers within moments, or at the end of its step. The client may go before.
void ViewServer::State::begin_command(const HttpRequest& request,
                                      const std::shared_ptr<HttpExchange>& exchange) {
  constexpr size_t kMostCommands = 16;
  if (commands.size() >= kMostCommands) throw UserError("too many commands wait for the run");
  std::string command;
  for (const auto& [key, value] : request.query)
    if (key == "command") command = value;
  commands.push_back({std::make_unique<ControlRequest>(run_of(request).given.folder, command), exchange});
}

void ViewServer::State::begin_chat(const HttpRequest& request,
                                   const std::shared_ptr<HttpExchange>& exchange) {
  if (chats.size() >= kMostChats) throw UserError(str(chats.size(), " answers are being made already"));
  chats.push_back(
      std::make_unique<ChatRelay>(run_of(request).given.folder, request.body, exchange, page_headers()));
}

void ViewServer::State::answer_commands(bool server_ends) {
  std::erase_if(commands, [&](OpenCommand& open) {
    if (!open.exchange->is_open()) return true;
    auto answer = open.request->poll();
    if (!answer && server_ends) answer = {.done = false, .text = "the server of the page ends"};
    if (!answer) return false;
    open.exchange->respond(
        {.status = answer->done ? 200 : 409,
         .body = answer->done ? dump_line({{"text", answer->text}}) : error_json(409, answer->text, ""),
         .headers = page_headers()});
    return true;
  });
}

void ViewServer::State::answer(const HttpRequest& request, const std::shared_ptr<HttpExchange>& exchange) {
  const auto refuse = [&](int status, const std::string& message) {
    exchange->respond({.status = status, .body = error_json(status, message, ""), .headers = page_headers()});
  };
  if (!is_for_this_machine(request))
    return refuse(403, "only programs on this machine are answered (headers Host and Origin)");
  if (const bool is_chat = request.path == "/api/chat"; is_chat || request.path == "/api/control") {
    if (request.method != "POST") return refuse(405, request.path + " takes POST only");
    if (!same_key(request.header("x-bough-token"), token))
      return refuse(403, "this needs the header X-Bough-Token: open the page by the URL with its token");
    try {
      return is_chat ? begin_chat(request, exchange) : begin_command(request, exchange);
    } catch (const std::exception& error) {
      return refuse(409, error.what());
    }
  }
  if (request.method != "GET" && request.method != "HEAD") return refuse(405, "only GET is answered");
  try {
    if (request.path == "/") {
      exchange->respond(
          {.body = page, .content_type = "text/html; charset=utf-8", .headers = page_headers()});
    } else if (request.path == "/api/snapshot") {
      exchange->respond({.body = snapshot(), .headers = page_headers()});
    } else if (request.path == "/metrics") {
      exchange->respond({.body = prometheus(), .content_type = "text/plain; version=0.0.4"});
    } else if (request.path == "/api/events") {
      open_stream(request, exchange);
    } else if (request.path == "/api/step") {
      answer_step(request, exchange);
    } else {
      refuse(404, str("there is no ", request.path));
    }
  } catch (const std::exception& error) {
    refuse(400, error.what());
  }
}

ViewServer::ViewServer(std::vector<ViewedRun> runs, int64_t port) : state_(std::make_unique<State>()) {
  if (port < 0 || port > 65535)
    throw UserError(str("port: got ", port, ", expected 0 (any free port) to 65535"));
  for (ViewedRun& run : runs) {
    if (!std::filesystem::is_directory(run.folder))
      throw UserError(str("cannot show ", quoted(run.folder.string(), 300),
                          ": not a folder; give a run's folder, FILEROOT/EXPERIMENT/TRIAL"));
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
  state_->server->every(kChatSeconds, [state = state_.get()] {
    std::erase_if(state->chats, [](const auto& chat) { return !chat->advance(); });
  });
}

// The streams refer to connections of the server, so they end before it. A run that a command stopped answers
// it here.
ViewServer::~ViewServer() {
  state_->server->post([state = state_.get()] {
    for (const auto& stream : state->streams) stream->finish();
    state->streams.clear();
    state->answer_commands(/*server_ends=*/true);
    for (const auto& chat : state->chats) chat->end("the server of the page ends");
    state->chats.clear();
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
