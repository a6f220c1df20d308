// `bough serve`: OpenAI's and Anthropic's HTTP APIs over an engine. No torch: the engine is an interface.
//
//   HttpServer (I/O thread) ─▶ lanes: JSON, template, tokens ─▶ EngineLoop ─▶ the engine, on run()'s thread
//          ▲                                                        │ events of a pass
//          └────────── I/O thread: text, parsers, the API's form ◀──┘
//
// Everything of a request is on the I/O thread but its preparation and the JSON of an unstreamed answer. A
// client that goes away, or does not read, has its request cancelled in the engine, which frees its pages.
//
// With an AgentDesk it serves inside a training run (agent_server.h): the routes /rl/ start and end sessions
// and set rewards, a session's key is the API key of its requests, and what they are answered becomes its
// rows.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "serve/agent_desk.h"
#include "serve/api.h"

namespace bough {

// UserError: an address that others can reach and no key; an unknown parser.
void check_serving(const ServeSettings& settings, const std::string& api_key);

class Server {
 public:
  // Listens when it returns; requests wait until run(). `api_key`: every request must have it as a bearer
  // token; empty: none, and only programs on this machine may ask. UserError: see check_serving(); an address
  // that cannot be had.
  Server(Engine& engine, ServedModel model, std::string api_key, std::optional<AgentDeskOptions> agents = {});
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  std::string url() const;
  // Drives the engine until stop(). Then nobody is accepted any more, requests in flight have
  // `shutdown_seconds` to finish, and the rest is told and cancelled. What the engine throws is passed on,
  // after everybody has been told.
  void run(const std::function<bool()>& stop);

  // In place of run(), for who has other work for the engine's thread: EngineLoop's.
  bool pass();
  int64_t num_running() const;                   // requests that the engine has; on its thread
  void on_commands(std::function<void()> wake);  // before start() of the desk
  AgentDesk& desk() const;                       // of agents
  // Nobody is accepted any more, and who waits is told.
  void close();
  int64_t num_untrained() const;  // requests without a session

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bough
