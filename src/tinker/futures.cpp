#include "tinker/futures.h"

#include <algorithm>

#include "base/error.h"

namespace bough {

FutureResult failed_result(const std::string& message, const std::string& category) {
  return {.json = {{"error", message}, {"category", category}}};
}

std::pair<std::string, bool> Futures::add(const std::string& session, const std::string& key) {
  const MutexLock lock(mutex_);
  if (const auto known = ids_.find(key); known != ids_.end()) return {known->second, false};
  const std::string id = str("future-", next_id_++);
  futures_[id] = {.session = session, .key = key};
  ids_[key] = id;
  return {id, true};
}

void Futures::complete(const std::string& id, FutureResult result) {
  std::map<uint64_t, Answer> waiters;
  const auto shared = std::make_shared<const FutureResult>(std::move(result));
  {
    const MutexLock lock(mutex_);
    const auto found = futures_.find(id);
    if (found == futures_.end() || found->second.result) return;  // its session has ended
    found->second.result = shared;
    waiters.swap(found->second.waiters);
    if (!waiters.empty()) found->second.fetched = clock_.now();
  }
  for (const auto& [waiter, answer] : waiters) answer(*shared);
}

Futures::Found Futures::wait_for(const std::string& id, uint64_t waiter, Answer answer) {
  std::shared_ptr<const FutureResult> result;
  {
    const MutexLock lock(mutex_);
    const auto found = futures_.find(id);
    if (found == futures_.end()) {
      const std::string prefix = "future-";
      const bool is_ours = id.starts_with(prefix) && id.size() > prefix.size() && id.size() < 27 &&
                           id.find_first_not_of("0123456789", prefix.size()) == std::string::npos &&
                           std::stoull(id.substr(prefix.size())) < next_id_;
      return is_ours ? Found::kGone : Found::kUnknown;
    }
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

void Futures::drop_old() {
  const MutexLock lock(mutex_);
  for (auto each = futures_.begin(); each != futures_.end();) {
    const Future& future = each->second;
    if (!future.fetched || seconds_between(*future.fetched, clock_.now()) < kKeptSeconds) {
      ++each;
      continue;
    }
    ids_.erase(future.key);
    each = futures_.erase(each);
  }
}

void Futures::drop_session(const std::string& session) {
  const MutexLock lock(mutex_);
  for (auto each = futures_.begin(); each != futures_.end();) {
    if (each->second.session != session) {
      ++each;
      continue;
    }
    ids_.erase(each->second.key);
    each = futures_.erase(each);
  }
}

int64_t Futures::num_pending() const {
  const MutexLock lock(mutex_);
  return std::count_if(futures_.begin(), futures_.end(),
                       [](const auto& entry) { return !entry.second.result; });
}

std::string Futures::session_of(const std::string& id) const {
  const MutexLock lock(mutex_);
  const auto found = futures_.find(id);
  return found == futures_.end() ? "" : found->second.session;
}

}  // namespace bough
