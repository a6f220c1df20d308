// The inference servers of a ServerEngine, their weights, and the choice of a sample's server.
//
// A sample goes to the server that last got the longest prefix of its tokens, because that server has the
// prefix's keys and values. If that server has far more load than the least loaded server, the sample goes to
// the least loaded server.
//
// Weights are sent as files:
// - write() writes a model directory, which the servers must see under the same path.
// - publish() makes the servers load it and drop their keys and values. It returns when all servers have it.
// - Each server samples a few tokens. Their log-probabilities are compared with those of the trainer's model.
//   A server with other weights, or with log-probabilities of another temperature, is refused.
// A server that could not be reached gets the weights again before it gets a sample.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"
#include "engine/server_api.h"
#include "engine/server_steps.h"
#include "engine/settings.h"
#include "net/http_client.h"

namespace bough {

// The most bytes of a sample's event stream, and of one event: the experts of all tokens are one line.
inline constexpr uint64_t kStreamBytes = uint64_t{1} << 32;

struct ServerEngineOptions {
  std::string backend;  // name for server_api()
  ServerSettings settings;
  std::string api_key;  // empty: none is sent
  int64_t max_concurrent = 128;
  ModelLimits limits;
  std::vector<int32_t> stop_tokens;                 // of the model
  std::function<std::string(int32_t)> token_bytes;  // as in EmbeddedEngineOptions
  std::filesystem::path weights_folder;             // for directories v0, v1, ...: one at a time
  // Writes the model as a directory that servers can load.
  std::function<void(const std::filesystem::path&, const Model&)> write_weights;
  std::optional<ExpertLayout> experts;  // nullopt: the experts of samples are not recorded
  // Returns log softmax(logits / temperature) of each token from index `begin` on, by the model. Tokens with
  // a row in `routed` use its experts. If empty, servers' log-probabilities are not checked.
  std::function<std::vector<double>(const Model&, const std::vector<int32_t>& ids, size_t begin,
                                    double temperature, const RoutedExperts& routed)>
      score;
};

struct FleetServer {
  std::string name;  // as in the settings
  HttpUrl url;
  HttpAddress address;
  ServerDescription description;
  int64_t load = 0;  // sum over its samples of the largest possible length, in tokens
  bool has_weights = false;
  std::chrono::steady_clock::time_point not_before{};  // earliest next attempt to bring it back
  double pause_seconds = 0;
  std::string trouble;                 // why it has no weights
  std::unique_ptr<ServerSteps> steps;  // calls that bring it back; nullptr: none in progress
  // Opened before the server loads weights. If it is closed, another process may have the server's address.
  std::unique_ptr<IdleConnection> process;
};

class ServerFleet {
 public:
  // Removes weights that a killed run has left, and waits for the servers. `options` must outlive the fleet.
  // Throws UserError if there are no addresses or a server is not of the backend. Throws IoError if a server
  // does not answer in time.
  explicit ServerFleet(const ServerEngineOptions& options);
  ~ServerFleet();  // removes the weights
  ServerFleet(const ServerFleet&) = delete;
  ServerFleet& operator=(const ServerFleet&) = delete;

  const FleetServer& server(size_t index) const { return servers_[index]; }
  std::unique_ptr<HttpCall> call_to(const FleetServer& server) const;
  uint64_t new_call_number() { return ++num_calls_; }

  // Returns the server for a sample that continues `ids`. nullopt: no server has the weights. Loses servers
  // without samples that have restarted since they loaded the weights. If a server with samples restarts, its
  // streams break.
  std::optional<size_t> server_for(const std::vector<int32_t>& ids);
  void add_load(size_t index, int64_t tokens) { servers_[index].load += tokens; }
  // Takes a server out of use until bring_back() has given it the weights again. Returns false if it was out
  // of use already.
  bool lose(size_t index, const std::string& message);
  // Works on the return of lost servers. Does not block. Throws IoError if no server has been usable for
  // timeout_seconds.
  void bring_back();

  // The command that starts a suitable server, for error messages.
  std::string how_to_start() const { return api_.how_to_start(options_.experts.has_value()); }
  int32_t version() const { return version_; }  // of the published weights
  bool has_weights(int32_t version) const { return !weights_.empty() && version == version_; }
  // Writes the model's directory. The servers keep generating meanwhile.
  std::filesystem::path write(int32_t version, const Model& model) const;
  // Makes the servers load what write() has written, then removes the previous directory. Blocks. Throws
  // UserError if a server's log-probabilities are not the model's. Throws IoError if no server loaded the
  // weights.
  void publish(const std::filesystem::path& directory, int32_t version, const Model& model);

 private:
  using Time = std::chrono::steady_clock::time_point;

  void connect(FleetServer& server);
  void lose_restarted();
  void load_weights(const Model& model);
  struct Sampled {
    std::vector<int32_t> ids;  // prompt and response
    size_t prompt = 0;
    std::vector<double> logprobs;  // of the response
    RoutedExperts routed;
  };
  std::optional<Sampled> sample_some(size_t index);
  Sampled read_sampled(const FleetServer& server, const ServerRequest& asked, const std::string& body) const;
  void compare(size_t index, const Model& model);
  std::string troubles() const;

  const ServerEngineOptions& options_;
  const ServerApi& api_;
  std::vector<FleetServer> servers_;
  std::unordered_map<uint64_t, size_t> server_of_prefix_;  // key: hash of the first 64, 128, ... tokens
  std::filesystem::path weights_;                          // the directory that servers have loaded; or empty
  int32_t version_ = 0;
  uint64_t num_calls_ = 0;
  std::optional<Time> none_since_;  // since when no server is usable; nullopt: one is
};

}  // namespace bough
