#include "rollout/scheduler.h"

#include <algorithm>
#include <span>

#include "base/error.h"

namespace bough {

namespace {

template <class T>
void erase_value(std::deque<T*>& queue, const T* value) {
  queue.erase(std::remove(queue.begin(), queue.end(), value), queue.end());
}

}  // namespace

Scheduler::Scheduler(int64_t max_running, int64_t prefill_chunk_tokens, int64_t max_pages, bool is_sparse,
                     bool longest_prefix)
    : max_running_(max_running),
      prefill_chunk_tokens_(prefill_chunk_tokens),
      is_sparse_(is_sparse),
      longest_prefix_(longest_prefix),
      pool_(max_pages) {}

TokenPath Scheduler::path(const ActiveRequest& request) const {
  if (!is_sparse_) return request.request.prompt_ids;
  return {request.request.prompt_ids, request.request.sampled, INT64_MAX};
}

TokenPath Scheduler::path(const ActiveSample& sample) const {
  if (!is_sparse_) return sample.tokens;
  return {sample.tokens, sample.request->request.sampled, sample.request->prompt_length()};
}

void Scheduler::add(GenerationRequest request, std::vector<int32_t> stop_tokens) {
  const uint64_t id = request.id;
  if (contains(id)) throw UserError(str("request ", id, ": a request with this id is in flight already"));
  auto active = std::make_unique<ActiveRequest>();
  active->submission = ++submissions_;
  active->request = std::move(request);
  active->stop_tokens = std::move(stop_tokens);
  std::vector<PartialRollout> partial = std::exchange(active->request.partial, {});
  active->num_not_started = active->request.sampling.n_samples - static_cast<int64_t>(partial.size());
  for (int64_t i = 0; i < active->request.sampling.n_samples; ++i) {
    ActiveSample& sample = active->samples.emplace_back();
    sample.request = active.get();
    sample.index = i;
    if (!active->request.sampling.stop.empty()) {
      sample.stop_matcher = std::make_unique<StopMatcher>(&active->request.sampling.stop);
    }
    if (i >= static_cast<int64_t>(partial.size())) continue;
    auto& [result, has_ended] = partial[static_cast<size_t>(i)];
    sample.result = std::move(result);
    sample.tokens = active->request.prompt_ids;
    sample.tokens.insert(sample.tokens.end(), sample.result.token_ids.begin(), sample.result.token_ids.end());
    sample.state = has_ended ? ActiveSample::State::kDone : ActiveSample::State::kPreempted;
    if (has_ended) ++active->num_done;
    else preempted_.push_back(&sample);
  }
  if (active->num_not_started > 0) waiting_.push_back(active.get());
  requests_.emplace(id, std::move(active));
}

const ActiveRequest* Scheduler::find(uint64_t id) const {
  const auto found = requests_.find(id);
  return found == requests_.end() ? nullptr : found->second.get();
}

bool Scheduler::has_slot() const {
  return static_cast<int64_t>(running_.size() + prefilling_.size()) < max_running_;
}

bool Scheduler::ensure_pages(PageTable& table, int64_t num_tokens) {
  while (static_cast<int64_t>(table.pages.size()) < pages_for(num_tokens)) {
    if (!pool_.append_page(table)) return false;
  }
  return true;
}

// Releases the prompt's pages. The prompt is recomputed, or found in the prefix index, when a sample needs
// it.
void Scheduler::drop_prompt(ActiveRequest& request) {
  pool_.release(request.prompt_table);
  request.num_computed = 0;
  request.must_finish_prompt = false;
  request.logits_1V = at::Tensor();
  if (request.prompt_state == ActiveRequest::PromptState::kPrefilling) erase_value(prefilling_, &request);
  if (request.prompt_state == ActiveRequest::PromptState::kReady) erase_value(starting_, &request);
  if (request.prompt_state != ActiveRequest::PromptState::kWaiting && request.num_not_started > 0) {
    waiting_.push_front(&request);
  }
  request.prompt_state = ActiveRequest::PromptState::kWaiting;
}

bool Scheduler::reclaim_prompt(const ActiveRequest* except) {
  for (auto it = prefilling_.rbegin(); it != prefilling_.rend(); ++it) {
    if (*it == except) continue;
    drop_prompt(**it);
    return true;
  }
  for (auto it = starting_.rbegin(); it != starting_.rend(); ++it) {
    if (*it == except || (*it)->num_running > 0) continue;
    drop_prompt(**it);
    return true;
  }
  for (const ActiveSample* sample : preempted_) {
    ActiveRequest& request = *sample->request;
    if (&request == except || request.num_running > 0 || request.prompt_table.pages.empty()) continue;
    drop_prompt(request);
    return true;
  }
  return false;
}

void Scheduler::preempt(ActiveSample& sample) {
  erase_value(running_, &sample);
  --sample.request->num_running;
  pool_.release(sample.table);
  sample.num_computed = 0;
  sample.must_make_progress = false;
  sample.state = ActiveSample::State::kPreempted;
  preempted_.push_front(&sample);
}

// Makes the sample hold the prompt's pages or, if the index knows a longer prefix of the sample, the pages of
// that prefix. Returns false if no page is free.
bool Scheduler::fork(ActiveSample& sample, std::vector<std::pair<int32_t, int32_t>>& page_copies) {
  ActiveRequest& request = *sample.request;
  const int64_t prompt_length = request.prompt_length();
  if (sample.state == ActiveSample::State::kNotStarted) sample.tokens = request.request.prompt_ids;
  const auto size = static_cast<int64_t>(sample.tokens.size());
  if (size > prompt_length && pool_.match_length(path(sample), size - 1) > prompt_length) {
    sample.num_computed = pool_.match(path(sample), size - 1, sample.table);
  } else {
    pool_.share(request.prompt_table, sample.table);
    if (prompt_length % kPageTokens != 0) {
      if (!pool_.append_page(sample.table)) {
        pool_.release(sample.table);
        return false;
      }
      page_copies.emplace_back(request.prompt_table.pages.back(), sample.table.pages.back());
    }
    sample.num_computed = prompt_length;
  }
  if (sample.state == ActiveSample::State::kNotStarted) --request.num_not_started;
  ++request.num_running;
  sample.state = ActiveSample::State::kRunning;
  running_.push_back(&sample);
  return true;
}

bool Scheduler::should_wait_for_prefix(const ActiveRequest& request) const {
  const auto& prompt = request.request.prompt_ids;
  const int64_t known = pool_.match_length(path(request), request.prompt_length() - 1);
  for (const ActiveRequest* other : prefilling_) {
    const auto& theirs = other->request.prompt_ids;
    const auto limit = static_cast<int64_t>(std::min(prompt.size() - 1, theirs.size()));
    const auto end = std::mismatch(prompt.begin(), prompt.begin() + limit, theirs.begin()).first;
    const int64_t common = (end - prompt.begin()) / kPageTokens * kPageTokens;
    if (common > known) return true;
  }
  return false;
}

void Scheduler::plan_running(Pass& pass, int64_t& budget) {
  for (size_t i = 0; i < running_.size(); ++i) {
    ActiveSample& sample = *running_[i];
    int64_t count = static_cast<int64_t>(sample.tokens.size()) - sample.num_computed;
    if (count > 1) {
      count = std::min(count, budget);
      budget -= count;
    }
    if (count == 0) continue;
    bool present = true;
    while (present && !ensure_pages(sample.table, sample.num_computed + count)) {
      if (reclaim_prompt(sample.request)) continue;
      ActiveSample& last = *running_.back();
      present = &last != &sample;
      BOUGH_CHECK(present || running_.size() > 1, "one sample alone does not fit into ", pool_.max_pages(),
                  " pages");
      preempt(last);
      ++preemptions_;
    }
    if (present) pass.entries.push_back({&sample, sample.request, sample.num_computed, count});
  }
}

bool Scheduler::add_prompt_chunk(ActiveRequest& request, Pass& pass, int64_t& budget) {
  const int64_t count = std::min(request.prompt_length() - request.num_computed, budget);
  if (count == 0) return true;
  while (!ensure_pages(request.prompt_table, request.num_computed + count)) {
    // Prompts lose their pages only while the pass is empty, because a prompt in the pass needs its pages.
    if (pass.entries.empty() && reclaim_prompt(&request)) continue;
    return false;
  }
  budget -= count;
  pass.entries.push_back({nullptr, &request, request.num_computed, count});
  return true;
}

void Scheduler::plan_prefill(Pass& pass, int64_t& budget) {
  const std::vector<ActiveRequest*> prompts(prefilling_.begin(), prefilling_.end());
  for (ActiveRequest* request : prompts) {
    if (request->prompt_state != ActiveRequest::PromptState::kPrefilling) continue;  // reclaimed in this loop
    if (!add_prompt_chunk(*request, pass, budget)) drop_prompt(*request);
  }
}

// Starts to compute a prompt. Returns false if the prompt must not start now.
bool Scheduler::admit_prompt(ActiveRequest& request) {
  if (should_wait_for_prefix(request)) return false;
  const bool alone = running_.empty() && prefilling_.empty();
  const int64_t needed = pages_for(request.prompt_length()) + 1 -
                         pool_.match_length(path(request), request.prompt_length() - 1) / kPageTokens;
  if (!alone && pool_.max_pages() - pool_.num_held() < needed) return false;
  request.num_computed = pool_.match(path(request), request.prompt_length() - 1, request.prompt_table);
  cached_tokens_ += request.num_computed;
  request.prompt_state = ActiveRequest::PromptState::kPrefilling;
  prefilling_.push_back(&request);
  erase_value(waiting_, &request);
  return true;
}

void Scheduler::admit_preempted(Pass& pass, int64_t& budget) {
  const std::vector<ActiveSample*> samples(preempted_.begin(), preempted_.end());
  for (ActiveSample* sample : samples) {
    if (budget == 0) return;
    ActiveRequest& request = *sample->request;
    if (request.prompt_state == ActiveRequest::PromptState::kWaiting && has_slot() && admit_prompt(request)) {
      if (!add_prompt_chunk(request, pass, budget)) drop_prompt(request);
    }
    if (request.prompt_state != ActiveRequest::PromptState::kReady || !has_slot()) continue;
    const auto size = static_cast<int64_t>(sample->tokens.size());
    // A sample needs space for all its tokens and one more page. Otherwise it would be preempted again at
    // once.
    const int64_t needed = pages_for(size + kPageTokens) - request.prompt_table.num_published;
    const bool alone = running_.empty() && prefilling_.empty();
    if (!alone && pool_.max_pages() - pool_.num_held() < needed) return;
    const size_t num_copies = pass.page_copies.size();
    while (!fork(*sample, pass.page_copies)) {
      if (!alone || !reclaim_prompt(&request)) return;
    }
    erase_value(preempted_, sample);
    const int64_t count = std::min(size - sample->num_computed, budget);
    while (!ensure_pages(sample->table, sample->num_computed + count)) {
      if (alone && reclaim_prompt(&request)) continue;
      pass.page_copies.resize(num_copies);
      preempt(*sample);
      return;
    }
    budget -= count;
    pass.entries.push_back({sample, &request, sample->num_computed, count});
  }
}

std::vector<ActiveRequest*> Scheduler::admission_order() const {
  std::vector<ActiveRequest*> requests(waiting_.begin(), waiting_.end());
  if (!longest_prefix_ || requests.size() < 2) return requests;
  const auto count = static_cast<std::ptrdiff_t>(std::min(requests.size(), kSortedPrompts));
  std::unordered_map<const ActiveRequest*, int64_t> known;
  for (const ActiveRequest* request : std::span(requests).first(static_cast<size_t>(count)))
    known[request] = request->overtaken < kMostOvertaking * max_running_
                         ? pool_.match_length(path(*request), request->prompt_length() - 1)
                         : INT64_MAX;
  std::stable_sort(requests.begin(), requests.begin() + count,
                   [&](const ActiveRequest* a, const ActiveRequest* b) { return known[a] > known[b]; });
  return requests;
}

void Scheduler::admit_prompts(Pass& pass, int64_t& budget) {
  if (budget == 0 || !has_slot()) return;
  for (ActiveRequest* request : admission_order()) {
    if (budget == 0 || !has_slot()) return;
    if (request->prompt_state != ActiveRequest::PromptState::kWaiting || !admit_prompt(*request)) continue;
    if (!add_prompt_chunk(*request, pass, budget)) {
      drop_prompt(*request);
      return;
    }
    if (!longest_prefix_) continue;
    for (ActiveRequest* other : waiting_) other->overtaken += other->submission < request->submission;
  }
}

Pass Scheduler::plan() {
  Pass pass;
  int64_t budget = prefill_chunk_tokens_;
  plan_running(pass, budget);
  plan_prefill(pass, budget);
  admit_preempted(pass, budget);
  // Samples of ready prompts start before more prompts are computed, because those prompts would only hold
  // pages.
  if (starting_.empty()) admit_prompts(pass, budget);
  return pass;
}

void Scheduler::commit(const Pass& pass) {
  for (const PassEntry& entry : pass.entries) {
    const int64_t end = entry.begin + entry.count;
    if (entry.sample) {
      entry.sample->num_computed = end;
      pool_.publish(path(*entry.sample), end, entry.sample->table);
      continue;
    }
    ActiveRequest& request = *entry.request;
    request.num_computed = end;
    pool_.publish(path(request), end, request.prompt_table);
    if (!entry.reaches_end()) continue;
    request.prompt_state = ActiveRequest::PromptState::kReady;
    request.must_finish_prompt = false;
    erase_value(prefilling_, &request);
    if (request.num_not_started > 0) starting_.push_back(&request);
  }
}

std::vector<ActiveSample*> Scheduler::start_samples(std::vector<std::pair<int32_t, int32_t>>& page_copies) {
  std::vector<ActiveSample*> started;
  while (!starting_.empty() && has_slot()) {
    ActiveRequest& request = *starting_.front();
    ActiveSample& sample = request.first_not_started();
    if (!fork(sample, page_copies)) {
      if (running_.empty() && reclaim_prompt(&request)) continue;
      BOUGH_CHECK(!running_.empty(), "one sample alone does not fit into ", pool_.max_pages(), " pages");
      break;
    }
    started.push_back(&sample);
    if (request.num_not_started == 0) starting_.pop_front();
  }
  return started;
}

void Scheduler::finish(ActiveSample& sample, FinishReason reason) {
  ActiveRequest& request = *sample.request;
  BOUGH_CHECK(sample.state != ActiveSample::State::kDone, "sample ", sample.index, " ends twice");
  if (sample.state == ActiveSample::State::kRunning) {
    erase_value(running_, &sample);
    --request.num_running;
    pool_.release(sample.table);
  }
  if (sample.state == ActiveSample::State::kPreempted) erase_value(preempted_, &sample);
  if (sample.state == ActiveSample::State::kNotStarted) --request.num_not_started;
  sample.state = ActiveSample::State::kDone;
  sample.result.finish_reason = reason;
  ++request.num_done;
}

GenerationResult Scheduler::take(ActiveRequest& request) {
  BOUGH_CHECK(request.num_done == request.request.sampling.n_samples, request.num_done, " of ",
              request.request.sampling.n_samples, " samples are done");
  drop_prompt(request);
  erase_value(waiting_, &request);
  GenerationResult result;
  result.id = request.request.id;
  result.prompt_ids = std::move(request.request.prompt_ids);
  result.temperature = request.request.sampling.temperature > 0 ? request.request.sampling.temperature : 1.0;
  result.metadata = std::move(request.request.metadata);
  for (ActiveSample& sample : request.samples) result.samples.push_back(std::move(sample.result));
  requests_.erase(result.id);
  return result;
}

bool Scheduler::cancel(uint64_t id) {
  ActiveRequest* request = find(id);
  if (!request) return false;
  for (ActiveSample& sample : request->samples) {
    if (sample.state != ActiveSample::State::kDone) finish(sample, FinishReason::kCancelled);
  }
  return true;
}

void Scheduler::release_everything() {
  // reverse order, so that the first started sample is first in the queue
  while (!running_.empty()) preempt(*running_.back());
  while (!starting_.empty()) drop_prompt(*starting_.back());
  while (!prefilling_.empty()) drop_prompt(*prefilling_.back());
  for (auto& [id, request] : requests_) drop_prompt(*request);
}

void Scheduler::preempt_all() {
  const std::vector<ActiveSample*> interrupted(running_.begin(), running_.end());
  const std::vector<ActiveRequest*> prompts(prefilling_.begin(), prefilling_.end());
  release_everything();
  for (ActiveSample* sample : interrupted) sample->must_make_progress = true;
  for (ActiveRequest* request : prompts) request->must_finish_prompt = true;
  pool_.forget_prefixes();
}

bool Scheduler::must_work() const {
  return std::any_of(requests_.begin(), requests_.end(), [](const auto& entry) {
    const ActiveRequest& request = *entry.second;
    return request.must_finish_prompt ||
           std::any_of(request.samples.begin(), request.samples.end(), [](const ActiveSample& sample) {
             return sample.must_make_progress && sample.state != ActiveSample::State::kDone;
           });
  });
}

std::vector<RunningRequest> Scheduler::running_requests() const {
  std::vector<RunningRequest> running;
  for (const auto& [id, request] : requests_) {
    RunningRequest& saved = running.emplace_back(RunningRequest{.id = id, .samples = {}});
    // Samples start in order, so the samples that have not started come last.
    for (int64_t i = 0; i < request->request.sampling.n_samples - request->num_not_started; ++i) {
      const ActiveSample& sample = request->samples[static_cast<size_t>(i)];
      // This sample has pages, and gets its first token in the next pass. It is not saved.
      if (sample.result.token_ids.empty()) break;
      saved.samples.push_back({sample.result, sample.state == ActiveSample::State::kDone});
    }
  }
  return running;
}

void Scheduler::park() {
  BOUGH_CHECK(!parked_, "park() was called twice");
  release_everything();
  parked_.emplace(std::exchange(requests_, {}), std::exchange(waiting_, {}), std::exchange(preempted_, {}));
}

void Scheduler::unpark() {
  BOUGH_CHECK(parked_ && idle(), "unpark(): nothing is parked, or a request is in flight");
  requests_ = std::move(parked_->requests);
  waiting_ = std::move(parked_->waiting);
  preempted_ = std::move(parked_->preempt);
  parked_.reset();
}

void Scheduler::check_integrity() const {
  std::vector<const PageTable*> tables;
  size_t num_running = 0, num_preempted = 0;
  for (const auto& [id, request] : requests_) {
    tables.push_back(&request->prompt_table);
    int64_t not_started = 0, running = 0, done = 0;
    for (const ActiveSample& sample : request->samples) {
      tables.push_back(&sample.table);
      not_started += sample.state == ActiveSample::State::kNotStarted;
      running += sample.state == ActiveSample::State::kRunning;
      done += sample.state == ActiveSample::State::kDone;
      num_preempted += sample.state == ActiveSample::State::kPreempted;
      BOUGH_CHECK(sample.state == ActiveSample::State::kRunning || sample.table.pages.empty(), "request ", id,
                  ": sample ", sample.index, " holds pages and does not run");
    }
    num_running += static_cast<size_t>(running);
    BOUGH_CHECK(not_started == request->num_not_started && running == request->num_running &&
                    done == request->num_done,
                "request ", id, ": counts of samples are wrong");
    BOUGH_CHECK(
        request->prompt_state != ActiveRequest::PromptState::kWaiting || request->prompt_table.pages.empty(),
        "request ", id, ": a waiting prompt holds pages");
  }
  BOUGH_CHECK(num_running == running_.size() && num_preempted == preempted_.size(), "samples are lost");
  BOUGH_CHECK(static_cast<int64_t>(running_.size()) <= max_running_, running_.size(), " samples run, ",
              max_running_, " may");
  pool_.check_integrity(tables);
}

}  // namespace bough
