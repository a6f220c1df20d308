// Hands the run's groups out to agents: what was offered is leased to whoever starts a session, a group has
// group_size sessions, and goes back to the run when all of them have ended or its lease has.
//
//   offer() ─▶ waiting ── start() ─▶ leased ─┬─ all sessions ended ─┬─▶ finished(): enough have a reward
//                 ▲                           └─ lease expired ──────┴─▶ failed(), by reason
//          429 where none waits
//
// A session joins a lease that has room: of its own task_id, or, where agents give none, the oldest one. So
// an admitted group's sessions are never refused. It owns no thread and no clock; any thread may call it.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "control/outside.h"
#include "serve/agent_session.h"

namespace bough {

struct AgentDeskOptions {
  int64_t group_size = 1;
  int64_t min_group = 1;  // sessions with a reward; a group with fewer is not trained on
  double lease_seconds = 3600;
  bool scored_elsewhere = false;  // the run's reward function scores sessions without a reward
};

class AgentDesk {
 public:
  // `format` must outlive it.
  AgentDesk(const ConversationFormat& format, AgentDeskOptions options);

  void start(OutsideSink sink);
  void offer(GroupTask task);

  struct Started {
    std::string key;  // that the session's requests must have
    std::shared_ptr<AgentSession> session;
    OrderedJson problem;  // null: the agent has its own
    int64_t sessions_left = 0;
    double lease_seconds = 0;  // left
  };
  // ApiError: 429 where no group waits, 410 after close(). `idempotency_key`: the same one is the same
  // session. `key`: an earlier session's, which is ended where it has not been, and goes on to name this one.
  Started start_session(const std::string& task_id, const std::string& key,
                        const std::string& idempotency_key, Clock::Time now);
  static bool is_session_key(const std::string& key);
  // ApiError 410: it has ended, or belonged to a process that has.
  std::shared_ptr<AgentSession> find(const std::string& key) const;
  void end_session(const std::string& key);
  // Closes what has expired; whether anything has.
  bool expire(Clock::Time now);
  // Nothing is handed out or taken back any more.
  void close();
  bool is_open(const AgentSession& session) const;

  struct Counts {
    int64_t waiting = 0, leased = 0;                // groups, now
    int64_t sessions_open = 0, sessions_ended = 0;  // of the leased ones, now
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
    std::string task_id;  // "": whoever comes
    std::vector<Member> members;
    Clock::Time deadline;
    int64_t num_ended = 0;
  };
  using Leases = std::map<uint64_t, Lease>;
  void end(Leases::iterator lease, Member& member) REQUIRES(mutex_);
  void close_lease(Leases::iterator lease, const std::string& reason) REQUIRES(mutex_);
  Started answer(const Lease& lease, const Member& member, Clock::Time now) const REQUIRES(mutex_);

  const ConversationFormat& format_;
  const AgentDeskOptions options_;
  mutable Mutex mutex_;
  OutsideSink sink_ GUARDED_BY(mutex_);
  std::deque<GroupTask> waiting_ GUARDED_BY(mutex_);
  Leases leases_ GUARDED_BY(mutex_);                           // by the group's id
  std::map<std::string, uint64_t> groups_ GUARDED_BY(mutex_);  // by the keys of open sessions
  // Keys of sessions of open leases.
  std::map<std::string, std::string> keys_by_idempotency_ GUARDED_BY(mutex_);
  Counts counts_ GUARDED_BY(mutex_);
  bool is_closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace bough
