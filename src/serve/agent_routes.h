// The routes under /rl/, by which external agents start and end sessions and set rewards: AReaL's routes
// (areal.experimental.openai.proxy), with additional fields for groups of sessions.
#pragma once

#include <memory>
#include <string>

#include "net/http_server.h"
#include "serve/agent_sessions.h"
#include "serve/api.h"
#include "serve/jobs.h"

namespace bough {

class AgentRoutes {
 public:
  // `model` must outlive the routes.
  AgentRoutes(const ServedModel& model, const AgentSessionsOptions& options);

  static bool is_route(const std::string& path);
  // Executes and answers a request of such a path. Requests in `jobs` get an error if their session ends.
  // `api_key`: the server's key, which starts sessions; "" if it has none. Throws ApiError.
  void handle(const HttpRequest& request, HttpExchange& exchange, const std::string& api_key, Jobs& jobs);
  AgentSessions& sessions() { return sessions_; }

 private:
  const std::unique_ptr<const ChatCodec> codec_;
  const ConversationFormat format_;
  AgentSessions sessions_;
};

}  // namespace bough
