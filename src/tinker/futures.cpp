#include "tinker/futures.h"

#include <algorithm>

namespace bough {

FutureResult failed_result(const std::string& message, const std::string& category) {
  return {.json = {{"error", message}, {"category", category}}};
}

bool Futures::add(const std::string& session, const std::string& id) {
  const MutexLock lock(mutex_);
  return futures_.try_emplace(id, Future{.session = session, .result = nullptr, .fetched = {}, .waiters = {}})
      .second;
}

void Futures::complete(const std::string& id, FutureResult result) {
  std::map<uint64_t, Answer> waiters;
  const auto shared = std::make_shared<const FutureResult>(std::move(result));
  {
    const MutexLock lock(mutex_);
    const auto found = futures_.find(id);
    if (found == futures_.end() || found->second.result) return;  // its session has ended
    found->second.result = shared;
    found->second.completion = ++num_completions_;
    waiters.swap(found->second.waiters);
    if (!waiters.empty()) found->second.fetched = clock_.now();
  }
  for (const auto& [waiter, answer] : waiters) answer(*shared);
  if (when_completed_) when_completed_(id);
}

std::shared_ptr<const FutureResult> Futures::result(const std::string& id) const {
  const MutexLock lock(mutex_);
  const auto found = futures_.find(id);
  return found == futures_.end() ? nullptr : found->second.result;
}

Futures::Found Futures::wait_for(const std::string& id, uint64_t waiter, Answer answer) {
  std::shared_ptr<const FutureResult> result;
  {
    const MutexLock lock(mutex_);
    const auto found = futures_.find(id);
    if (found == futures_.end()) return Found::kUnknown;
    result = found->second.result;
    if (!result) {
      found->second.waiters[waiter] = std::move(answer);
      return Found::kWaits;
    }
    if (!found->second.fetched) found->second.fetched = clock_.now();
  }
  answer(*result);
  return Found::kReady;
}

void Futures::stop_waiting(const std::string& id, uint64_t waiter) {
  const MutexLock lock(mutex_);
  if (const auto found = futures_.find(id); found != futures_.end()) found->second.waiters.erase(waiter);
}

void Futures::abandon(const std::string& id) {
  const MutexLock lock(mutex_);
  const auto found = futures_.find(id);
  if (found != futures_.end() && !found->second.fetched) found->second.fetched = clock_.now();
}

void Futures::drop_old() {
  const MutexLock lock(mutex_);
  std::erase_if(futures_, [this](const auto& entry) {
    const auto& fetched = entry.second.fetched;
    return fetched && seconds_between(*fetched, clock_.now()) >= kKeptSeconds;
  });
}

void Futures::drop_session(const std::string& session) {
  const MutexLock lock(mutex_);
  std::erase_if(futures_, [&](const auto& entry) { return entry.second.session == session; });
}

std::string Futures::session_of(const std::string& id) const {
  const MutexLock lock(mutex_);
  const auto found = futures_.find(id);
  return found == futures_.end() ? "" : found->second.session;
}

Json Futures::completed(const std::string& sampler, int64_t clone, uint64_t& cursor) const {
  const MutexLock lock(mutex_);
  std::map<uint64_t, Json> found;
  const std::string prefix = sampler + "/";
  for (auto each = futures_.lower_bound(prefix); each != futures_.end() && each->first.starts_with(prefix);
       ++each) {
    const auto& [id, future] = *each;
    if (future.completion <= cursor || std::stoll(id.substr(prefix.size())) / kClone != clone) continue;
    const bool has_failed = future.result->json.contains("error");
    Json& entry =
        found[future.completion] = {{"state", has_failed ? "failed" : "finished"}, {"request_id", id}};
    if (!has_failed) entry["response_payload_uncompressed_size"] = future.result->protobuf.size();
  }
  Json list = Json::array();
  for (auto& [number, entry] : found) list.push_back(std::move(entry));
  if (!found.empty()) cursor = found.rbegin()->first;
  return list;
}

void Futures::drop(const std::string& session, const std::vector<std::string>& ids) {
  const MutexLock lock(mutex_);
  for (const std::string& id : ids) {
    const auto found = futures_.find(id);
    if (found == futures_.end() || found->second.session != session || !found->second.fetched) continue;
    futures_.erase(found);
  }
}

int64_t Futures::num_unfetched(const std::set<std::string>& sessions) const {
  const MutexLock lock(mutex_);
  return std::count_if(futures_.begin(), futures_.end(), [&](const auto& entry) {
    return !entry.second.fetched && sessions.contains(entry.second.session);
  });
}

}  // namespace bough
