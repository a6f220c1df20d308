// Drives an engine: takes tasks while there is room, submits them, steps the engine, hands finished groups
// out as trajectories. Training, evaluation and `bough rollout` all generate through it. It knows the engine
// by its interface (rollout/engine.h) and text by TextCodec: no model, no torch.
//
//   next_task() ─▶ TextCodec ─▶ Engine::submit ─▶ Engine::step ─▶ TextCodec ─▶ out by step() ─▶ score()
//        ▲                                                                       ▲
//   StalenessGate::try_start()                   hand_in(): groups made elsewhere (an endpoint's sessions)
//
// Threads: one drives, and all is computed on it: step(), collect(), score(), abandon() come from one thread
// at a time. hand_in() may come from any; it takes the lock of the inbox, which nobody holds while calling
// anything. Who blocks: step() for one pass of the engine, score() for the reward function.
//
// A group's life: its slot is taken at the gate; it runs; when step() hands it out the gate has accepted it.
// A group that comes to nothing (abandon(), a prompt that cannot be asked) gives its slot back.
#pragma once

#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/replay_buffer.h"
#include "data/problems.h"
#include "env/reward.h"
#include "rollout/engine.h"

namespace bough {

struct EncodedPrompt {
  std::string text;  // as the model sees it
  std::vector<int32_t> ids;
};

// Between problems and texts, which people and rewards read, and the model's tokens (prompt_encoder.h).
class TextCodec {
 public:
  virtual ~TextCodec() = default;
  virtual EncodedPrompt encode(const Problem& problem) const = 0;
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
};

// Text of a generated sample: without its stop token, and without the stop string that ended it and what
// follows.
std::string completion_text(const TextCodec& codec, const GeneratedSample& sample,
                            const std::vector<std::string>& stop_strings);

// A group to generate.
struct GroupTask {
  uint64_t id = 0;   // of the request: below 2^44, no two in flight; what is drawn is a function of it
  std::string name;  // Trajectory::group
  const Problem* problem = nullptr;  // what is asked and scored; must live until the group is scored
  std::vector<int32_t> prompt_ids;   // where there is no problem: what is asked
};

struct GeneratorOptions {
  SamplingParameters sampling;
  uint64_t seed = 0;
  // Tasks are taken while fewer samples than this are in flight.
  int64_t samples_in_flight = std::numeric_limits<int64_t>::max();
  bool all_logprobs = false;  // raw_logprobs and truncated_logprobs too (rollouts.h)
};

struct GeneratorParts {
  Engine& engine;                    // used by nobody else while groups are in flight
  const TextCodec* codec = nullptr;  // needed by tasks with problems
  RewardFunction* reward = nullptr;  // needed by score()
  StalenessGate* gate = nullptr;     // none: every task may begin
};

struct CollectOptions {
  std::function<bool()> stop;                                    // looked at between steps of the engine
  std::function<void(int64_t done, int64_t total)> on_progress;  // after each group
  std::function<void()> on_step;                                 // after each step of the engine
};

class Generator {
 public:
  // nullopt: there is none, for now.
  using TaskSource = std::function<std::optional<GroupTask>()>;
  // All parts must outlive the generator.
  Generator(const GeneratorParts& parts, TaskSource next_task, GeneratorOptions options);

  // Begins what may be begun, one step of the engine; the groups that finished, in that order, then those
  // handed in. Not scored. What the codec or the engine refuses is thrown, the groups in flight go on.
  std::vector<FinishedGroup> step();

  // Steps until `count` groups have finished, and returns them in order of their ids, not scored. nullopt:
  // stop() said so. Then, and before an error is passed on, everything in flight is abandoned.
  std::optional<std::vector<FinishedGroup>> collect(int64_t count, const CollectOptions& options);

  // Fills in the rewards of those that have problems, by one call of the reward function: as many groups at a
  // time as the caller likes, a group as it finishes or a batch. A sample whose reward could not be had, and
  // that nothing stands in for, is not valid afterwards.
  void score(std::span<FinishedGroup> groups);

  // A group that was made elsewhere, its slot taken at the gate. The next step() hands it out.
  void hand_in(FinishedGroup group);

  // Ends everything in flight; nothing of it is handed out. Leaves the engine idle.
  void abandon();

  // False: no task begins until it is true again.
  void set_admitting(bool admits) { admits_ = admits; }

  bool idle() const;  // nothing is in flight or waits to be handed out
  int64_t samples_in_flight() const { return samples_in_flight_; }
  void check_integrity() const;

 private:
  struct InFlight {
    GroupTask task;
    std::string prompt;  // text
  };
  void begin_tasks();
  bool begin_task();
  FinishedGroup finish(const GenerationResult& result);

  const GeneratorParts parts_;
  const TaskSource next_task_;
  const GeneratorOptions options_;
  std::unordered_map<uint64_t, InFlight> in_flight_;  // by id
  int64_t samples_in_flight_ = 0;
  bool admits_ = true;
  mutable std::mutex inbox_mutex_;  // of inbox_
  std::vector<FinishedGroup> inbox_;
};

// The problems of a data set as tasks, once each; ids are their indices.
Generator::TaskSource tasks_of(const Dataset& dataset);

}  // namespace bough
