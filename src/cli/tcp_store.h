// Connects ranks without MPI, through torch's TCPStore (torch/csrc/distributed/c10d/TCPStore.hpp). torchrun's
// workers use it, and so do the plain processes that `bough --ranks N` starts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/store_communicator.h"

namespace bough {

// A rank by its environment variables, which torchrun or a person sets:
//   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//   TORCHELASTIC_RESTART_COUNT             number of restarts so far
//   TORCHELASTIC_USE_AGENT_STORE=True      the launcher holds the store; otherwise rank 0 does
struct StoreEnvironment {
  StoreRank rank;
  std::string host;
  uint16_t port = 0;
  std::string attempt;  // TORCHELASTIC_RESTART_COUNT; part of all keys, so that attempts do not mix
};
// nullopt if RANK or WORLD_SIZE is missing, or WORLD_SIZE is 1. Throws UserError if a variable is not a
// number in its range, or if MASTER_ADDR or MASTER_PORT is missing.
std::optional<StoreEnvironment> store_environment();

// A communicator of all WORLD_SIZE ranks. Waits at most five minutes for the store. Throws UserError if the
// store is not found, or cannot be created at this address.
std::unique_ptr<Communicator> store_communicator(const StoreEnvironment& environment);

// A store at a free port of the loopback address, for processes of this machine only. The store ends with the
// object. hold_store() throws IoError if the store cannot be created.
class HeldStore {
 public:
  virtual ~HeldStore() = default;
  virtual uint16_t port() const = 0;
};
std::unique_ptr<HeldStore> hold_store();

}  // namespace bough
