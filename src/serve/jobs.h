// Requests while the server answers them.
//
//   start() ─▶ preparation thread: JSON, template, tokens ─▶ EngineLoop ─▶ take(): text, parsers, the API's
//   format ─▶ the client's exchange, as a stream or as a whole
//
// If the client goes away or does not read, its request is cancelled in the engine. I/O thread only, except
// in_flight().
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "net/http_server.h"
#include "serve/agent_sessions.h"
#include "serve/api.h"
#include "serve/engine_loop.h"

namespace bough {

inline constexpr const char* kStopping = "the server is shutting down";

struct ServeCounters {
  std::map<std::pair<std::string, int>, int64_t> requests;  // by path and status
  int64_t prompt_tokens = 0, completion_tokens = 0, cancelled = 0, malformed_calls = 0;
};

HttpHeaders headers_for(const std::string& request_id);  // of an answer

class Jobs {
 public:
  // All arguments must outlive the jobs. `agent_sessions`: nullptr if no agents are trained.
  Jobs(const ServedModel& model, const AgentSessions* agent_sessions, EngineLoop& loop, HttpServer& http);
  ~Jobs();

  // Answers a request of `api`. `session`: nullptr if the request does not come from a trained agent. An
  // agent that sends a request again has abandoned its first attempt, which gets an error.
  void start(const Api& api, HttpRequest request, const std::shared_ptr<HttpExchange>& exchange,
             const SessionPointer& session);
  void take(std::vector<EngineEvent> events);
  void fail_ended_sessions();  // fails the requests of sessions that have ended
  void fail_all(const ApiError& error);
  void stop() { is_stopping_ = true; }  // requests that reach the engine from now on get an error
  bool is_stopping() const { return is_stopping_; }
  void clear();  // call it before the HTTP server is destroyed, to which the jobs' exchanges refer

  int64_t in_flight() const { return in_flight_.load(); }  // any thread
  ServeCounters& counters() { return counters_; }
  const ServeCounters& counters() const { return counters_; }

 private:
  struct Job;
  using JobPointer = std::shared_ptr<Job>;
  struct Place {
    JobPointer job;
    size_t prompt;
  };

  void take_identity(Job& job, const HttpRequest& request);
  void submit(const JobPointer& job);
  void answer_again(const JobPointer& job, const GenerationResult& result);
  void take(const JobPointer& job, size_t prompt, EngineEvent event);
  void begin(Job& job);
  void take_token(Job& job, size_t choice, const StreamedToken& sampled);
  void end_early(const JobPointer& job);
  void finish_prompt(Job& job, size_t prompt, const GenerationResult& result);
  void add(Job& job, size_t choice, ChoiceDelta delta);
  void send(Job& job);
  void complete(const JobPointer& job);
  void fail(Job& job, const ApiError& error);
  void abandon(Job& job);
  void close(Job& job, int status, const std::string& how);

  const ServedModel& model_;
  const AgentSessions* const agent_sessions_;
  EngineLoop& loop_;
  HttpServer& http_;
  std::atomic<int64_t> in_flight_ = 0;
  std::unordered_map<uint64_t, Place> jobs_;  // by the engine's request id
  std::set<JobPointer> agent_jobs_;           // the jobs of agents' sessions
  uint64_t next_id_ = 0;
  ServeCounters counters_;
  bool is_stopping_ = false;
};

}  // namespace bough
