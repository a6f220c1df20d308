#include "serve/agent_routes.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <span>

#include "net/secrets.h"
#include "serve/access.h"

namespace bough {

namespace {

constexpr const char* kAgentPaths[] = {"/rl/start_session", "/rl/set_reward", "/rl/end_session"};

// Renders and tokenizes for the conversation rows of agents' sessions.
class ServedCodec final : public ChatCodec {
 public:
  explicit ServedCodec(const ServedModel& model) : model_(model) {}
  std::string render(const Conversation& conversation) const override {
    if (!model_.chat_template) throw UserError(str("agents need a chat template: ", model_.no_template));
    return model_.chat_template->render(conversation);
  }
  std::string tool_call_parser() const override {
    return model_.chat_template ? model_.chat_template->tool_call_parser() : "";
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

EnvironmentSettings environment_of(const ServedModel& model) {
  EnvironmentSettings settings;
  settings.tool_call_parser = model.settings.tool_call_parser;
  settings.reasoning_parser = model.settings.reasoning_parser;
  return settings;
}

}  // namespace

AgentRoutes::AgentRoutes(const ServedModel& model, const AgentSessionsOptions& options)
    : codec_(std::make_unique<ServedCodec>(model)),
      format_(*codec_, environment_of(model), model.max_length),
      sessions_(format_, options) {}

bool AgentRoutes::is_route(const std::string& path) {
  return std::find(std::begin(kAgentPaths), std::end(kAgentPaths), path) != std::end(kAgentPaths);
}

void AgentRoutes::handle(const HttpRequest& request, HttpExchange& exchange, const std::string& api_key,
                         Jobs& jobs) {
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
  const std::string key = given_key(request);
  if (request.path == "/rl/start_session") {
    if (!api_key.empty() && !same_key(key, api_key))
      throw ApiError(401, "a session's key cannot start a session: send the server's key", "",
                     "invalid_api_key");
    const std::string task_id = fields.text("task_id").value_or("");
    const std::string old_key = fields.text("api_key").value_or("");
    fields.done();
    const AgentSessions::Started started = sessions_.start_session(
        task_id, old_key, request.header("idempotency-key"), std::chrono::steady_clock::now());
    OrderedJson answer = {{"session_id", started.session->id()},
                          {"api_key", started.key},
                          {"group_id", std::to_string(started.session->group())},
                          {"sessions_left", started.sessions_left},
                          {"lease_seconds", started.lease_seconds}};
    if (!started.problem.is_null()) answer["problem"] = started.problem;
    exchange.respond({.body = answer.dump(-1, ' ', false, OrderedJson::error_handler_t::replace)});
    jobs.fail_ended_sessions();  // for the session that had the key before
    return;
  }
  const SessionPointer session = sessions_.find(key);
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
    sessions_.end_session(key);
    jobs.fail_ended_sessions();
  }
  exchange.respond({.body = dump_line(answer)});
}

}  // namespace bough
