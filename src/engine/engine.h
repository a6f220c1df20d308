// What generates: requests in, finished groups of samples out. The embedded engine (embedded_engine.h) shares
// the trainer's process and weights; engines behind HTTP implement the same interface.
//
// A request's life: submit() checks and queues it. Each step() may admit waiting requests, advances every
// running sample by one token, and returns the requests whose samples have all ended. The order of results is
// the order in which requests finish.
//
// Who blocks: step() for one pass of the model, drain() and generate() until nothing is left; nothing else.
// Who mutates: all calls come from one thread at a time; the engine owns no thread of its own. Weights:
// update_weights() brings others, or says that those an engine shares have changed. Samples in flight are not
// thrown away: they keep their tokens, each with the log-probabilities and the version that it was drawn
// with, and go on under the new weights, their keys and values recomputed. What an interrupted request
// returns: cancel() ends its unfinished samples where they stand, finish reason `cancelled`; the next step()
// returns the request. pause(): steps compute nothing until resume(), and still return what was cancelled;
// keys and values stay. park() puts everything in flight aside, so that the engine serves others as if it
// were idle; unpark() goes on with it, its keys and values recomputed.
//
// Tokens as they come: a request's on_token, called inside step() for each, before the request is returned.
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

// A token of a sample, as it was drawn; a cancelled sample has none that says it is the last.
struct StreamedToken {
  uint64_t id = 0;       // of the request
  int64_t sample = 0;    // of the request's n_samples
  int64_t position = 0;  // in the response
  int32_t token = 0;
  double logprob = 0, raw_logprob = 0, truncated_logprob = 0;  // as in GeneratedSample
  int32_t version = 0;
  bool is_last = false;
  std::vector<int32_t> top_ids;  // as in GeneratedSample
  std::vector<float> top_logprobs;
};

// A sample's vectors have one entry for each generated token. A stop token is the last token of its sample; a
// stop string ends the sample with the token that completed it.
struct GeneratedSample {
  std::vector<int32_t> token_ids;
  // log softmax(logits / temperature) of each token: before penalties, top-k, top-p, min-p and
  // min_new_tokens. Temperature 0 counts as 1 here.
  std::vector<double> logprobs;
  std::vector<double> raw_logprobs;        // log softmax(logits)
  std::vector<double> truncated_logprobs;  // of the distribution drawn from, after all of those
  std::vector<int32_t> versions;           // of the weights that drew the token
  // With sampling.top_logprobs: of each token the most likely ones at its position, and their
  // log-probabilities as in `logprobs`; else empty.
  std::vector<std::vector<int32_t>> top_ids;
  std::vector<std::vector<float>> top_logprobs;
  // Of a sample that has ended, with rollout.sparse.replay: what the drawn tokens of prompt and response
  // attended to when their keys and values were computed last; positions count from the prompt's begin.
  PageChoices page_choices;
  FinishReason finish_reason = FinishReason::kLength;
};

// A sample on its way.
struct BegunSample {
  GeneratedSample sample;  // finish_reason means something where it has ended
  bool has_ended = false;
};

struct GenerationRequest {
  // Chosen by the caller, below 2^44, unique among the requests in flight. Draws are a function of (seed, id,
  // sample, position) and the logits: not of other requests, the order of submission or a restart.
  uint64_t id = 0;
  std::vector<int32_t> prompt_ids;  // at least one token
  // 1 for each token of the prompt that the policy drew, in earlier turns; shorter than the prompt, or empty:
  // the others were not. Under sparse attention drawn tokens are computed as they were when they were drawn.
  std::vector<uint8_t> drawn;
  SamplingParameters sampling;
  uint64_t seed = 0;
  std::optional<uint64_t> sequence;  // takes the id's place in draws; below 2^44
  std::string adapter;               // whose policy: adapter_engines.h; empty: the engine's only one
  Json metadata;                     // handed back untouched
  // The first samples, as far as another process generated them (Engine::running()): they go on from there.
  std::vector<BegunSample> begun;
  // Gets each token as it is drawn, and must not call the engine. What it throws, step() throws; the engine
  // must not be used then.
  std::function<void(const StreamedToken&)> on_token;
};

struct RunningRequest {
  uint64_t id = 0;
  std::vector<BegunSample> samples;  // those that have begun: the first ones
};

struct GenerationResult {
  uint64_t id = 0;
  std::vector<int32_t> prompt_ids;
  double temperature = 1.0;              // as the log-probabilities were taken: 1 where the request's was 0
  std::vector<GeneratedSample> samples;  // n_samples of them, in order
  Json metadata;
};

class Model;  // models/model.h, which includes torch

// Weights to generate with from now on.
struct WeightUpdate {
  int32_t version = 0;
  // A model that has these weights until the call returns; an engine with weights of its own copies them.
  // Never null where there is a model.
  const Model* model = nullptr;
};

// Brings weights from a trainer to an engine that may compute while the next ones are made.
class WeightChannel {
 public:
  virtual ~WeightChannel() = default;
  // Publishes the weights as they are now; the trainer's thread calls it. Replaces a publication that was not
  // taken. Waits for no pass of the engine.
  virtual void publish(int32_t version) = 0;
  // Takes what was published since the last call, if anything; the engine's thread calls it, between two
  // passes. The engine's model has these weights when it returns. Never waits: while a publication is being
  // written there is none to take.
  virtual std::optional<WeightUpdate> take() = 0;
  virtual bool has_new() const = 0;  // from any thread
};

// Weights of a trainer and an engine that share one model and never compute at the same time: nothing is
// copied.
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
  int64_t new_tokens = 0;         // drawn
  int64_t prefill_tokens = 0;     // computed to fill keys and values, recomputation included
  int64_t recomputed_tokens = 0;  // of these, of samples that had been set back
  int64_t cached_tokens = 0;      // prompt tokens found computed already, for another request
  int64_t preemptions = 0;        // samples set back because memory ran out
  int64_t steps = 0;
  double seconds = 0;  // inside step()
  // Under sparse attention, in a layer that chooses pages: those that drawn tokens attended to, and those
  // that a dense policy would have.
  int64_t pages_read = 0, pages_in_context = 0;
};

inline EngineStatistics operator+(const EngineStatistics& a, const EngineStatistics& b) {
  return {a.new_tokens + b.new_tokens,
          a.prefill_tokens + b.prefill_tokens,
          a.recomputed_tokens + b.recomputed_tokens,
          a.cached_tokens + b.cached_tokens,
          a.preemptions + b.preemptions,
          a.steps + b.steps,
          a.seconds + b.seconds,
          a.pages_read + b.pages_read,
          a.pages_in_context + b.pages_in_context};
}

inline EngineStatistics operator-(const EngineStatistics& a, const EngineStatistics& b) {
  return {a.new_tokens - b.new_tokens,
          a.prefill_tokens - b.prefill_tokens,
          a.recomputed_tokens - b.recomputed_tokens,
          a.cached_tokens - b.cached_tokens,
          a.preemptions - b.preemptions,
          a.steps - b.steps,
          a.seconds - b.seconds,
          a.pages_read - b.pages_read,
          a.pages_in_context - b.pages_in_context};
}

class Engine {
 public:
  virtual ~Engine() = default;

  // Queues a request. UserError if it cannot be served (empty prompt, ids outside the vocabulary, longer than
  // the model's positions, ...); nothing is queued then.
  virtual void submit(GenerationRequest request) = 0;
  // Runs at most one pass and returns the finished requests; empty if none finished in this step, or if there
  // is nothing to do.
  virtual std::vector<GenerationResult> step() = 0;
  virtual bool idle() const = 0;  // nothing waits, runs, or is to be returned
  // Ends a request's unfinished samples. False if no such request is in flight.
  virtual bool cancel(uint64_t id) = 0;
  virtual void pause() = 0;
  virtual void resume() = 0;
  virtual bool paused() const = 0;
  // Puts everything in flight aside, once at a time; the engine must be idle at unpark().
  virtual void park() = 0;
  virtual void unpark() = 0;
  virtual void update_weights(const WeightUpdate& update) = 0;
  // False while what the last update interrupted is still being computed again: updates that come faster than
  // that would keep a sample from ever drawing its next token, or a long prompt from ever being complete.
  virtual bool ready_for_weights() const { return true; }
  virtual int32_t version() const = 0;
  // What is in flight and how far it is, for a checkpoint; parked requests are not.
  virtual std::vector<RunningRequest> running() const { return {}; }
  virtual EngineStatistics statistics() const = 0;

  // Steps until idle. UserError while paused with work in flight: it would not end.
  std::vector<GenerationResult> drain();
  // Submits and drains; results in the order of `requests`. UserError if other requests are in flight.
  std::vector<GenerationResult> generate(std::vector<GenerationRequest> requests);
};

// The limits of a model, against which an engine checks requests.
struct ModelLimits {
  int64_t vocab_size = 0;
  int64_t max_length = 0;         // tokens of prompt and response together
  std::string max_length_reason;  // the key of config.json that sets max_length
};

// Throws UserError, which names the request, the field, got, expected and the remedy.
void check_request(const GenerationRequest& request, const ModelLimits& limits);

// A partial rollout as JSON: in checkpoints of the controller and between processes. Without page choices.
Json begun_to_json(const BegunSample& begun);
BegunSample begun_from_json(const Json& json);

}  // namespace bough
