// Leases the run's groups (of samples) to agents. A group has group_size sessions. Starting a session leases
// an offered group, unless it can join a lease. The group returns to the run when all its sessions have ended
// or its lease has expired.
//
//   offer() ─▶ waiting ── start_session() ─▶ leased ─┬─ all sessions ended ─┬─▶ finished(): enough are valid
//                         429 if none waits          └─ lease expired ──────┴─▶ failed(), by reason
//
// A session joins a lease of the same task_id that has fewer than group_size sessions. Agents that give no
// task_id all share the empty one. Once a group is leased, its remaining sessions are therefore never
// refused. The class owns no thread and no clock. Any thread may call its functions.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "control/external_rollouts.h"
#include "serve/agent_session.h"

namespace bough {

struct AgentSessionsOptions {
  int64_t group_size = 1;
  // A group with fewer valid sessions fails. Valid: ended, and with a reward unless scored_elsewhere.
  int64_t min_group = 1;
  double lease_seconds = 3600;
  bool scored_elsewhere = false;  // the run's reward function scores sessions without a reward
};

class AgentSessions {
 public:
  // `format` must outlive this object.
  AgentSessions(const ConversationFormat& format, AgentSessionsOptions options);

  void start(ExternalRolloutSink& sink);  // `sink` must live until close() returns
  void offer(GroupTask task);

  struct Started {
    std::string key;  // API key of the session's requests
    std::shared_ptr<AgentSession> session;
    OrderedJson problem;  // null if the agent has its own problem
    int64_t sessions_left = 0;
    double lease_seconds = 0;  // time until the lease expires
  };
  // `idempotency_key`: if an open session was started with it, returns that session. `key`: the key of an
  // earlier session, or "". The earlier session is ended if it is still open, and the new session takes over
  // the key. Throws ApiError 429 if no group waits, 410 after close(), 400 if `key` is malformed.
  Started start_session(const std::string& task_id, const std::string& key,
                        const std::string& idempotency_key, Clock::Time now);
  static bool is_session_key(const std::string& key);
  // find() and end_session() throw ApiError 410 if this key belongs to no session, or to one that has ended.
  std::shared_ptr<AgentSession> find(const std::string& key) const;
  void end_session(const std::string& key);
  // Closes expired leases. Returns whether there were any.
  bool expire(Clock::Time now);
  // Ends all leases without a result. start_session() then throws.
  void close();
  bool is_open(const AgentSession& session) const;

  struct Counts {
    int64_t waiting = 0, leased = 0;                // groups, now
    int64_t sessions_open = 0, sessions_ended = 0;  // of leased groups, now
    int64_t granted = 0, refused = 0, expired = 0;  // leases, since the beginning
    int64_t finished = 0;                           // groups
    std::map<std::string, int64_t> failed;          // by reason
    int64_t started = 0, without_reward = 0;        // sessions
  };
  Counts counts() const;
  std::string waits_for() const;
  void check_integrity() const;

 private:
  struct Member {
    std::string key;
    std::shared_ptr<AgentSession> session;
    bool has_ended = false;
  };
  struct Lease {
    GroupTask task;
    std::string task_id;  // "": sessions without a task_id
    std::vector<Member> members;
    Clock::Time deadline;
    int64_t num_ended = 0;
  };
  using Leases = std::map<uint64_t, Lease>;
  void end(Leases::iterator lease, Member& member) REQUIRES(mutex_);
  void close_lease(Leases::iterator lease, const std::string& reason) REQUIRES(mutex_);
  Started answer(const Lease& lease, const Member& member, Clock::Time now) const REQUIRES(mutex_);

  const ConversationFormat& format_;
  const AgentSessionsOptions options_;
  mutable Mutex mutex_;
  ExternalRolloutSink* sink_ GUARDED_BY(mutex_) = nullptr;  // nullptr: not started, or closed
  std::deque<GroupTask> waiting_ GUARDED_BY(mutex_);
  Leases leases_ GUARDED_BY(mutex_);                           // by group id
  std::map<std::string, uint64_t> groups_ GUARDED_BY(mutex_);  // by key of an open session
  // Session keys by idempotency key, for sessions of open leases.
  std::map<std::string, std::string> keys_by_idempotency_ GUARDED_BY(mutex_);
  Counts counts_ GUARDED_BY(mutex_);
  bool is_closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace bough
