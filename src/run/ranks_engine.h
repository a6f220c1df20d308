// Generation by several ranks of a run: rank 0 distributes requests over the engines of the ranks. There are
// two modes:
// - Every rank trains and has an engine that uses the rank's own weights. No weights are sent to engines.
// - Some ranks only generate (rollout.ranks). Rank 0 has no engine, and weights are published to the engine
//   ranks (rollout/published_weights.h).
//
//   rank 0: Generator ─▶ RanksEngine ─┬─▶ its own engine, if it has one
//                                     └─▶ commands, results (a communicator of their own) ─▶ serve_engine()
//
// Generation runs in rounds. Rank 0 sends the commands since the last round. Every rank executes them and
// then makes kPasses passes, or fewer if its engine becomes idle. Finished requests come back in rank order.
// If only rank 0 has requests, there is no round. Requests with one prompt go to one rank, and so do the
// turns of one conversation, so that each finds its prefix's keys and values. A new prompt goes to the rank
// with the fewest samples. So the distribution is a function of the requests alone, not of time.
// Weights: a training rank's engine takes the weights of its own trainer once that trainer has the version
// that rank 0 has taken, or a newer one. Each token carries the version that sampled it. Engine ranks take a
// publication in a round without a pass. By then the publication has arrived on every host.
// A rank that only generates has its engine in a process of its own (engine_process.h). If that process dies
// or throws, only the time of its requests is lost.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "comm/communicator.h"
#include "engine/engine.h"
#include "models/config.h"

namespace bough {

class RanksEngine final : public Engine {
 public:
  // Rank 0's side. own: rank 0's engine; nullptr if rank 0 does not generate. config: of the model that
  // generates. ranks: a communicator that only this engine uses. `own` and `ranks` must outlive this object.
  RanksEngine(Engine* own, const ModelConfig& config, Communicator& ranks);

  void submit(GenerationRequest request) override;
  std::vector<GenerationResult> step() override;
  bool idle() const override;
  bool cancel(uint64_t id) override;
  void pause() override;
  void resume() override;
  bool paused() const override { return own_.paused(); }
  void park() override;
  void unpark() override;
  void update_weights(const WeightUpdate& update) override;
  void sample_from(SampledPolicy policy) override;
  bool ready_for_weights() const override;
  int32_t version() const override { return own_.version(); }
  std::vector<RunningRequest> running() const override;
  EngineStatistics statistics() const override;  // sum over all ranks; seconds: in step() here

  void end();  // the other ranks' serve_engine() returns

  // Callable from any thread. The longest time in seconds, since the last call, that engine ranks made no
  // pass because they took weights; and the number of engine restarts so far.
  double take_longest_exchange() { return longest_exchange_.exchange(0); }
  int64_t num_restarts() const { return num_restarts_.load(); }

 private:
  struct RequestPlace {
    size_t rank = 0;
    int64_t samples = 0;
    std::function<void(const StreamedToken&)> on_token;  // if on another rank: called at the end
  };
  // From the last reply of a rank.
  struct Report {
    bool ready_for_weights = true;
    EngineStatistics statistics;
    int64_t restarts = 0;
  };
  struct Round {
    std::vector<GenerationResult> results;
    std::vector<RunningRequest> running;
  };
  size_t place(const GenerationRequest& request);
  void tell_all(const Json& command);
  Round round(int64_t passes, bool asks_running);
  bool others_have_work() const;
  bool has_own() const { return !none_; }

  const std::unique_ptr<Engine> none_;  // own_ refers to it if rank 0 has no engine
  Engine& own_;
  const ModelLimits limits_;
  Communicator& ranks_;
  std::vector<Json> commands_;  // by rank: commands since the last round
  std::unordered_map<uint64_t, RequestPlace> in_flight_, parked_;
  std::unordered_map<uint64_t, size_t> rank_of_request_;    // since the last update of the weights
  std::unordered_map<std::string, size_t> rank_of_prompt_;  // since that update
  std::vector<int64_t> samples_;                            // in flight, by rank
  std::vector<Report> reports_;
  double seconds_ = 0;
  std::atomic<double> longest_exchange_ = 0;
  std::atomic<int64_t> num_restarts_ = 0;
};

// The other ranks' side: executes the commands of rank 0's engine until rank 0 ends. A rank that also trains
// takes weights from `weights` when told to. Rethrows what its engine throws.
void serve_engine(Engine& engine, WeightChannel& weights, Communicator& ranks);
class EngineProcess;
void serve_engine(EngineProcess& engine, Communicator& ranks);

}  // namespace bough
