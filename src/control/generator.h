// Drives an engine: takes tasks while more samples may be in flight, submits them, steps the engine, and
// returns finished groups as trajectories. Training, evaluation and `bough rollout` all generate through it.
// This code uses only the interfaces Engine (engine/engine.h) and TextCodec: no model, no torch.
//
//   next_task() ─▶ TextCodec ─▶ Engine::submit ─▶ Engine::step ─▶ TextCodec ─▶ out by step() ─▶ score()
//
// With an environment a sample is a conversation (conversation.h). Each of its turns is a request of its own:
//
//   next_task() ─▶ Environment::begin ─▶ replies ─▶ Engine::submit ─▶ Engine::step ─┬▶ out, if all ended
//                                          ▲                                        │
//                                          └─────────── Environment::step ◀─────────┘
//
// "replies" is the reply queue of the environment (ReplyQueue). Only the environment runs on other threads
// than the caller's. step() blocks for one pass of the engine. If no sample can be generated, step() waits
// for the first answer of an environment, at most a few milliseconds.
//
// In rounds (GeneratorOptions::in_rounds), answers are taken only when the engine has nothing left to
// generate and all answers have come, in the order of tasks and samples. So which samples the engine computes
// together is a function of the seed, and not of how long tools take.
#pragma once

#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/conversation.h"
#include "data/problems.h"
#include "data/trajectory.h"
#include "engine/engine.h"
#include "env/environment.h"
#include "env/reward.h"

namespace bough {

struct EncodedPrompt {
  std::string text;  // as the model sees it
  std::vector<int32_t> ids;
};

// Converts between problems, texts for people and rewards, and the model's tokens (prompt_encoder.h).
class TextCodec {
 public:
  virtual ~TextCodec() = default;
  virtual EncodedPrompt encode(const Problem& problem) const = 0;
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
};

// Returns the text of a generated sample without its stop token. If the sample ended with a stop string, the
// text ends before that string.
std::string completion_text(const TextCodec& codec, const GeneratedSample& sample,
                            const std::vector<std::string>& stop_strings);

// All samples of one prompt, each of which has ended.
struct FinishedGroup {
  uint64_t id = 0;                   // of the task
  const Problem* problem = nullptr;  // nullptr: a plain prompt, which is never scored
  std::vector<Trajectory> samples;
};

// Returns one result per row of the groups that have a problem, in order, by one call of the reward function.
// Groups without a problem get no results. A conversation keeps the reward that its environment gave. If the
// environment gave none, the reward function scores its last turn. The rows of one conversation have the same
// reward.
std::vector<RewardResult> score(std::span<const FinishedGroup> groups, RewardFunction& reward);

// A group to generate.
struct GroupTask {
  uint64_t id = 0;   // of the request: below 2^44, unique in flight; key of its samples' random numbers
  std::string name;  // Trajectory::group
  const Problem* problem = nullptr;     // what is asked and scored; must live until the group is scored
  std::vector<int32_t> prompt_ids;      // the prompt, if there is no problem
  std::vector<PartialRollout> partial;  // partial rollouts of another process
};

struct GeneratorOptions {
  SamplingParameters sampling;
  uint64_t seed = 0;
  // Tasks are taken while fewer samples than this are in flight.
  int64_t samples_in_flight = std::numeric_limits<int64_t>::max();
  bool all_logprobs = false;  // with the columns raw_logprobs and truncated_logprobs (rollouts.h)
  bool in_rounds = false;     // takes conversations' answers in rounds (head of this file)
  // Also generates one greedily sampled response of each task, in addition to its samples, as the last one of
  // the group (Trajectory::baseline).
  bool with_baseline = false;
};

struct GeneratorParts {
  Engine& engine;                    // used by nobody else while groups are in flight
  const TextCodec* codec = nullptr;  // needed by tasks with problems
  // Both are set or both are nullptr. If set, samples of tasks with problems are conversations.
  Environment* environment = nullptr;
  const ConversationFormat* format = nullptr;
};

struct CollectOptions {
  std::function<bool()> stop;                                    // checked between calls of Engine::step()
  std::function<void(int64_t done, int64_t total)> on_progress;  // after each group
  std::function<void()> on_step;                                 // after each Engine::step()
};

class TaskSource {
 public:
  virtual ~TaskSource() = default;
  virtual std::optional<GroupTask> next() = 0;  // nullopt: there is no task now
};

// The problems of a data set as tasks, once each; ids are their indices. `dataset` must outlive this object.
class DatasetTasks final : public TaskSource {
 public:
  explicit DatasetTasks(const Dataset& dataset) : dataset_(dataset) {}
  std::optional<GroupTask> next() override;

 private:
  const Dataset& dataset_;
  size_t next_ = 0;
};

class Generator {
 public:
  // All parts and `tasks` must outlive the generator.
  Generator(const GeneratorParts& parts, TaskSource& tasks, GeneratorOptions options);

  // Starts tasks while more samples may be in flight, runs one Engine::step(), and returns the groups that
  // finished, in the order of finishing, not scored. Rethrows exceptions of the codec and the engine; the
  // groups in flight continue.
  std::vector<FinishedGroup> step();

  // Calls step() until `count` groups have finished, and returns them in order of their ids, not scored.
  // Returns nullopt if stop() returned true. Then, and before an exception is rethrown, calls abandon().
  std::optional<std::vector<FinishedGroup>> collect(int64_t count, const CollectOptions& options);

  // Cancels all groups in flight and discards their samples. Leaves the engine idle.
  void abandon();

  bool idle() const { return in_flight_.empty(); }
  int64_t num_awaiting_environment() const { return static_cast<int64_t>(episodes_.size()); }
  int64_t samples_in_flight() const { return samples_in_flight_; }
  void check_integrity() const;

 private:
  struct ConversationKey {  // a conversation
    uint64_t group = 0;
    size_t sample = 0;
    auto operator<=>(const ConversationKey&) const = default;
  };
  struct InFlight {
    GroupTask task;
    std::string prompt;  // text
    std::vector<ConversationRun> conversations;
    std::vector<std::optional<uint64_t>> episodes;  // of the conversations; nullopt: not opened
    int64_t num_ended = 0;
    std::optional<GenerationResult> samples, baseline;  // kept until both are there
  };
  void begin_tasks();
  bool begin_task();
  void begin_conversations(GroupTask task);
  void open_conversations();
  std::optional<FinishedGroup> finish(GenerationResult result);
  FinishedGroup finish(const InFlight& group);
  FinishedGroup finish_conversations(uint64_t id);
  void take_replies(std::vector<FinishedGroup>& finished);
  void go_on(const ConversationKey& place, std::vector<FinishedGroup>& finished);
  uint64_t request_id(const ConversationKey& place) const;
  // A task's baseline comes after its samples.
  bool is_baseline(const ConversationKey& place) const {
    return place.sample >= static_cast<size_t>(options_.sampling.n_samples);
  }
  int64_t samples_of_task() const { return options_.sampling.n_samples + options_.with_baseline; }

  const GeneratorParts parts_;
  TaskSource& tasks_;
  const GeneratorOptions options_;
  std::unordered_map<uint64_t, InFlight> in_flight_;  // by id
  int64_t samples_in_flight_ = 0;
  std::shared_ptr<ReplyQueue> reply_queue_;
  std::deque<ConversationKey> unopened_;  // wait until the environment can open more
  int64_t num_open_ = 0;
  std::unordered_map<uint64_t, ConversationKey> episodes_;  // conversations that wait for their environment
  std::unordered_map<uint64_t, ConversationKey> requests_;  // conversations whose turn the engine generates
  std::vector<EpisodeReply> held_;                          // in rounds: replies, until all have come
};

}  // namespace bough
