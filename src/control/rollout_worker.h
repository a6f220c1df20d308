// Generates and scores groups until they lie in the replay buffer, while a trainer takes them out. No torch.
//
//   trainer's thread             engine's thread                            reward threads
//
//   WeightChannel::publish ────▶ take ─▶ Engine::update_weights
//   (a copy; never waits)        Generator::step ── finished groups ──▶ queue ─▶ RewardFunction
//         │                        ▲  │ between two passes: new weights,            │
//         │                        │  ▼ suspension, stop                            ▼
//   wait_for(n groups) ◀───────────┼────────────── changed_ ◀──────────────── ReplayBuffer::put
//         └── takes them ──▶ trains│
//                           StalenessGate: its version is that of the weights which the engine holds
//
// Synchronous runs (own_thread false) drive the engine on the trainer's own thread, inside wait_for(): the
// same code, and nothing computes beside the trainer.
//
// Who waits for whom, for how long at most, and who wakes it:
//   trainer   in wait_for(), for groups: until there are enough; looks at `stop` every kPoll
//             in while_suspended(), for the engine's thread to stand: one pass of the engine
//   engine    where nothing is in flight and the gate is shut: for new weights or the end; kPoll
//   reward    for a group to score, or the end; inside the reward function as long as its own limits say
// changed_ wakes all three. One lock (mutex_) guards the queue and the flags. Nobody holds it while
// computing; the buffer's and the gate's are taken inside it, never the other way round. An error of any
// thread is thrown by the trainer's next call.
//
// A group is in one place at a time: in flight (Generator), waiting for its reward or being scored
// (num_awaiting_reward), in the buffer, taken; or it is dropped, and another may begin in its slot.
// check_integrity() counts them against the gate.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "control/generator.h"
#include "control/replay_buffer.h"

namespace bough {

struct RolloutWorkerParts {
  Engine& engine;  // used by nobody else but inside while_suspended()
  WeightChannel& weights;
  const TextCodec& codec;
  RewardFunction& reward;
  StalenessGate& gate;
  ReplayBuffer& buffer;
  const Clock& clock;
};

struct RolloutWorkerOptions {
  GeneratorOptions generation;
  bool own_thread = false;  // the engine is driven beside the trainer
  // Running samples go on under new weights as soon as these are published. False: they finish on the old
  // ones, and none begins until then.
  bool interruptible = true;
  int64_t reward_threads = 1;
  int64_t min_group = 2;                   // valid samples; a group with fewer is dropped
  int64_t max_consecutive_failures = 256;  // of rewards: so many in a row are an IoError
  std::function<void()> on_thread_start;   // on the engine's thread, before anything else
};

class RolloutWorker {
 public:
  using TaskSource = Generator::TaskSource;

  // All parts must outlive it. Threads begin at once; nothing is generated before the first publication.
  RolloutWorker(const RolloutWorkerParts& parts, TaskSource next_task, const RolloutWorkerOptions& options);
  ~RolloutWorker();  // ends its threads: after the engine's pass and the calls of the reward function
  RolloutWorker(const RolloutWorker&) = delete;
  RolloutWorker& operator=(const RolloutWorker&) = delete;

  // Everything below is for the trainer's thread.

  struct Waited {
    bool enough = false;          // false: `stop` said so
    Clock::Time generated_until;  // from when on only rewards were waited for
  };
  // Until `count` groups are in the buffer. Throws what another thread threw.
  Waited wait_for(int64_t count, const std::function<bool()>& stop,
                  const std::function<void(int64_t done)>& on_progress);

  // Weights were published: the engine takes them at its next pass; without a thread of its own, now.
  void weights_published();

  // Runs `work` while the engine computes nothing else: what is in flight keeps its tokens and waits, the
  // engine holds the weights published last. Rewards go on.
  void while_suspended(const std::function<void()>& work);

  // Without a thread of the engine's: ends what is in flight or waits to be scored, slots are given back. The
  // engine is idle then; what was being scored lies in the buffer.
  void abandon();

  struct Statistics {
    double idle_seconds = 0;          // of the engine's thread, waiting
    int64_t publications = 0;         // taken by the engine
    int64_t interrupted_samples = 0;  // that were running when weights were taken
    int64_t reward_failures = 0;      // of all samples that were scored
    int64_t dropped_groups = 0;       // with fewer than min_group valid samples
    int64_t num_awaiting_reward = 0;  // now
    EngineStatistics engine;          // as of its last pass, or the last suspension's end
  };
  Statistics statistics() const;
  // Ids of groups that were dropped since the last call.
  std::vector<uint64_t> take_dropped();
  void check_integrity() const;  // while nothing runs

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr auto kPoll = std::chrono::milliseconds(50);

  bool pump();
  void take_weights(bool now);
  void run_engine();
  void run_rewards();
  void fail(std::exception_ptr error);
  void keep_or_drop(FinishedGroup group);
  void rethrow(const Lock& lock) const;

  const RolloutWorkerParts parts_;
  const RolloutWorkerOptions options_;
  Generator generator_;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<FinishedGroup> unscored_;
  int64_t num_being_scored_ = 0;
  bool has_weights_ = false;   // a publication was taken
  bool wakes_engine_ = false;  // it has nothing to do, and weights were published
  bool wants_suspension_ = false, is_suspended_ = false, is_ending_ = false;
  std::exception_ptr error_;
  int64_t consecutive_failures_ = 0;
  std::vector<uint64_t> dropped_;
  Statistics statistics_;

  std::vector<std::thread> threads_;
};

}  // namespace bough
