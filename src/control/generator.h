// Drives an engine: takes tasks while there is room, submits them, steps the engine, hands finished groups
// out as trajectories. Training, evaluation and `bough rollout` all generate through it. It knows the engine
// by its interface (engine/engine.h) and text by TextCodec: no model, no torch.
//
//   next_task() ─▶ TextCodec ─▶ Engine::submit ─▶ Engine::step ─▶ TextCodec ─▶ out by step() ─▶ score()
//
// With an environment a sample is a conversation (conversation.h); each turn of it is a request of its own:
//
//   next_task() ─▶ Environment::begin ─▶ inbox ─▶ Engine::submit ─▶ Engine::step ─┬▶ out by step(), all ended
//                                          ▲                                      │
//                                          └────────── Environment::step ◀────────┘
//
// One thread drives, and all but the environment's work is computed on it. Who blocks: step() for one pass of
// the engine. It never waits for an environment while there is anything to generate; where there is not, for
// the first answer, a few milliseconds a step.
//
// In rounds (GeneratorOptions::in_rounds) answers are taken only when the engine has nothing left to generate
// and all of them have come, in the order of tasks and samples: what the engine computes beside what is then
// a function of the seed, not of how long tools take.
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

// Samples of one prompt, all ended.
struct FinishedGroup {
  uint64_t id = 0;                   // of the task
  const Problem* problem = nullptr;  // what was asked; none: a plain prompt, never scored
  std::vector<Trajectory> samples;
};

// The rewards of the samples of those groups that have problems, in order, by one call of the reward
// function. Conversations whose environment gave a reward have that one; of the others the reward function
// scores the last turn. Rows of one conversation have one reward.
std::vector<RewardResult> score(std::span<const FinishedGroup> groups, RewardFunction& reward);

// A group to generate.
struct GroupTask {
  uint64_t id = 0;   // of the request: below 2^44, no two in flight; what is drawn is a function of it
  std::string name;  // Trajectory::group
  const Problem* problem = nullptr;  // what is asked and scored; must live until the group is scored
  std::vector<int32_t> prompt_ids;   // where there is no problem: what is asked
  std::vector<BegunSample> begun;    // what another process generated of it
};

struct GeneratorOptions {
  SamplingParameters sampling;
  uint64_t seed = 0;
  // Tasks are taken while fewer samples than this are in flight.
  int64_t samples_in_flight = std::numeric_limits<int64_t>::max();
  bool all_logprobs = false;  // raw_logprobs and truncated_logprobs too (rollouts.h)
  bool in_rounds = false;     // of conversations
  // Beside the samples of a task its most likely response, the last of the group (Trajectory::baseline).
  bool with_baseline = false;
};

struct GeneratorParts {
  Engine& engine;                    // used by nobody else while groups are in flight
  const TextCodec* codec = nullptr;  // needed by tasks with problems
  // Both or none: samples of tasks with problems are conversations.
  Environment* environment = nullptr;
  const ConversationFormat* format = nullptr;
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

  // Begins what may be begun, one step of the engine; the groups that finished, in that order. Not scored.
  // What the codec or the engine refuses is thrown, the groups in flight go on.
  std::vector<FinishedGroup> step();

  // Steps until `count` groups have finished, and returns them in order of their ids, not scored. nullopt:
  // stop() said so. Then, and before an error is passed on, everything in flight is abandoned.
  std::optional<std::vector<FinishedGroup>> collect(int64_t count, const CollectOptions& options);

  // Ends everything in flight; nothing of it is handed out. Leaves the engine idle.
  void abandon();

  bool idle() const { return in_flight_.empty(); }
  int64_t num_awaiting_environment() const { return static_cast<int64_t>(episodes_.size()); }
  int64_t samples_in_flight() const { return samples_in_flight_; }
  void check_integrity() const;

 private:
  struct Place {  // of a conversation
    uint64_t group = 0;
    size_t sample = 0;
    auto operator<=>(const Place&) const = default;
  };
  struct InFlight {
    GroupTask task;
    std::string prompt;  // text
    std::vector<ConversationRun> conversations;
    std::vector<std::optional<uint64_t>> episodes;  // theirs, of those that have been opened
    int64_t num_ended = 0;
    std::optional<GenerationResult> samples, baseline;  // until the other one is there
  };
  void begin_tasks();
  bool begin_task();
  void begin_conversations(GroupTask task);
  void open_conversations();
  std::optional<FinishedGroup> finish(GenerationResult result);
  FinishedGroup finish(const InFlight& group);
  FinishedGroup finish_conversations(uint64_t id);
  void take_replies(std::vector<FinishedGroup>& finished);
  void go_on(const Place& place, std::vector<FinishedGroup>& finished);
  uint64_t request_id(const Place& place) const;
  // Of a task: the baseline comes after the samples.
  bool is_baseline(const Place& place) const {
    return place.sample >= static_cast<size_t>(options_.sampling.n_samples);
  }
  int64_t samples_of_task() const { return options_.sampling.n_samples + options_.with_baseline; }

  const GeneratorParts parts_;
  const TaskSource next_task_;
  const GeneratorOptions options_;
  std::unordered_map<uint64_t, InFlight> in_flight_;  // by id
  int64_t samples_in_flight_ = 0;
  std::shared_ptr<EpisodeInbox> inbox_;
  std::deque<Place> unopened_;  // the environment has no room for more
  int64_t num_open_ = 0;
  std::unordered_map<uint64_t, Place> episodes_;  // whose environment computes
  std::unordered_map<uint64_t, Place> requests_;  // of conversations, that the engine has
  std::vector<EpisodeReply> held_;                // in rounds: until all have come
};

// The problems of a data set as tasks, once each; ids are their indices.
Generator::TaskSource tasks_of(const Dataset& dataset);

}  // namespace bough
