// The engine whose samples other machines generate: inference servers (vLLM, SGLang; server_api.h) over HTTP.
//
//   submit() ─▶ waiting ─▶ a server, a connection a sample ─▶ its stream of tokens ─▶ step() ─▶ results
//                  ▲                                                 │
//                  └───── lost, or interrupted by new weights ◀──────┘
//
// Every sample is a stream of its own, so that all of its tokens are known at any time. Whatever ends one
// early (new weights, a server that dies, a connection that breaks) costs the tokens nothing: the sample goes
// on from prompt and tokens so far, at the same server or at another.
//
// Where a sample goes: to the server that last had the longest part of its prompt, which has its keys and
// values, unless that one has far more to do than another; else to the one with the least to do.
//
// Weights go by disk: update_weights() writes a model directory, which the servers must see under the same
// path, ends what they generate, has them load it and forget their keys and values, and waits for all of it.
// So each token's version is known. Then each server draws a few tokens, and their log-probabilities are
// compared with those that the trainer's model has: a server with other weights, or one that reports
// log-probabilities of another temperature, is refused. A server that could not be reached gets the weights
// again before it gets a sample.
//
// What ends a sample is decided here, token by token, as the embedded engine decides it: stop tokens, stop
// strings, lengths. Truncation (top_p, top_k, min_p), penalties and min_new_tokens are refused: servers take
// them into the log-probabilities. raw_logprobs are those of the request's temperature, since a server says
// no others. Draws are the server's own: no seed is asked for. vLLM draws seeded requests one by one, and its
// build for CPUs dies of one whose prompt it computes in parts; SGLang takes seeds only with
// --enable-deterministic-inference.
//
// Who blocks: step() for some milliseconds, update_weights() until all servers have the weights.
#pragma once

#include <chrono>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/engine.h"
#include "engine/server_api.h"
#include "engine/stop_strings.h"
#include "net/http_client.h"
#include "net/line_splitter.h"

namespace bough {

class ServerSteps;  // of the source file: calls that a server is asked one after the other

struct ServerEngineOptions {
  std::string backend;  // of server_api()
  ServerSettings settings;
  std::string api_key;  // empty: none is sent
  int64_t max_concurrent = 128;
  ModelLimits limits;
  std::vector<int32_t> stop_tokens;                 // the model's own
  std::function<std::string(int32_t)> token_bytes;  // as EmbeddedEngineOptions has it
  std::filesystem::path weights_folder;             // for directories v0, v1, ...: one at a time
  // Writes the model into a directory that servers load.
  std::function<void(const std::filesystem::path&, const Model&)> write_weights;
  // Of each token from `begin` on: log softmax(logits / temperature) by the model. Empty: not compared.
  std::function<std::vector<double>(const Model&, const std::vector<int32_t>& ids, size_t begin,
                                    double temperature)>
      score;
};

class ServerEngine final : public Engine {
 public:
  // Waits for the servers. UserError: no addresses, a server that is none of the backend's; IoError: one that
  // does not answer in time.
  explicit ServerEngine(ServerEngineOptions options);
  ~ServerEngine() override;

  void submit(GenerationRequest request) override;
  std::vector<GenerationResult> step() override;
  bool idle() const override { return requests_.empty() && finished_.empty(); }
  bool cancel(uint64_t id) override;
  void pause() override { paused_ = true; }
  void resume() override { paused_ = false; }
  bool paused() const override { return paused_; }
  void park() override;
  void unpark() override;
  // UserError: a server whose log-probabilities are not the model's. IoError: none took the weights.
  void update_weights(const WeightUpdate& update) override;
  bool ready_for_weights() const override { return num_owed_ == 0; }
  int32_t version() const override { return version_; }
  std::vector<RunningRequest> running() const override;
  EngineStatistics statistics() const override { return statistics_; }

 private:
  using Time = std::chrono::steady_clock::time_point;

  struct Server {
    std::string name;  // as in the settings
    HttpUrl url;
    HttpAddress address;
    ServerDescription description;
    int64_t load = 0;  // tokens of the samples that it has
    bool has_weights = false;
    Time not_before{};  // when it may be tried again
    double pause_seconds = 0;
    std::string trouble;                 // why it has no weights
    std::unique_ptr<ServerSteps> steps;  // that bring it back
  };
  struct Sample {
    GeneratedSample result;
    bool is_ended = false, is_owed = false;  // interrupted, and no token since
    std::optional<StopMatcher> stops;
    // While a server has it.
    std::unique_ptr<HttpCall> call;
    size_t server = 0;
    int64_t load = 0;
    LineSplitter lines;
    size_t seen = 0;  // tokens of this stream
    std::string finish_reason;
    Time heard{};
    int64_t failures = 0;  // in turn, without a token
  };
  struct Request {
    GenerationRequest asked;
    std::vector<int32_t> stop_tokens;
    std::vector<Sample> samples;
    size_t num_ended = 0;
  };
  struct Place {
    uint64_t request;
    size_t sample;
  };

  Sample& at(const Place& place) { return requests_.at(place.request).samples[place.sample]; }
  std::unique_ptr<HttpCall> call_of(const Server& server) const;
  void connect(Server& server);
  void begin_waiting();
  std::optional<size_t> server_for(const std::vector<int32_t>& ids);
  void begin(const Place& place, size_t server);
  void listen(int wait_milliseconds);
  // False: the sample has left its server.
  bool hear(const Place& place);
  void take_lines(const Place& place, const std::string& text);
  void append(const Place& place, const ServerToken& token);
  void end(const Place& place, FinishReason reason);
  void leave_server(Sample& sample);
  void fail(const Place& place, const std::string& message);
  void lose(Server& server, const std::string& message);
  void bring_back();
  void interrupt();
  void publish(const Model& model);
  void compare(Server& server, const Model& model);
  std::string troubles() const;

  const ServerEngineOptions options_;
  const ServerApi& api_;
  std::vector<Server> servers_;
  std::unordered_map<uint64_t, Request> requests_, parked_;
  std::deque<Place> waiting_, parked_waiting_;
  std::vector<Place> running_;
  std::vector<GenerationResult> finished_, parked_finished_;
  std::unordered_map<uint64_t, size_t> server_of_prefix_;  // by the hash of the first 64, 128, ... tokens
  std::filesystem::path weights_;                          // what the servers have loaded; empty: nothing
  int32_t version_ = 0;
  bool paused_ = false;
  int64_t num_owed_ = 0;
  uint64_t num_calls_ = 0;
  std::optional<Time> none_since_;  // when the last server was lost
  EngineStatistics statistics_;
};

}  // namespace bough
