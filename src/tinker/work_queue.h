// Works that wait for the computation thread. Those of a model run in the order of their seq_id, those of a
// session that belong to no model in the order of add_now(). Models and sessions take turns, so that a long
// queue of one delays another by one turn. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "tinker/futures.h"
#include "tinker/losses.h"

namespace bough {

struct Work {
  std::string future;  // the id of its result
  int64_t seq_id = 0;
  // Either a forward_backward, which may be computed together with the next ones, or a function.
  std::shared_ptr<const ForwardBackwardRequest> request;
  TinkerLossSettings loss;
  std::function<FutureResult()> run;
  bool changes_weights = false;  // by run()
};

inline Work run_later(std::function<FutureResult()> run, bool changes_weights = false) {
  return {.run = std::move(run), .changes_weights = changes_weights};
}

class ModelQueue {
 public:
  void add_model(const std::string& model, int64_t first_seq_id = 1);
  // Returns false if a work with this seq_id has been taken before, or the model is unknown.
  bool add(const std::string& model, int64_t seq_id, Work work);
  void add_now(const std::string& session, Work work);

  struct Group {
    std::string model;
    std::vector<Work> works;  // several forward_backward works that can be one tree, or one work
  };
  // The next works of models, from each model in turn. Empty if none can run: the queues are empty, or wait
  // for a seq_id.
  Group take();
  // The next work of add_now(), from each session in turn.
  std::optional<Work> take_now();
  // Removes a model and returns its works.
  std::vector<Work> remove_model(const std::string& model);
  void wait_until(std::chrono::steady_clock::time_point time);  // until there may be work

 private:
  struct Model {
    int64_t next = 1;
    std::map<int64_t, Work> waiting;
  };
  mutable Mutex mutex_;
  CondVar changed_;
  std::map<std::string, Model> models_ GUARDED_BY(mutex_);
  std::map<std::string, std::deque<Work>> now_ GUARDED_BY(mutex_);  // by session; none is empty
  bool has_new_ GUARDED_BY(mutex_) = false;                         // a work was added since the last take()
  std::string last_ GUARDED_BY(mutex_);                             // the model whose works were taken last
  std::string last_session_ GUARDED_BY(mutex_);
};

}  // namespace bough
