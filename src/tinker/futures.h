// Results of requests that are computed later. A request gets an id at once; its result is fetched with
// /api/v1/retrieve_future, which waits for it. Thread-safe.
//
// The id names the request: model and seq_id, or sampling session and seq_id. So a request that is sent
// again, because its answer was lost, has the same id, also after a restart of the service: it is never
// computed twice. A result is kept for kKeptSeconds after it was first fetched, and with its session.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/json.h"
#include "base/mutex.h"

namespace bough {

struct FutureResult {
  Json json;             // also that of a failure: {"error", "category"}
  std::string protobuf;  // empty: the result has no protobuf form
  std::function<Json()>
      make_json;  // if set, makes the JSON of a result that clients mostly fetch as protobuf

  Json as_json() const { return make_json ? make_json() : json; }
};
// A result with both forms. Its JSON is made only for clients that fetch it.
template <class Result>
FutureResult future_result(Result result) {
  const auto shared = std::make_shared<const Result>(std::move(result));
  return {.protobuf = shared->protobuf(), .make_json = [shared] { return shared->json(); }};
}
FutureResult failed_result(const std::string& message, const std::string& category);

class Futures {
 public:
  static constexpr double kKeptSeconds = 600;
  // `completed` is called with each request's key when there is a result, on the thread that completes it.
  explicit Futures(const Clock& clock, std::function<void(const std::string& key)> completed = {})
      : clock_(clock), when_completed_(std::move(completed)) {}

  bool add(const std::string& session, const std::string& id);  // false: it is not new
  void complete(const std::string& id, FutureResult result);
  // nullptr if there is none, or none any more.
  std::shared_ptr<const FutureResult> result(const std::string& id) const;

  // Calls `answer` with the result as soon as there is one: at once, or on the thread that completes it.
  // kUnknown: the id is not known, or no longer. `waiter` identifies the call while it waits.
  enum class Found { kReady, kWaits, kUnknown };
  using Answer = std::function<void(const FutureResult&)>;
  Found wait_for(const std::string& id, uint64_t waiter, Answer answer);
  void stop_waiting(const std::string& id, uint64_t waiter);

  std::string session_of(const std::string& id) const;  // empty: the id is unknown
  // The requests of a sampling session that were completed after `cursor`, as the API reports them, in the
  // order of completion. Their seq_ids are from `clone` · kClone on, one clone's. Moves the cursor behind
  // them.
  Json completed(const std::string& sampler, int64_t clone, uint64_t& cursor) const;
  static constexpr int64_t kClone = 1'000'000'000;

  void drop(const std::string& session, const std::vector<std::string>& ids);  // results that were fetched
  void abandon(const std::string& id);  // nobody will fetch the result: counts as fetched now
  void drop_old();                      // results that were fetched long ago
  void drop_session(const std::string& session);
  // The number of requests of these sessions that are pending, or whose result was not fetched yet.
  int64_t num_unfetched(const std::set<std::string>& sessions) const;

 private:
  struct Future {
    std::string session;
    std::shared_ptr<const FutureResult> result;  // nullptr: pending
    std::optional<Clock::Time> fetched;
    uint64_t completion = 0;  // its number among all completions, from 1 on; 0: pending
    std::map<uint64_t, Answer> waiters;
  };
  const Clock& clock_;
  const std::function<void(const std::string& key)> when_completed_;
  mutable Mutex mutex_;
  std::map<std::string, Future> futures_ GUARDED_BY(mutex_);
  uint64_t num_completions_ GUARDED_BY(mutex_) = 0;
};

}  // namespace bough
