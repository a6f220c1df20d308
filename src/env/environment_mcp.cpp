#include "env/environment_mcp.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"
#include "env/environment_process.h"
#include "net/worker_protocol.h"

namespace bough {

namespace {

constexpr int64_t kMostPages = 100;  // pages of tools/list: stops if a server's cursors form a cycle

// Converts the result of tools/call to the text that the model is shown.
std::string text_of(const OrderedJson& result) {
  std::string out;
  const auto content = result.find("content");
  if (content != result.end() && content->is_array())
    for (const OrderedJson& part : *content) {
      if (!part.is_object()) continue;
      const auto text_in = [](const OrderedJson& object) -> std::string {
        const auto text = object.find("text");
        return text != object.end() && text->is_string() ? text->get<std::string>() : "";
      };
      const auto resource = part.find("resource");
      const bool has_resource = resource != part.end() && resource->is_object();
      std::string text = text_in(has_resource ? *resource : part);
      if (const std::string type = part.contains("type") && part["type"].is_string() ? part["type"] : "";
          text.empty() && type != "text")
        text = str("[", type.empty() ? "content" : type, " that is no text]");
      out += (out.empty() ? "" : "\n") + text;
    }
  if (out.empty() && result.contains("structuredContent")) return dump_ordered(result["structuredContent"]);
  return out;
}

// One server and the requests that wait for its replies.
class McpServer {
 public:
  McpServer(const std::string& command, bool in_namespace)
      : process_({"/bin/sh", "-c", command}, in_namespace) {
    initialize_ = request("initialize", {{"protocolVersion", kMcpVersions[0]},
                                         {"capabilities", OrderedJson::object()},
                                         {"clientInfo", {{"name", "bough"}, {"version", "1"}}}});
  }

  int64_t request(const char* method, OrderedJson params) {
    const int64_t id = ++last_id_;
    open_.insert(id);
    send({{"jsonrpc", "2.0"}, {"id", id}, {"method", method}, {"params", std::move(params)}});
    return id;
  }
  void cancel(int64_t id) {
    if (open_.erase(id) == 0) return;
    cancelled_.insert(id);
    notify("notifications/cancelled", {{"requestId", id}, {"reason", "the client does not wait any more"}});
  }
  // The reply to a request, once it has arrived: an object with `result` or `error`. nullptr before that.
  const OrderedJson* answer(int64_t id) const {
    const auto found = answers_.find(id);
    return found == answers_.end() ? nullptr : &found->second;
  }
  void forget(int64_t id) { answers_.erase(id); }

  bool is_ready() const { return is_ready_; }
  const OrderedJson& tools() const { return tools_; }
  const std::optional<ChannelReply>& broken() const { return broken_; }
  int64_t num_heard() const { return num_heard_; }  // lines received from the server
  int descriptor() const { return broken_ ? -1 : process_.descriptor(); }
  bool wants_to_send() const { return !broken_ && process_.wants_to_send(); }
  void give_up(const std::string& why) { break_off(EpisodeFailure::kTimeout, why); }

  void advance() {
    if (broken_) return;
    for (auto line = process_.advance(); line; line = process_.next()) {
      ++num_heard_;
      read(*line);
      if (broken_) return;
    }
    broken_ = broken_reply(process_);
  }

 private:
  void send(const OrderedJson& message) { process_.send(dump_ordered(message)); }
  void notify(const char* method, OrderedJson params) {
    send({{"jsonrpc", "2.0"}, {"method", method}, {"params", std::move(params)}});
  }
  void break_off(EpisodeFailure failure, const std::string& why) {
    broken_ = ChannelReply{.kind = ChannelReply::kBroken, .failure = failure, .message = shortened(why)};
  }

  void read(const std::string& line) {
    OrderedJson message = OrderedJson::parse(line, nullptr, /*allow_exceptions=*/false);
    if (message.is_array()) {  // a batch, as in version 2025-03-26
      for (OrderedJson& each : message) take(each, line);
      return;
    }
    take(message, line);
  }

  void take(OrderedJson& message, const std::string& line) {
    const auto broken = [&](const char* what) {
      break_off(EpisodeFailure::kProtocol, str("the server wrote ", quoted(line), ", ", what));
    };
    if (!message.is_object()) return broken("which is not a JSON-RPC message");
    const auto id = message.find("id");
    if (message.contains("method")) {
      if (id == message.end()) return;  // a notification
      OrderedJson reply = {{"jsonrpc", "2.0"}, {"id", *id}};
      if (message["method"] == "ping") reply["result"] = OrderedJson::object();
      else reply["error"] = {{"code", -32601}, {"message", "this client has no such method"}};
      return send(reply);
    }
    const auto error = message.find("error");
    if (message.contains("result") == (error != message.end()))
      return broken("which is not a JSON-RPC message");
    if (id == message.end() || !id->is_number_integer()) return broken("which answers no open request");
    const auto number = id->get<int64_t>();
    if (cancelled_.erase(number) > 0) return;
    if (open_.erase(number) == 0) return broken("which answers no open request");
    if (number == initialize_ || number == list_) {
      if (error != message.end())
        return broken(number == list_ ? "instead of its tools" : "instead of a protocol version");
      return number == list_ ? take_tools(message["result"]) : take_version(message["result"]);
    }
    answers_[number] = std::move(message);
  }

  void take_version(const OrderedJson& result) {
    const auto version = result.find("protocolVersion");
    const std::string name =
        version != result.end() && version->is_string() ? version->get<std::string>() : "";
    if (std::find(std::begin(kMcpVersions), std::end(kMcpVersions), name) == std::end(kMcpVersions)) {
      std::string known;
      for (const std::string_view each : kMcpVersions)
        known += (known.empty() ? "" : ", ") + std::string(each);
      return break_off(EpisodeFailure::kProtocol,
                       str("the server speaks protocol version ", quoted(name), ", expected one of ", known));
    }
    notify("notifications/initialized", OrderedJson::object());
    list_ = request("tools/list", OrderedJson::object());
  }

  void take_tools(const OrderedJson& result) {
    const auto tools = result.find("tools");
    if (tools == result.end() || !tools->is_array())
      return break_off(EpisodeFailure::kProtocol, "the reply to tools/list has no list of tools");
    for (const OrderedJson& tool : *tools) {
      const auto name = tool.find("name");
      if (name == tool.end() || !name->is_string())
        return break_off(EpisodeFailure::kProtocol,
                         str("the server lists a tool without a name: ", quoted(dump_ordered(tool))));
      OrderedJson function = {{"name", *name}};
      if (const auto text = tool.find("description"); text != tool.end() && text->is_string())
        function["description"] = *text;
      const auto schema = tool.find("inputSchema");
      function["parameters"] = schema != tool.end() && schema->is_object()
                                   ? *schema
                                   : OrderedJson{{"type", "object"}, {"properties", OrderedJson::object()}};
      tools_.push_back({{"type", "function"}, {"function", std::move(function)}});
    }
    const auto cursor = result.find("nextCursor");
    if (cursor != result.end() && cursor->is_string() && ++num_pages_ < kMostPages) {
      list_ = request("tools/list", {{"cursor", *cursor}});
      return;
    }
    if (tools_.empty()) return break_off(EpisodeFailure::kProtocol, "the server has no tools");
    is_ready_ = true;
  }

  LineProcess process_;
  int64_t last_id_ = 0, initialize_ = 0, list_ = 0, num_pages_ = 0, num_heard_ = 0;
  std::set<int64_t> open_, cancelled_;
  std::map<int64_t, OrderedJson> answers_;
  OrderedJson tools_ = OrderedJson::array();
  bool is_ready_ = false;
  std::optional<ChannelReply> broken_;
};

class McpChannel final : public EpisodeChannel {
 public:
  McpChannel(std::shared_ptr<McpServer> server, const std::string& kind)
      : server_(std::move(server)), kind_(kind) {}
  ~McpChannel() override { cancel(); }

  void begin(const EpisodeCall& call) override {
    is_asked_ = true;
    is_reset_ = call.is_reset();
    num_heard_before_ = server_->num_heard();
    if (is_reset_) return;
    for (const EnvironmentCall& each : call.action->calls)
      requests_.push_back(
          server_->request("tools/call", {{"name", each.name}, {"arguments", each.arguments}}));
  }
  AfterClose close() override { return kind_ == "conversation" ? AfterClose::kGone : AfterClose::kFree; }
  bool give_up() override {
    const bool is_alive = server_->num_heard() > num_heard_before_;
    cancel();
    if (kind_ != "run") return false;
    if (!is_alive) server_->give_up("the server that all conversations share did not answer in time");
    return is_alive;
  }

  // With `server: run`, all channels poll the descriptor of the one server. The first channel that advances
  // reads the lines for all channels. has_come() tells the other channels that their answers have arrived.
  int descriptor() const override { return server_->descriptor(); }
  bool wants_to_send() const override { return server_->wants_to_send(); }
  bool has_come() const override {
    if (server_->broken()) return true;
    if (!is_ready_) return server_->is_ready();
    return is_asked_ && std::all_of(requests_.begin(), requests_.end(),
                                    [&](int64_t id) { return server_->answer(id) != nullptr; });
  }

  std::optional<ChannelReply> advance() override {
    server_->advance();
    if (server_->broken()) return server_->broken();
    if (!is_ready_) {
      is_ready_ = server_->is_ready();
      return is_ready_ ? std::optional(ChannelReply{.kind = ChannelReply::kReady}) : std::nullopt;
    }
    if (!has_come()) return std::nullopt;
    is_asked_ = false;
    ChannelReply reply{.kind = ChannelReply::kAnswer};
    Observation& observation = reply.observation;
    if (is_reset_) observation.tools = server_->tools();
    else observation.done = requests_.empty();
    for (const int64_t id : std::exchange(requests_, {})) {
      const OrderedJson& answer = *server_->answer(id);
      const auto result = answer.find("result");
      if (result != answer.end()) {
        observation.messages.push_back(message_of("tool", text_of(*result)));
      } else {
        const OrderedJson& error = answer["error"];
        const auto text = error.find("message");
        const bool has_text = text != error.end() && text->is_string();
        observation.messages.push_back(
            message_of("tool", "error: " + (has_text ? text->get<std::string>() : dump_ordered(error))));
        ++observation.invalid_calls;
      }
      server_->forget(id);
    }
    return reply;
  }

 private:
  void cancel() {
    for (const int64_t id : std::exchange(requests_, {})) {
      server_->cancel(id);
      server_->forget(id);
    }
    is_asked_ = false;
  }

  const std::shared_ptr<McpServer> server_;
  const std::string kind_;
  bool is_ready_ = false, is_asked_ = false, is_reset_ = false;
  int64_t num_heard_before_ = 0;   // lines received from the server when the call began
  std::vector<int64_t> requests_;  // the requests of the turn's calls, in order
};

}  // namespace

std::unique_ptr<Environment> make_mcp_environment(const EnvironmentSettings& settings, PoolTime time) {
  const auto open = [command = settings.command, kind = settings.server,
                     in_namespace = can_make_pid_namespaces(),
                     shared = std::shared_ptr<McpServer>()]() mutable {
    std::shared_ptr<McpServer> server = shared;
    if (!server || server->broken()) server = std::make_shared<McpServer>(command, in_namespace);
    if (kind == "run") shared = server;
    return std::make_unique<McpChannel>(std::move(server), kind);
  };
  return make_environment_pool({.name = settings.command, .announces_ready = true, .time = time}, settings,
                               open);
}

}  // namespace bough
