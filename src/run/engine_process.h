// The engine of a rank that only generates, in a process of its own.
//
//   rank 0 ═ commands, results ═▶ the rank: EngineProcess ── a socket ──▶ run_engine_process()
//   rank 0 ═ buckets of weights ▶ the rank: ReceivedWeights ── memory ──▶ MappedWeights
//
// The rank computes nothing, and holds no model and no device. So a failure of the engine ends only the
// engine's process, which the rank replaces by a new one. Such failures are:
// - the kernel ends the process because memory ran out
// - a fault of the device, after which a process can no longer use it
// - an exception of the engine
// - no answer for kAnswerSeconds
// The new process gets the weights that the old one had, and all requests without an answer. Samples depend
// only on their request and the weights, so only time is lost.
//
// The rank ends after kMostRestarts restarts without a finished request in between, and on wrong input.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "comm/communicator.h"
#include "engine/engine.h"
#include "models/model.h"
#include "net/worker_process.h"
#include "rollout/copied_weights.h"
#include "rollout/published_weights.h"

namespace bough {

inline constexpr int64_t kMostRestarts = 3;
// Half of Communicator's default time limit, for which rank 0 waits for a reply. A new process needs part of
// the other half to load its model.
inline constexpr double kAnswerSeconds = 300;

class EngineProcess {
 public:
  // command: starts a process that calls run_engine_process(); command[0] is a path. job: describes the
  // engine that the process makes. ranks: rank 0 and the ranks that generate for it. publication: the ranks
  // that get weights. `ranks` and `publication` must outlive this object. The constructor and answer() must
  // be called on the same thread. Both throw UserError if the engine process reports wrong input, and IoError
  // after kMostRestarts restarts.
  EngineProcess(std::vector<std::string> command, Json job, Communicator& ranks,
                PublicationRanks& publication, double answer_seconds = kAnswerSeconds);

  // Runs on its own thread, in parallel with answer(), until rank 0 ends.
  void receive_weights() { weights_->receive(); }

  // Answers a message of rank 0 (engine_messages.h). The reply has the number of `restarts` so far, and `why`
  // the last process ended.
  Json answer(const Json& message);

 private:
  struct Asked {
    Json command;
    bool is_cancelled = false;
  };

  void note(const Json& command);
  Json ask(Json message);
  void start();
  Json all_commands() const;
  Json exchange(const Json& message, double within);
  [[noreturn]] void fail(std::chrono::milliseconds grace, const std::string& why);

  const std::vector<std::string> command_;
  const Json job_;
  Communicator& ranks_;
  PublicationRanks& publication_;
  const double answer_seconds_;
  std::unique_ptr<ReceivedWeights> weights_;
  std::unique_ptr<WorkerProcess> process_;  // nullptr: it has ended
  std::string heard_;                       // the received part of the process's next message

  std::vector<Asked> asked_, parked_;  // in flight, in order of arrival
  bool is_paused_ = false, is_parked_ = false;
  Json policy_;                   // the last command `policy`
  EngineStatistics last_, lost_;  // of the current process; of all earlier ones
  int64_t num_restarts_ = 0, in_a_row_ = 0;
  std::string why_;
};

// The engine's side: executes the commands of the process that started this one, until that process closes
// the socket, which is stdin. with_engine makes the engine of a job, and calls `serve` with this engine, its
// model, and the other arguments of MappedWeights. run_engine_process() also tells the kernel to end this
// process before others if memory runs out.
using ServeEngine = std::function<void(Engine& engine, Model& model, bool in_place, Changing changing)>;
void run_engine_process(const std::function<void(const Json& job, const ServeEngine& serve)>& with_engine);

}  // namespace bough
