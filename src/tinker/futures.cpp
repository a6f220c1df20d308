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
  std::string key;
  const auto shared = std::make_shared<const FutureResult>(std::move(result));
  {
    const MutexLock lock(mutex_);
    const auto found = futures_.find(id);
    if (found == futures_.end() || found->second.result) return;  // its session has ended
    found->second.result = shared;
    found->second.completion = ++num_completions_;
    key = found->second.key;
    waiters.swap(found->second.waiters);
    if (!waiters.empty()) found->second.fetched = clock_.now();
  }
  for (const auto& [waiter, answer] : waiters) answer(*shared);
  if (when_completed_) when_completed_(key);
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

void Futures::abandon(const std::string& id) {
  const MutexLock lock(mutex_);
  const auto found = futures_.find(id);
  if (found != futures_.end() && !found->second.fetched) found->second.fetched = clock_.now();
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

std::string Futures::session_of(const std::string& id) const {
  const MutexLock lock(mutex_);
  const auto found = futures_.find(id);
  return found == futures_.end() ? "" : found->second.session;
}

Json Futures::completed(const std::string& sampler, int64_t clone, uint64_t& cursor) const {
  const MutexLock lock(mutex_);
  std::map<uint64_t, Json> found;
  const std::string prefix = sampler + "/";
  for (auto each = ids_.lower_bound(prefix); each != ids_.end() && each->first.starts_with(prefix); ++each) {
    const Future& future = futures_.at(each->second);
    if (future.completion <= cursor || std::stoll(each->first.substr(prefix.size())) / kClone != clone)
      continue;
    const bool has_failed = future.result->json.contains("error");
    Json& entry = found[future.completion] = {{"state", has_failed ? "failed" : "finished"},
                                              {"request_id", each->second}};
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
    ids_.erase(found->second.key);
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
