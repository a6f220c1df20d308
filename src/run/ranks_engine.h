// Generation by several ranks of a run: rank 0 hands requests out to the engines that ranks embed. Either
// every rank trains and has one, over its own weights, so that none are sent for it; or some ranks have
// nothing but one (rollout.ranks), rank 0 has none, and weights are published to them
// (rollout/published_weights.h).
//
//   rank 0: Generator ─▶ RanksEngine ─┬─▶ its own engine, if it has one
//                                     └─▶ commands, results (a communicator of their own) ─▶ serve_engine()
//
// In rounds: rank 0 sends what was asked since the last round; every rank does it and then makes kPasses
// passes, or fewer where it has nothing left; finished requests come back in rank order. Requests of one
// prompt, and the turns of one conversation, are one rank's, so that each finds its prefix; a new prompt goes
// to the rank with the fewest samples. Where only rank 0 has work there is no round. So who computes what is
// a function of the requests alone, not of time.
//
// Weights: a rank's engine takes its own trainer's once they are of the version that rank 0 has taken, or
// newer: a trainer may be ahead, and tokens say which version drew them. Engine ranks take published ones,
// which have arrived, in a round without a pass.
//
// A rank that only generates has its engine in a process of its own (engine_process.h): one that dies or
// throws costs the time of its requests.
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
  // Rank 0's: its own engine, null where it has none, of a model of this shape, and the group, which is this
  // engine's alone. All must outlive it.
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
  bool ready_for_weights() const override;
  int32_t version() const override { return own_.version(); }
  std::vector<RunningRequest> running() const override;
  EngineStatistics statistics() const override;  // of all; seconds: of step() here

  void end();  // the other ranks' serve_engine() returns

  // From any thread. The longest time, since the last call, that engine ranks made no pass because they took
  // weights; engines made again so far.
  double take_longest_exchange() { return longest_exchange_.exchange(0); }
  int64_t num_restarts() const { return num_restarts_.load(); }

 private:
  struct Place {
    size_t rank = 0;
    int64_t samples = 0;
    std::function<void(const StreamedToken&)> on_token;  // gets another rank's tokens when all are there
  };
  // What a rank said last.
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

  const std::unique_ptr<Engine> none_;  // takes own_'s place where rank 0 has none
  Engine& own_;
  const ModelLimits limits_;
  Communicator& ranks_;
  std::vector<Json> commands_;  // by rank: told since the last round
  std::unordered_map<uint64_t, Place> in_flight_, parked_;
  std::unordered_map<uint64_t, size_t> rank_of_request_;    // since the last update of the weights
  std::unordered_map<std::string, size_t> rank_of_prompt_;  // since then
  std::vector<int64_t> samples_;                            // in flight, by rank
  std::vector<Report> reports_;
  double seconds_ = 0;
  std::atomic<double> longest_exchange_ = 0;
  std::atomic<int64_t> num_restarts_ = 0;
};

// Another rank's: does what rank 0's engine has it do, until that ends. One that trains, too, takes weights
// from `weights` where it is told to; what its engine throws is thrown here.
void serve_engine(Engine& engine, WeightChannel& weights, Communicator& ranks);
class EngineProcess;
void serve_engine(EngineProcess& engine, Communicator& ranks);

}  // namespace bough
