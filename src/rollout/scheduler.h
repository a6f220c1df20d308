// Decides what the next pass computes: requests, their samples, and the pages they hold. No model here.
//
// A request's prompt is computed once, in chunks, after the prefix that the prefix index (page_pool.h) finds.
// Then the request's samples start from the prompt's pages: a sample holds the full pages, and copies the
// last page if it is not full. A running sample takes one of `max_running` slots. A pass computes the
// sample's tokens that have no keys and values yet: one token in decode, more after a preemption (memory ran
// out, or the weights changed). A preempted sample waits until its prompt is ready again.
//
//   request: waiting -> prefilling -> ready (back to waiting if its pages are released or the weights change)
//   sample:  not started -> running <-> preempted -> done
//
// A prompt waits while another prompt is computed that shares a longer prefix with it than the index has. If
// pages run out, first prompts that are not finished or have no running samples lose their pages. Then the
// samples that started last are preempted. The caller must check that the pages suffice for any one sample.
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
#include "rollout/expert_records.h"
#include "rollout/page_pool.h"

namespace bough {

struct ActiveRequest;

struct ActiveSample {
  enum class State { kNotStarted, kRunning, kPreempted, kDone };
  ActiveRequest* request = nullptr;
  int64_t index = 0;
  State state = State::kNotStarted;
  std::vector<int32_t> tokens;  // prompt and response, once started
  PageTable table;
  int64_t num_computed = 0;         // leading tokens whose keys and values are stored
  bool must_make_progress = false;  // preempted by new weights, and no token sampled since
  SequenceExperts experts;          // only if the engine records experts
  GeneratedSample result;
  std::unique_ptr<StopMatcher> stop_matcher;  // if the request has stop strings
};

struct ActiveRequest {
  enum class PromptState { kWaiting, kPrefilling, kReady };
  GenerationRequest request;
  std::vector<int32_t> stop_tokens;  // sorted: the model's own and the request's
  PromptState prompt_state = PromptState::kWaiting;
  PageTable prompt_table;
  int64_t num_computed = 0;          // prompt tokens whose keys and values are stored
  bool must_finish_prompt = false;   // new weights interrupted its computation, and it is not complete since
  SequenceExperts experts;           // of the prompt; only if the engine records experts
  at::Tensor logits_1V;              // of the prompt's last token, while samples have not started
  std::deque<ActiveSample> samples;  // a deque keeps their addresses
  int64_t num_not_started = 0, num_running = 0, num_done = 0;
  int64_t submission = 0;  // its number among all requests
  int64_t overtaken = 0;   // prompts submitted later and admitted before it

  int64_t prompt_length() const { return static_cast<int64_t>(request.prompt_ids.size()); }
  ActiveSample& first_not_started() { return samples[samples.size() - static_cast<size_t>(num_not_started)]; }
};

// The tokens begin ... begin + count - 1 of a sample, or of a request's prompt, in a pass.
struct PassEntry {
  ActiveSample* sample = nullptr;  // nullptr: the prompt
  ActiveRequest* request = nullptr;
  int64_t begin = 0, count = 0;

  const PageTable& table() const { return sample ? sample->table : request->prompt_table; }
  const std::vector<int32_t>& tokens() const { return sample ? sample->tokens : request->request.prompt_ids; }
  bool reaches_end() const { return begin + count == static_cast<int64_t>(tokens().size()); }
  // Whether the policy sampled token i.
  bool is_sampled(int64_t i) const {
    return (sample && i >= request->prompt_length()) ||
           TokenPath({}, request->request.sampled, INT64_MAX).is_sparse(i);
  }
};

struct Pass {
  std::vector<PassEntry> entries;
  std::vector<std::pair<int32_t, int32_t>> page_copies;  // (from, to), to be made before the pass
};

class Scheduler {
 public:
  // is_sparse: sampled tokens use sparse attention. Their keys and values are reused only for sampled tokens.
  // longest_prefix: of the first kSortedPrompts waiting prompts, those with the longest prefix in the index
  // are admitted first, but at most kMostOvertaking * max_running before a prompt that was submitted earlier.
  // Otherwise prompts are admitted in the order of submission.
  Scheduler(int64_t max_running, int64_t prefill_chunk_tokens, int64_t max_pages, bool is_sparse = false,
            bool longest_prefix = false);
  static constexpr size_t kSortedPrompts = 512;  // bounds the time of lookups in the index
  static constexpr int64_t kMostOvertaking = 4;

  // Queues a request that passed check_request(). Its partial rollouts become preempted samples. Throws
  // UserError if a request with its id is in flight.
  void add(GenerationRequest request, std::vector<int32_t> stop_tokens);
  bool contains(uint64_t id) const { return requests_.count(id) > 0; }

  // Returns the next pass. Empty if nothing is in flight, or only samples of ready prompts that have not
  // started.
  Pass plan();
  // Records that the pass was computed: publishes its pages, and finished prompts become ready.
  void commit(const Pass& pass);
  // Starts samples of ready prompts. Their first token is sampled from the prompt's logits. Appends the page
  // copies that must be made before the next pass.
  std::vector<ActiveSample*> start_samples(std::vector<std::pair<int32_t, int32_t>>& page_copies);
  // Frees the pages and the slot of a sample that has ended.
  void finish(ActiveSample& sample, FinishReason reason);
  // Removes a request whose samples are all done, and returns its result.
  GenerationResult take(ActiveRequest& request);
  // Ends a request's unfinished samples as cancelled, so take() may follow. Returns false if there is no such
  // request.
  bool cancel(uint64_t id);
  // Preempts every sample because the weights changed: no computed keys and values are valid any more.
  void preempt_all();
  // Takes all requests in flight out of the scheduler and releases their pages and slots, until unpark(). At
  // unpark() the scheduler must be idle. The prefix index still knows the computed pages.
  void park();
  void unpark();

  bool idle() const { return requests_.empty(); }
  // Whether the last weight update interrupted a sample that has no new token yet, or a prompt that is not
  // complete again. Samples and prompts that have since lost their pages again do not count.
  bool must_work() const;
  std::vector<RunningRequest> running_requests() const;
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t cached_tokens() const { return cached_tokens_; }
  int64_t preemptions() const { return preemptions_; }
  const PagePool& pool() const { return pool_; }
  ActiveRequest* find(uint64_t id) { return const_cast<ActiveRequest*>(std::as_const(*this).find(id)); }
  const ActiveRequest* find(uint64_t id) const;

  void check_integrity() const;

 private:
  bool has_slot() const;
  bool ensure_pages(PageTable& table, int64_t num_tokens);
  bool reclaim_prompt(const ActiveRequest* except);
  void drop_prompt(ActiveRequest& request);
  void preempt(ActiveSample& sample);
  void release_everything();
  bool fork(ActiveSample& sample, std::vector<std::pair<int32_t, int32_t>>& page_copies);
  TokenPath path(const ActiveRequest& request) const;  // of the prompt
  TokenPath path(const ActiveSample& sample) const;
  bool should_wait_for_prefix(const ActiveRequest& request) const;
  void plan_running(Pass& pass, int64_t& budget);
  void plan_prefill(Pass& pass, int64_t& budget);
  void admit_preempted(Pass& pass, int64_t& budget);
  void admit_prompts(Pass& pass, int64_t& budget);
  bool admit_prompt(ActiveRequest& request);
  std::vector<ActiveRequest*> admission_order() const;
  bool add_prompt_chunk(ActiveRequest& request, Pass& pass, int64_t& budget);

  int64_t max_running_, prefill_chunk_tokens_;
  bool is_sparse_, longest_prefix_;
  PagePool pool_;
  int64_t submissions_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<ActiveRequest>> requests_;
  std::deque<ActiveRequest*> waiting_;     // samples not started, prompt not admitted; in order of submission
  std::deque<ActiveRequest*> prefilling_;  // in order of admission
  std::deque<ActiveRequest*> starting_;    // prompt ready, samples not started
  std::deque<ActiveSample*> running_;      // in order of start
  std::deque<ActiveSample*> preempted_;
  struct Parked {
    std::unordered_map<uint64_t, std::unique_ptr<ActiveRequest>> requests;
    std::deque<ActiveRequest*> waiting;
    std::deque<ActiveSample*> preempt;
  };
  std::optional<Parked> parked_;
  int64_t cached_tokens_ = 0, preemptions_ = 0;
};

}  // namespace bough
