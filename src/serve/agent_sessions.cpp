#include "serve/agent_sessions.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "net/secrets.h"
#include "serve/api.h"

namespace bough {

namespace {

constexpr const char* kKeyPrefix = "sk-sess-";
constexpr size_t kKeyBytes = 24;
constexpr const char* kEnded =
    "this session has ended, its lease has expired, or the run was restarted; start another session with "
    "/rl/start_session";

}  // namespace

AgentSessions::AgentSessions(const ConversationFormat& format, AgentSessionsOptions options)
    : format_(format), options_(options) {}

void AgentSessions::start(ExternalRolloutSink& sink) {
  const MutexLock lock(mutex_);
  sink_ = &sink;
}

void AgentSessions::offer(GroupTask task) {
  const MutexLock lock(mutex_);
  BOUGH_CHECK(!leases_.contains(task.id), "group ", task.id, " is offered, but an agent already has it");
  waiting_.push_back(std::move(task));
}

bool AgentSessions::is_session_key(const std::string& key) {
  return key.starts_with(kKeyPrefix);
}

AgentSessions::Started AgentSessions::answer(const Lease& lease, const Member& member,
                                             Clock::Time now) const {
  Started started{.key = member.key, .session = member.session, .problem = nullptr};
  const Problem& problem = *lease.task.problem;
  if (!problem.prompt.empty() || !problem.messages.empty()) started.problem = problem_json(problem);
  started.sessions_left = options_.group_size - std::ssize(lease.members);
  started.lease_seconds = std::max(0.0, seconds_between(now, lease.deadline));
  return started;
}

AgentSessions::Started AgentSessions::start_session(const std::string& task_id, const std::string& key,
                                                    const std::string& idempotency_key, Clock::Time now) {
  const MutexLock lock(mutex_);
  if (is_closed_) throw ApiError(410, "the run has ended: no session can start", "", "run_ended");
  if (const auto same = keys_by_idempotency_.find(idempotency_key); same != keys_by_idempotency_.end())
    if (const auto open = groups_.find(same->second); open != groups_.end())
      for (const Member& member : leases_.at(open->second).members)
        if (member.key == same->second && !member.has_ended)
          return answer(leases_.at(open->second), member, now);
  if (!key.empty()) {
    if (!is_session_key(key) || key.size() != std::string(kKeyPrefix).size() + 2 * kKeyBytes)
      throw ApiError(400, "api_key: expected the key of an earlier session, or none", "api_key");
    if (const auto open = groups_.find(key); open != groups_.end()) {
      const auto lease = leases_.find(open->second);
      for (Member& member : lease->second.members)
        if (member.key == key && !member.has_ended) {
          end(lease, member);
          break;
        }
    }
  }
  auto lease = std::find_if(leases_.begin(), leases_.end(), [&](const auto& each) {
    return each.second.task_id == task_id && std::ssize(each.second.members) < options_.group_size;
  });
  if (lease == leases_.end()) {
    if (waiting_.empty()) {
      ++counts_.refused;
      throw ApiError(
          429,
          "no group can start now: rollout.max_head_offpolicyness of the run limits the groups that are "
          "generated, scored and trained on; try again later",
          "", "no_lease");
    }
    GroupTask task = std::move(waiting_.front());
    waiting_.pop_front();
    const uint64_t id = task.id;
    lease = leases_.emplace(id, Lease{.task = std::move(task), .task_id = task_id}).first;
    lease->second.deadline = now + std::chrono::duration_cast<Clock::Duration>(
                                       std::chrono::duration<double>(options_.lease_seconds));
    ++counts_.granted;
  }
  Lease& joined = lease->second;
  const std::string number = std::to_string(joined.members.size());
  const std::string name = task_id.empty() ? joined.task.name : task_id;
  Member& member = joined.members.emplace_back();
  member.key = key.empty() ? kKeyPrefix + random_hex(kKeyBytes) : key;
  member.session = std::make_shared<AgentSession>(format_, str(name, "-", lease->first, "-", number),
                                                  lease->first, number);
  groups_[member.key] = lease->first;
  if (!idempotency_key.empty()) keys_by_idempotency_[idempotency_key] = member.key;
  ++counts_.started;
  return answer(joined, member, now);
}

std::shared_ptr<AgentSession> AgentSessions::find(const std::string& key) const {
  const MutexLock lock(mutex_);
  const auto group = groups_.find(key);
  if (group != groups_.end())
    for (const Member& member : leases_.at(group->second).members)
      if (member.key == key && !member.has_ended) return member.session;
  throw ApiError(410, kEnded, "", "session_ended");
}

bool AgentSessions::is_open(const AgentSession& session) const {
  const MutexLock lock(mutex_);
  const auto lease = leases_.find(session.group());
  if (lease == leases_.end()) return false;
  for (const Member& member : lease->second.members)
    if (member.session.get() == &session) return !member.has_ended;
  return false;
}

void AgentSessions::end_session(const std::string& key) {
  const MutexLock lock(mutex_);
  const auto group = groups_.find(key);
  if (group != groups_.end()) {
    const auto lease = leases_.find(group->second);
    for (Member& member : lease->second.members)
      if (member.key == key && !member.has_ended) return end(lease, member);
  }
  throw ApiError(410, kEnded, "", "session_ended");
}

void AgentSessions::end(Leases::iterator lease, Member& member) {
  member.has_ended = true;
  groups_.erase(member.key);
  if (!member.session->has_reward()) ++counts_.without_reward;
  if (++lease->second.num_ended == options_.group_size) close_lease(lease, "");
}

// `reason`: why the lease ends if some of its sessions have not ended.
void AgentSessions::close_lease(Leases::iterator lease, const std::string& reason) {
  Lease& closed = lease->second;
  FinishedGroup group{.id = lease->first, .problem = closed.task.problem, .samples = {}};
  const std::string name = closed.task_id.empty() ? closed.task.name : closed.task_id;
  int64_t num_valid = 0;
  for (Member& member : closed.members) {
    if (!member.has_ended) groups_.erase(member.key);
    std::vector<Trajectory> rows = member.session->trajectory(
        name, member.has_ended, member.has_ended ? "done" : reason, options_.scored_elsewhere);
    if (rows.empty()) continue;
    num_valid += rows.front().valid;
    for (Trajectory& row : rows) {
      row.answer = closed.task.problem->answer;
      group.samples.push_back(std::move(row));
    }
  }
  std::erase_if(keys_by_idempotency_, [&](const auto& each) {
    return std::any_of(closed.members.begin(), closed.members.end(),
                       [&](const Member& member) { return member.key == each.second; });
  });
  const uint64_t id = lease->first;
  leases_.erase(lease);
  if (num_valid >= std::max<int64_t>(1, std::min(options_.min_group, options_.group_size))) {
    ++counts_.finished;
    if (sink_) sink_->finished(std::move(group));
    return;
  }
  const std::string why = reason.empty() ? "too few rewards" : reason;
  ++counts_.failed[why];
  if (sink_) sink_->failed(id, why);
}

bool AgentSessions::expire(Clock::Time now) {
  const MutexLock lock(mutex_);
  bool any = false;
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    const auto each = lease++;
    if (now < each->second.deadline) continue;
    any = true;
    ++counts_.expired;
    close_lease(each, "lease expired");
  }
  return any;
}

void AgentSessions::close() {
  const MutexLock lock(mutex_);
  is_closed_ = true;
  sink_ = nullptr;
  waiting_.clear();
  leases_.clear();
  groups_.clear();
  keys_by_idempotency_.clear();
}

AgentSessions::Counts AgentSessions::counts() const {
  const MutexLock lock(mutex_);
  Counts counts = counts_;
  counts.waiting = std::ssize(waiting_);
  counts.leased = std::ssize(leases_);
  for (const auto& [id, lease] : leases_) {
    counts.sessions_ended += lease.num_ended;
    counts.sessions_open += std::ssize(lease.members) - lease.num_ended;
  }
  return counts;
}

std::string AgentSessions::waits_for() const {
  const Counts now = counts();
  if (now.waiting + now.leased == 0) return "";
  std::string text = "waiting for agents: ";
  if (now.leased > 0)
    text += str(now.leased, now.leased == 1 ? " group" : " groups", " begun, ", now.sessions_ended, "/",
                now.leased * options_.group_size, " sessions ended", now.waiting > 0 ? ", " : "");
  if (now.waiting > 0) text += str(now.waiting, now.waiting == 1 ? " group" : " groups", " free");
  return text;
}

void AgentSessions::check_integrity() const {
  const MutexLock lock(mutex_);
  int64_t num_open = 0;
  for (const auto& [id, lease] : leases_) {
    int64_t num_ended = 0;
    for (const Member& member : lease.members) {
      num_ended += member.has_ended;
      const auto group = groups_.find(member.key);
      if (!member.has_ended)
        BOUGH_CHECK(group != groups_.end() && group->second == id,
                    "the key of an open session belongs to no group");
      member.session->check_integrity();
    }
    num_open += std::ssize(lease.members) - num_ended;
    BOUGH_CHECK(num_ended == lease.num_ended && num_ended < options_.group_size &&
                    std::ssize(lease.members) <= options_.group_size,
                "group ", id, ": ", lease.members.size(), " sessions, ", num_ended, " ended, counted ",
                lease.num_ended);
  }
  BOUGH_CHECK(num_open == std::ssize(groups_), num_open, " open sessions, ", groups_.size(), " keys");
  int64_t failed = 0;
  for (const auto& [reason, count] : counts_.failed) failed += count;
  BOUGH_CHECK(is_closed_ || counts_.granted == counts_.finished + failed + std::ssize(leases_),
              counts_.granted, " leases granted, ", counts_.finished, " finished, ", failed, " failed, ",
              leases_.size(), " open");
}

}  // namespace bough
