// A group of ranks that communicate through a key-value store, for ranks that MPI did not start. The sender
// writes a new key of the store, the receivers read it, and the last receiver erases it.
//
//   PREFIX/N/FROM.i     piece i of the data that rank FROM sends to all ranks in the group's N-th collective
//   PREFIX/N/FROM>TO.i  piece i of the data for rank TO alone; TO erases it
//   PREFIX/N/read       number of ranks that have read all data addressed to all ranks
//   PREFIX/m/TO.K/FROM>TO.i   piece i of the K-th message (kSend) from rank FROM to rank TO
//   alive/RANK          a counter that grows while the rank lives; when the rank ends, "gone" or "failed"
//
// PREFIX names the group: split() adds to it. All bytes go through the store, and an all-reduce sends every
// rank's whole buffer. Use it for texts, ids and metrics in host memory, and for small tests on CPUs. For
// gradients use NCCL (GPUs) or MPI (CPUs).
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

// The store. Implementations must be thread-safe. Functions throw IoError if the store cannot be reached, or
// does not answer within StoreRank::silence_seconds.
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
  double silence_seconds = 8;  // a rank that has not updated its alive key for longer counts as dead
};

// Returns the group of all ranks that use `store`; no other group may use the store. The destructor tells the
// other ranks that this rank ends, or, if an exception is in flight, that it has failed.
std::unique_ptr<Communicator> store_communicator(std::unique_ptr<KeyValueStore> store, const StoreRank& rank);

}  // namespace bough
