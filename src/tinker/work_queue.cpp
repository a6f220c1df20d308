#include "tinker/work_queue.h"

namespace bough {

void ModelQueue::add_model(const std::string& model, int64_t first_seq_id) {
  const MutexLock lock(mutex_);
  models_.try_emplace(model, Model{first_seq_id, {}});
}

bool ModelQueue::add(const std::string& model, int64_t seq_id, Work work) {
  const MutexLock lock(mutex_);
  const auto found = models_.find(model);
  if (found == models_.end() || seq_id < found->second.next) return false;
  work.seq_id = seq_id;
  if (!found->second.waiting.emplace(seq_id, std::move(work)).second) return false;
  has_new_ = true;
  changed_.notify_one();
  return true;
}

void ModelQueue::add_now(const std::string& session, Work work) {
  const MutexLock lock(mutex_);
  now_[session].push_back(std::move(work));
  has_new_ = true;
  changed_.notify_one();
}

ModelQueue::Group ModelQueue::take() {
  const MutexLock lock(mutex_);
  has_new_ = false;
  Group group;
  auto each = models_.upper_bound(last_);
  for (size_t tried = 0; tried < models_.size(); ++tried, ++each) {
    if (each == models_.end()) each = models_.begin();
    auto& [next, waiting] = each->second;
    while (!waiting.empty() && waiting.begin()->first == next) {
      const Work& work = waiting.begin()->second;
      const bool fits =
          group.works.empty() ||
          (work.request && group.works.front().request && work.loss == group.works.front().loss &&
           work.request->forward_only == group.works.front().request->forward_only);
      if (!fits) break;
      group.works.push_back(std::move(waiting.begin()->second));
      waiting.erase(waiting.begin());
      ++next;
    }
    if (group.works.empty()) continue;
    group.model = last_ = each->first;
    return group;
  }
  return group;
}

std::optional<Work> ModelQueue::take_now() {
  const MutexLock lock(mutex_);
  if (now_.empty()) return std::nullopt;
  auto turn = now_.upper_bound(last_session_);
  if (turn == now_.end()) turn = now_.begin();
  last_session_ = turn->first;
  Work work = std::move(turn->second.front());
  turn->second.pop_front();
  if (turn->second.empty()) now_.erase(turn);
  return work;
}

std::vector<Work> ModelQueue::remove_model(const std::string& model) {
  const MutexLock lock(mutex_);
  std::vector<Work> works;
  const auto found = models_.find(model);
  if (found == models_.end()) return works;
  for (auto& [seq_id, work] : found->second.waiting) works.push_back(std::move(work));
  models_.erase(found);
  return works;
}

void ModelQueue::wait_until(std::chrono::steady_clock::time_point time) {
  const MutexLock lock(mutex_);
  while (!has_new_ && changed_.wait_until(mutex_, time)) {
  }
}

}  // namespace bough
