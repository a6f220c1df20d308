// The processes (ranks) of a run: who trains, who generates, and what rank 0 and the other ranks send each
// other. Rank 0 drives the run (run.h). The other ranks are in follow_rank_zero() until rank 0 ends the run.
//
//   rollout.ranks 0   Every rank trains. On a second thread it generates for rank 0's engine
//                     (ranks_engine.h).
//   rollout.ranks M   The last M ranks only generate, with weights that rank 0 publishes
//                     (published_weights.h).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/engine.h"
#include "report/metrics.h"
#include "rollout/published_weights.h"
#include "run/ranks_engine.h"
#include "run/run_components.h"
#include "run/run_settings.h"
#include "train/run_checkpoint.h"

namespace bough {

// Throws UserError if `num_ranks` processes cannot execute a run with these settings.
void check_ranks(const RunSettings& settings, int64_t num_ranks);

// The communicators of a run's processes. With rollout.ranks M the last M ranks only generate, and the others
// only train. The constructor is a collective call of all ranks.
struct RankGroups {
  RankGroups(Communicator* all_ranks, const RunSettings& settings);

  Communicator* const all;  // nullptr: one process
  Communicator* trainers;   // of the ranks that train; nullptr if this process trains alone or does not train
  bool is_engine = false;
  // `engines` (for requests) and `publication` (for weights) connect rank 0 with the ranks that generate for
  // it, and send host memory. A rank that trains without an engine does not use them. engines: nullptr if one
  // process or servers generate. publication: nullptr unless some ranks only generate.
  std::unique_ptr<Communicator> engines;
  std::unique_ptr<PublicationRanks> publication;

 private:
  std::unique_ptr<Communicator> of_side_;  // the ranks that train (NCCL between GPUs), or those that generate
};

// The engine and the weight channel of rank 0, which reach the engines of all ranks. With one process, or
// servers that generate, they are those of RunComponents.
class RankZero {
 public:
  // `groups` and `parts` must outlive this object.
  RankZero(RankGroups& groups, RunComponents& parts);

  int64_t num_ranks() const { return groups_.all ? groups_.all->size() : 1; }
  Engine& engine();
  WeightChannel& weights();
  void add_metrics(
      MetricValues& metrics);  // of publications to ranks that only generate, since the last call
  // Ends the other ranks, which wait for commands. Does nothing with one process.
  void end();
  // Call it after an exception. After that no call waits for other ranks.
  void give_up();

 private:
  RankGroups& groups_;
  RunComponents& parts_;
  std::unique_ptr<RanksEngine> ranks_engine_;            // nullptr: one rank, or servers generate
  std::unique_ptr<WeightChannel> ranks_weights_;         // if every rank has an engine
  std::unique_ptr<PublishedWeights> published_weights_;  // if some ranks only generate
  std::unique_ptr<WeightChannel> unsharded_weights_;     // if the trained model's layers are sharded
};

// A rank other than 0: trains, generates, or both, as rank 0 commands. Returns when rank 0 ends the run.
// command: see RunOptions::engine_command.
void follow_rank_zero(const RunSettings& settings, const std::vector<std::string>& command,
                      RankGroups& groups);

// Collective calls of the ranks that train: rank 0, which owns the folder, sends the run's last checkpoint.
// The other ranks see the same files.
void send_checkpoint(const std::optional<RunCheckpoint>& checkpoint, Communicator& ranks);
std::optional<RunCheckpoint> receive_checkpoint(Communicator& ranks);

// Runs `beside` on a new thread and `here` on the caller's thread. of_beside, of_here: the communicators that
// the two functions use. If one function throws, the abort checks of all these communicators end the other
// function, and the exception is rethrown.
void run_both(const std::function<void()>& beside, const std::vector<Communicator*>& of_beside,
              const std::function<void()>& here, const std::vector<Communicator*>& of_here);

}  // namespace bough
