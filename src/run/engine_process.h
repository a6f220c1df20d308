// The engine of a rank that only generates, in a process of its own.
//
//   rank 0 ═ commands, results ═▶ the rank: EngineProcess ── a socket ──▶ run_engine_process()
//   rank 0 ═ buckets of weights ▶ the rank: ReceivedWeights ── memory ──▶ MappedWeights
//
// The rank computes nothing, and holds no model and no device. So what ends an engine ends a process that
// another one replaces, and no rank: the kernel, where memory runs out; a fault of the device, after which a
// process can do nothing with it; what the engine throws. The new one gets the weights that the old one had,
// and all that it was asked for and had not answered: draws are a function of the request, so that what is
// lost is time. One that does not answer for kAnswerSeconds is ended, and replaced, too.
//
// Beyond kMostRestarts without a finished request in between, and for wrong input, the rank ends.
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
// Half of what rank 0 waits for a round, of which a new process may take a part to load its model.
inline constexpr double kAnswerSeconds = 300;

class EngineProcess {
 public:
  // command: what starts a process that calls run_engine_process(); command[0] is a path. job: what it makes
  // its engine of. ranks: whom the engine works for; publication: those who get weights. Both must outlive
  // it. Construct it, and answer, on one thread. UserError, and IoError where no process comes to life.
  EngineProcess(std::vector<std::string> command, Json job, Communicator& ranks,
                PublicationRanks& publication, double answer_seconds = kAnswerSeconds);

  // On a thread of its own, beside answer(), until rank 0 ends.
  void receive_weights() { weights_->receive(); }

  // Of a message of rank 0's (engine_messages.h). The reply says `restarts` until now, and `why` of the last.
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
  std::unique_ptr<WorkerProcess> process_;  // null: it has ended
  std::string heard_;                       // of its next message

  std::vector<Asked> asked_, parked_;  // in flight, in the order in which they came
  bool is_paused_ = false, is_parked_ = false;
  EngineStatistics last_, lost_;  // of the process that is, and of those before it
  int64_t num_restarts_ = 0, in_a_row_ = 0;
  std::string why_;
};

// The process's: serves what it is told to by who started it, until that closes the socket, which stdin is.
// with_engine makes the engine of a job and calls serve with it, the model that it generates with, and what
// MappedWeights wants to know. Where memory runs out the kernel ends this process before others.
using ServeEngine = std::function<void(Engine& engine, Model& model, bool in_place, Changing changing)>;
void run_engine_process(const std::function<void(const Json& job, const ServeEngine& serve)>& with_engine);

}  // namespace bough
