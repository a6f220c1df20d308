// Ranks that share nothing but a key-value store: where no MPI starts them. What one says it sets under a key
// of its own, the others get it, and the last to have it erases it.
//
//   PREFIX/N/FROM.i     piece i of what rank FROM says to all in the group's N-th collective
//   PREFIX/N/FROM>TO.i  of what it says to rank TO alone, who erases it
//   PREFIX/N/read       how many have read all that was said to all
//   alive/RANK          counts up while the rank lives; then "gone", or "failed"
//
// All bytes go through the store, all-reduces as N whole buffers: for the host's texts, ids and metrics, and
// for small tests on CPUs. Gradients of GPUs go by NCCL; those of CPUs are for MPI.
//
// A thread of each rank says twice a second that it lives and looks whether the others do. Who waits for a
// rank that has failed, or has been silent for StoreRank::silence_seconds, throws IoError.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace bough {

// Called by several threads at once. IoError where the store is gone, or does not answer within
// StoreRank::silence_seconds.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual bool has(const std::string& key) = 0;
  // Of those that are there.
  virtual std::vector<std::string> get(const std::vector<std::string>& keys) = 0;
  virtual int64_t add(const std::string& key, int64_t count) = 0;  // at once; the sum, from 0 on
  virtual void erase(const std::string& key) = 0;
};

struct StoreRank {
  int64_t rank = 0, size = 1;
  bool holds_store = false;    // its process ends last
  double silence_seconds = 8;  // after which another counts as dead
};

// All ranks of a store that nobody else uses. Destroyed in order it says goodbye to the others.
std::unique_ptr<Communicator> store_communicator(std::unique_ptr<KeyValueStore> store, const StoreRank& rank);

}  // namespace bough
