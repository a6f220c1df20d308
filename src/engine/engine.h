// Interface of generation engines: requests in, finished groups of samples out. The embedded engine
// (embedded_engine.h) shares the trainer's process and weights. Engines behind HTTP implement the same
// interface.
//
// A request's life: submit() checks and queues it. Each step() may admit waiting requests, advances every
// running sample by one token, and returns the requests whose samples have all ended. Results come in the
// order in which requests finish.
//
// Threads: all calls come from one thread at a time, and an engine owns no thread. step() blocks for one pass
// of the model. drain() and generate() block until no request is in flight. Other calls return at once,
// except where an engine says otherwise.
//
// - update_weights() passes new weights to the engine, or tells it that the weights of its model have
//   changed. Running samples keep their tokens, each with its log-probabilities and the version that sampled
//   it. Their keys and values are recomputed, and they continue under the new weights.
// - cancel() ends a request's unfinished samples, with finish reason `cancelled`. The next step() returns the
//   request.
// - pause(): steps compute nothing until resume(), and still return cancelled requests. Keys and values stay.
// - park() sets all requests in flight aside, so that the engine can serve other requests as if it were idle.
//   unpark() continues the parked requests, with keys and values recomputed.
// - A request's on_token is called inside step() for each token, before the request is returned.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "data/trajectory.h"
#include "engine/settings.h"

namespace bough {

enum class FinishReason { kStop, kLength, kStopString, kCancelled };
const char* finish_reason_name(FinishReason reason);  // stop, length, stop_string, cancelled

// One sampled token. If its sample is cancelled, no token of the sample has is_last.
struct StreamedToken {
  uint64_t id = 0;       // of the request
  int64_t sample = 0;    // of the request's n_samples
  int64_t position = 0;  // in the response
  int32_t token = 0;
  double logprob = 0, raw_logprob = 0, sampling_logprob = 0;  // as in GeneratedSample
  int32_t version = 0;
  bool is_last = false;
  std::vector<int32_t> top_ids;  // as in GeneratedSample
  std::vector<float> top_logprobs;
};

// Each vector has one entry per generated token. A stop token is the last token of its sample. A stop string
// ends the sample with the token that completes it.
struct GeneratedSample {
  std::vector<int32_t> token_ids;
  // log softmax(logits / temperature) of each token, before penalties, top_k, top_p, min_p and
  // min_new_tokens. Temperature 0 counts as 1 here.
  std::vector<double> logprobs;
  std::vector<double> raw_logprobs;       // log softmax(logits)
  std::vector<double> sampling_logprobs;  // after penalties, top_k, top_p, min_p and min_new_tokens
  std::vector<int32_t> versions;          // of the weights that sampled the token
  // With sampling.top_logprobs: the most likely tokens at each position, and their log-probabilities as in
  // `logprobs`; else empty.
  std::vector<std::vector<int32_t>> top_ids;
  std::vector<std::vector<float>> top_logprobs;
  // Set when the sample has ended, if rollout.sparse.replay is on: the pages that the sampled tokens of
  // prompt and response attended to when their keys and values were last computed. Positions count from the
  // start of the prompt.
  PageChoices page_choices;
  // If the engine records the experts of a mixture: of all tokens of prompt and response but the last.
  RoutedExperts routed_experts;
  FinishReason finish_reason = FinishReason::kLength;
};

// A sample that has started, with its tokens so far.
struct PartialRollout {
  GeneratedSample sample;  // finish_reason is valid only if has_ended
  bool has_ended = false;
};

struct GenerationRequest {
  // Chosen by the caller, below 2^44, unique among the requests in flight. A sampled token is a function of
  // (seed, id, sample, position) and the logits. It does not depend on other requests, the order of
  // submission or a restart.
  uint64_t id = 0;
  std::vector<int32_t> prompt_ids;  // at least one token
  // 1 for each prompt token that the policy sampled, in earlier turns. May be shorter than the prompt or
  // empty: the missing entries are 0. With sparse attention, these tokens attend to their selected blocks
  // when the prompt is computed. The other prompt tokens attend to everything.
  std::vector<uint8_t> sampled;
  SamplingParameters sampling;
  uint64_t seed = 0;
  std::optional<uint64_t> sequence;  // replaces the id as the key of random numbers; below 2^44
  std::string adapter;               // name of the policy (adapter_engines.h); empty: the base
  Json metadata;                     // returned unchanged
  // The request's first samples, with the tokens that another process has generated (Engine::running()).
  // Generation continues after these tokens.
  std::vector<PartialRollout> partial;
  // Called with each token when it is sampled. Must not call the engine. If it throws, step() rethrows, and
  // the engine must not be used any more.
  std::function<void(const StreamedToken&)> on_token;
};

struct RunningRequest {
  uint64_t id = 0;
  std::vector<PartialRollout> samples;  // those that have started: always the first ones
};

struct GenerationResult {
  uint64_t id = 0;
  std::vector<int32_t> prompt_ids;
  double temperature = 1.0;              // of the log-probabilities: 1 if the request's was 0
  std::vector<GeneratedSample> samples;  // n_samples of them, in order
  Json metadata;
};

class Model;  // models/model.h, which includes torch

// New weights for generation.
struct WeightUpdate {
  int32_t version = 0;
  // A model that has these weights until update_weights() returns. An engine with its own weights copies
  // them. nullptr only if other processes have the models (published_weights.h).
  const Model* model = nullptr;
};

// Carries weights from a trainer to an engine, which may compute while the next weights are trained.
class WeightChannel {
 public:
  virtual ~WeightChannel() = default;
  // Publishes the current weights. Called on the trainer's thread. Replaces a publication that was not taken.
  // Does not wait for passes of the engine.
  virtual void publish(int32_t version) = 0;
  // Returns the last publication, if there is a new one. Called on the engine's thread, between two passes.
  // When it returns, the engine's model has these weights. Never waits: returns nullopt while a publication
  // is being written.
  virtual std::optional<WeightUpdate> take() = 0;
  virtual bool has_new() const = 0;  // callable from any thread
};

// For a trainer and an engine that share one model and never compute at the same time. Nothing is copied.
class SharedWeights final : public WeightChannel {
 public:
  explicit SharedWeights(const Model* model) : model_(model) {}
  void publish(int32_t version) override { new_.store(version); }
  std::optional<WeightUpdate> take() override {
    const int32_t version = new_.exchange(-1);
    if (version < 0) return std::nullopt;
    return WeightUpdate{.version = version, .model = model_};
  }
  bool has_new() const override { return new_.load() >= 0; }

 private:
  const Model* model_;
  std::atomic<int32_t> new_ = -1;
};

struct EngineStatistics {
  int64_t new_tokens = 0;         // sampled
  int64_t prefill_tokens = 0;     // computed to fill keys and values, recomputation included
  int64_t recomputed_tokens = 0;  // part of prefill_tokens: of samples that were preempted
  int64_t cached_tokens = 0;      // prompt tokens that had been computed for another request
  int64_t preemptions = 0;        // samples preempted because memory ran out
  int64_t steps = 0;
  double seconds = 0;  // inside step()
  // Under sparse attention, in one sparse layer: blocks that sampled tokens attended to, and all blocks of
  // their contexts.
  int64_t blocks_read = 0, blocks_in_context = 0;
  // If experts are recorded: tokens computed again with their recorded experts, and tokens whose record new
  // weights have made stale.
  int64_t replayed_experts = 0, rerouted_experts = 0;
};

inline EngineStatistics operator+(const EngineStatistics& a, const EngineStatistics& b) {
  return {a.new_tokens + b.new_tokens,
          a.prefill_tokens + b.prefill_tokens,
          a.recomputed_tokens + b.recomputed_tokens,
          a.cached_tokens + b.cached_tokens,
          a.preemptions + b.preemptions,
          a.steps + b.steps,
          a.seconds + b.seconds,
          a.blocks_read + b.blocks_read,
          a.blocks_in_context + b.blocks_in_context,
          a.replayed_experts + b.replayed_experts,
          a.rerouted_experts + b.rerouted_experts};
}

inline EngineStatistics operator-(const EngineStatistics& a, const EngineStatistics& b) {
  return {a.new_tokens - b.new_tokens,
          a.prefill_tokens - b.prefill_tokens,
          a.recomputed_tokens - b.recomputed_tokens,
          a.cached_tokens - b.cached_tokens,
          a.preemptions - b.preemptions,
          a.steps - b.steps,
          a.seconds - b.seconds,
          a.blocks_read - b.blocks_read,
          a.blocks_in_context - b.blocks_in_context,
          a.replayed_experts - b.replayed_experts,
          a.rerouted_experts - b.rerouted_experts};
}

class Engine {
 public:
  virtual ~Engine() = default;

  // Queues a request. If the request cannot be served (empty prompt, ids outside the vocabulary, longer than
  // the model's positions, ...), queues nothing and throws UserError.
  virtual void submit(GenerationRequest request) = 0;
  // Runs at most one pass and returns the requests that finished in it, possibly none.
  virtual std::vector<GenerationResult> step() = 0;
  virtual bool idle() const = 0;  // nothing is waiting, running or to be returned
  // Ends a request's unfinished samples. Returns false if no such request is in flight.
  virtual bool cancel(uint64_t id) = 0;
  virtual void pause() = 0;
  virtual void resume() = 0;
  virtual bool paused() const = 0;
  // Sets all requests in flight aside. park() must not be called again before unpark(). At unpark() the
  // engine must be idle.
  virtual void park() = 0;
  virtual void unpark() = 0;
  virtual void update_weights(const WeightUpdate& update) = 0;
  // False while samples and prompts that the last update interrupted are being recomputed. Faster updates
  // would keep a sample from ever getting its next token, or a long prompt from ever being complete.
  virtual bool ready_for_weights() const { return true; }
  virtual int32_t version() const = 0;
  // Returns the requests in flight and their progress, for a checkpoint. Parked requests are left out.
  virtual std::vector<RunningRequest> running() const { return {}; }
  virtual EngineStatistics statistics() const = 0;

  // Calls step() until idle(). Throws UserError if paused with requests in flight, which would never finish.
  std::vector<GenerationResult> drain();
  // Submits and drains. Returns results in the order of `requests`. Throws UserError if any request is
  // already in flight.
  std::vector<GenerationResult> generate(std::vector<GenerationRequest> requests);
};

// The limits of a model, against which an engine checks requests.
struct ModelLimits {
  int64_t vocab_size = 0;
  int64_t max_length = 0;         // tokens of prompt and response together
  std::string max_length_reason;  // the key of config.json that sets max_length
};

// Throws UserError if the request is wrong. The message names the request, the field, its value, and the
// remedy.
void check_request(const GenerationRequest& request, const ModelLimits& limits);

// A partial rollout as JSON, for checkpoints of the controller and for other processes.
Json partial_rollout_to_json(const PartialRollout& partial);
PartialRollout partial_rollout_from_json(const Json& json);

}  // namespace bough
