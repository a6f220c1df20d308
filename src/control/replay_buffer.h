// What stands between generation and training, without a model: the gate says how many groups may be begun,
// the buffer keeps the finished ones until they are trained on (algorithms.md, Asynchrony; AReaL,
// section 5.1).
//
//   try_start() ─▶ running ─▶ accept() ─▶ buffer ─▶ take(B) ─▶ trained: set_version(i + 1)
//                     └─ drop_running()      └─ drop_accepted()
//
// Both may be used from several threads: the one that generates and the one that trains. Each has a lock of
// its own and calls nothing while it holds it. Nobody waits inside.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "base/json.h"
#include "data/problems.h"
#include "data/trajectory.h"

namespace bough {

// Samples of one prompt, all ended.
struct FinishedGroup {
  uint64_t id = 0;                   // the order in which groups were begun
  const Problem* problem = nullptr;  // what was asked; none: a plain prompt, never scored
  std::vector<Trajectory> samples;
};

// Bounds staleness: a group may be begun while accepted + running < (i + eta + 1)·B, where i is the trainer's
// version and B the groups of a batch. eta = 0 is synchronous: a batch is begun when the one before it was
// trained on. Groups that finish in the order in which they were begun are then trained on at most eta
// versions later; one that is overtaken by others may be older, because it holds one slot however long it
// runs.
class StalenessGate {
 public:
  // B >= 1, eta >= 0. total_batches: no more is begun than so many batches take; 0: no bound.
  StalenessGate(int64_t batch_groups, int64_t max_staleness, int64_t total_batches = 0);

  // Takes a slot for one more running group, if there is one.
  bool try_start();
  // A running group has finished and will be trained on; it keeps its slot, after training too.
  void accept();
  // A running group comes to nothing; so do n accepted ones that were not trained on. Slots are given back.
  void drop_running();
  void drop_accepted(int64_t n = 1);
  // The trainer's version is i, never less than it was.
  void set_version(int64_t version);
  // As after so many trained steps with so many groups in the buffer, nothing running, and an engine that
  // holds the weights of the last step. A step has used B slots however many groups it trained on.
  void restore(int64_t version, int64_t buffered);

  struct Counts {
    int64_t accepted = 0;  // since the start of the run, those trained on too
    int64_t running = 0;
    int64_t version = 0;
  };
  Counts counts() const;
  void check_integrity() const;

 private:
  int64_t slots() const {
    const int64_t batches = counts_.version + max_staleness_ + 1;
    return (total_batches_ > 0 ? std::min(batches, total_batches_) : batches) * batch_groups_;
  }

  const int64_t batch_groups_, max_staleness_, total_batches_;
  mutable std::mutex mutex_;  // of counts_
  Counts counts_;
};

// Finished groups. Each leaves once, the one begun first before the others.
class ReplayBuffer {
 public:
  // Scored, where it has a problem. No two with one id are in the buffer at a time.
  void put(FinishedGroup group);
  // The n oldest, oldest first; nothing while there are fewer.
  std::optional<std::vector<FinishedGroup>> take(int64_t n);
  int64_t size() const;
  int64_t clear();  // how many there were

  // Groups without their problems: scored ones need them no longer. restore() replaces what is there;
  // UserError where the state is damaged.
  Json save() const;
  void restore(const Json& state);
  void check_integrity() const;

 private:
  mutable std::mutex mutex_;  // of groups_
  std::map<uint64_t, FinishedGroup> groups_;
};

}  // namespace bough
