// `bough serve`: OpenAI's and Anthropic's HTTP APIs over an engine. No torch: the engine is an interface.
//
//   HttpServer (I/O thread) ─▶ preparation: JSON, template, tokens ─▶ EngineLoop ─▶ engine, on run()'s thread
//          ▲                                                              │ events of a pass
//          └──────── I/O thread: text, parsers, the API's format ◀────────┘
//
// The I/O thread handles a request, except its preparation and the JSON of an unstreamed answer. If a client
// goes away or does not read, its request is cancelled in the engine, which frees the request's pages of the
// KV cache.
//
// With AgentSessionsOptions the server belongs to a training run (agent_server.h). Routes under /rl/ start
// and end sessions and set rewards. A session's key is the API key of its requests. The requests and their
// answers become the session's conversation rows (agent_session.h).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "serve/agent_sessions.h"
#include "serve/api.h"

namespace bough {

// Throws UserError if other machines can reach the address and there is no key, or if a parser is unknown.
void check_serving(const ServeSettings& settings, const std::string& api_key);

class Server {
 public:
  // The server listens when the constructor returns. Requests wait until run() or pass(). `api_key` is the
  // bearer token of all requests. If empty, only programs on this machine may send requests. `engine` must
  // outlive the server. Throws UserError like check_serving(), or if the address cannot be used.
  Server(Engine& engine, ServedModel model, std::string api_key,
         std::optional<AgentSessionsOptions> agents = {});
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  std::string url() const;
  // Drives the engine until stop() returns true. Then no connection is accepted, and requests in flight have
  // `shutdown_seconds` to finish. After this time they get an error. If the engine throws, all requests get
  // an error and the exception is passed on.
  void run(const std::function<bool()>& stop);

  // For callers that drive the engine themselves, instead of run(). See EngineLoop.
  bool pass();
  int64_t num_running() const;                   // requests in the engine; engine's thread only
  void on_commands(std::function<void()> wake);  // call it before the agent sessions's start()
  AgentSessions& agent_sessions() const;         // InternalError if the server has no agents
  // Accepts no more connections, and answers requests in flight with an error.
  void close();
  int64_t num_untrained() const;  // requests without a session, in a server with agents

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bough
