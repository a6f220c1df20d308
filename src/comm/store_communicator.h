// A group of ranks that communicate through a key-value store, for ranks that MPI did not start. The sender
// sets a key of its own, the receivers read it, and the last reader erases it.
//
//   PREFIX/N/FROM.i     piece i of the data that rank FROM sends to all in the group's N-th collective
//   PREFIX/N/FROM>TO.i  piece i of the data for rank TO alone, which erases it
//   PREFIX/N/read       number of ranks that have read all data for all ranks
//   alive/RANK          a counter that grows while the rank lives; at its end "gone" or "failed"
//
// All bytes go through the store, and an all-reduce sends every rank's whole buffer. Use it for texts, ids
// and metrics of the host, and for small tests on CPUs. Use NCCL for gradients on GPUs, MPI for gradients on
// CPUs.
//
// A thread of each rank updates alive/RANK twice a second and checks the other ranks. A call that waits
// throws IoError if a rank has failed, or has not updated its key for StoreRank::silence_seconds.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace bough {

// Must be thread-safe. Functions throw IoError if the store is gone, or does not answer within
// StoreRank::silence_seconds.
class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual bool has(const std::string& key) = 0;
  // The keys must exist.
  virtual std::vector<std::string> get(const std::vector<std::string>& keys) = 0;
  virtual int64_t add(const std::string& key, int64_t count) = 0;  // atomic; returns the new sum; starts at 0
  virtual void erase(const std::string& key) = 0;
};

struct StoreRank {
  int64_t rank = 0, size = 1;
  bool holds_store = false;    // this rank's process must end last
  double silence_seconds = 8;  // a rank that is silent for longer counts as dead
};

// The group of all ranks of a store that only this group uses. The destructor tells the other ranks that this
// rank ends. During an exception it tells them that this rank has failed.
std::unique_ptr<Communicator> store_communicator(std::unique_ptr<KeyValueStore> store, const StoreRank& rank);

}  // namespace bough
