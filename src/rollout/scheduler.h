// Who computes what in the next pass: requests, their samples, and the pages they hold. No model here.
//
// A request's prompt is computed once (a prefill in chunks, beginning after what the index of prefixes
// knows); then its samples fork from it: they share its full pages and copy the last one if it is not full. A
// running sample holds one of `max_running` slots. Its next pass computes the tokens it has drawn and not
// computed yet: one in decode, more after it was set back (memory ran out, or the weights changed), when it
// waits for its prompt first.
//
//   request: waiting -> prefilling -> ready (back to waiting when its pages are taken or the weights change)
//   sample:  fresh -> running <-> set back -> done
//
// A prompt waits while another one with a longer common prefix is being computed: it then finds the prefix.
// When pages run out: first prompts give theirs back that are not finished or whose samples do not run, then
// the samples that started last. check_request's caller makes sure that one sample alone always fits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/stop_strings.h"
#include "rollout/page_pool.h"

namespace bough {

struct ActiveRequest;

struct ActiveSample {
  enum class State { kFresh, kRunning, kSetBack, kDone };
  ActiveRequest* request = nullptr;
  int64_t index = 0;
  State state = State::kFresh;
  std::vector<int32_t> tokens;  // prompt and response, once started
  PageTable table;
  int64_t num_computed = 0;  // leading tokens whose keys and values are stored
  bool owes_token = false;   // set back by new weights, and none was drawn since
  GeneratedSample result;
  std::unique_ptr<StopMatcher> stop_matcher;  // if the request has stop strings
};

struct ActiveRequest {
  enum class PromptState { kWaiting, kPrefilling, kReady };
  GenerationRequest request;
  std::vector<int32_t> stop_tokens;  // sorted: the model's own and the request's
  PromptState prompt_state = PromptState::kWaiting;
  PageTable prompt_table;
  int64_t num_computed = 0;          // of the prompt
  bool owes_prompt = false;          // it was being computed when new weights came, and is not complete since
  at::Tensor logits_1V;              // after the prompt, while samples are fresh
  std::deque<ActiveSample> samples;  // addresses stay
  int64_t num_fresh = 0, num_running = 0, num_done = 0;

  int64_t prompt_length() const { return static_cast<int64_t>(request.prompt_ids.size()); }
  ActiveSample& first_fresh() { return samples[samples.size() - static_cast<size_t>(num_fresh)]; }
};

// The tokens begin ... begin + count - 1 of a sample, or of a request's prompt, in a pass.
struct PassEntry {
  ActiveSample* sample = nullptr;  // null: the prompt
  ActiveRequest* request = nullptr;
  int64_t begin = 0, count = 0;

  const PageTable& table() const { return sample ? sample->table : request->prompt_table; }
  const std::vector<int32_t>& tokens() const { return sample ? sample->tokens : request->request.prompt_ids; }
  bool reaches_end() const { return begin + count == static_cast<int64_t>(tokens().size()); }
  // Whether the policy drew token i.
  bool is_drawn(int64_t i) const {
    return (sample && i >= request->prompt_length()) ||
           TokenPath({}, request->request.drawn, INT64_MAX).is_sparse(i);
  }
};

struct Pass {
  std::vector<PassEntry> entries;
  std::vector<std::pair<int32_t, int32_t>> page_copies;  // to be made before the pass
};

class Scheduler {
 public:
  // is_sparse: drawn tokens attend by choice, so that what was computed of them is found by drawn tokens
  // alone.
  Scheduler(int64_t max_running, int64_t prefill_chunk_tokens, int64_t max_pages, bool is_sparse = false);

  // Queues a request that has been checked. Samples that were begun elsewhere are set back ones. UserError if
  // its id is in flight.
  void add(GenerationRequest request, std::vector<int32_t> stop_tokens);
  bool contains(uint64_t id) const { return requests_.count(id) > 0; }

  // Returns the next pass; empty if nothing can be computed (nothing in flight, or only fresh samples of
  // ready prompts).
  Pass plan();
  // Takes note that the pass was computed: its pages are published, finished prompts become ready.
  void commit(const Pass& pass);
  // Starts fresh samples of ready prompts; they draw from the prompt's logits. Appends the page copies that
  // are to be made before the next pass.
  std::vector<ActiveSample*> start_fresh(std::vector<std::pair<int32_t, int32_t>>& page_copies);
  // Frees the pages and the slot of a sample that has ended.
  void finish(ActiveSample& sample, FinishReason reason);
  // Takes the request out once all its samples are done.
  GenerationResult take(ActiveRequest& request);
  // Ends a request's samples. False if there is no such request.
  bool cancel(uint64_t id);
  // Sets every sample back after the weights changed: nothing computed is valid any more.
  void set_all_back();
  // Takes pages and slots from everything in flight, which waits aside until unpark(); that wants the
  // scheduler idle. What was computed may still be found in the index of prefixes.
  void park();
  void unpark();

  bool idle() const { return requests_.empty(); }
  // Whether something that the last update of the weights interrupted is still being computed again: a sample
  // that has not drawn since, a prompt that is not complete. What lost its pages once more is not waited for.
  bool owes_work() const;
  std::vector<RunningRequest> running_requests() const;
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t cached_tokens() const { return cached_tokens_; }
  int64_t preemptions() const { return preemptions_; }
  const PagePool& pool() const { return pool_; }
  ActiveRequest* find(uint64_t id);

  void check_integrity() const;

 private:
  bool has_slot() const;
  bool ensure_pages(PageTable& table, int64_t num_tokens);
  bool reclaim_prompt(const ActiveRequest* except);
  void drop_prompt(ActiveRequest& request);
  void set_back(ActiveSample& sample);
  void release_everything();
  bool fork(ActiveSample& sample, std::vector<std::pair<int32_t, int32_t>>& page_copies);
  TokenPath path(const ActiveRequest& request) const;  // of the prompt
  TokenPath path(const ActiveSample& sample) const;
  bool should_wait_for_prefix(const ActiveRequest& request) const;
  void plan_running(Pass& pass, int64_t& budget);
  void plan_prefill(Pass& pass, int64_t& budget);
  void admit_set_back(Pass& pass, int64_t& budget);
  void admit_prompts(Pass& pass, int64_t& budget);
  bool admit_prompt(ActiveRequest& request);
  bool add_prompt_chunk(ActiveRequest& request, Pass& pass, int64_t& budget);

  int64_t max_running_, prefill_chunk_tokens_;
  bool is_sparse_;
  PagePool pool_;
  std::unordered_map<uint64_t, std::unique_ptr<ActiveRequest>> requests_;
  std::deque<ActiveRequest*> waiting_;     // with fresh samples, prompt not admitted; in order of submission
  std::deque<ActiveRequest*> prefilling_;  // in order of admission
  std::deque<ActiveRequest*> starting_;    // prompt ready, samples fresh
  std::deque<ActiveSample*> running_;      // in order of start
  std::deque<ActiveSample*> set_back_;
  struct Parked {
    std::unordered_map<uint64_t, std::unique_ptr<ActiveRequest>> requests;
    std::deque<ActiveRequest*> waiting;
    std::deque<ActiveSample*> set_back;
  };
  std::optional<Parked> parked_;
  int64_t cached_tokens_ = 0, preemptions_ = 0;
};

}  // namespace bough
