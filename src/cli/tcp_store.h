// Where ranks meet without MPI: torch's TCPStore (torch/csrc/distributed/c10d/TCPStore.hpp), as torchrun has
// its workers meet, and as `bough --ranks N` has its own where it starts them as plain processes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/store_communicator.h"

namespace bough {

// What the environment says of a rank: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them
// or a person does; who starts ranks again counts TORCHELASTIC_RESTART_COUNT, and holds the store itself
// where TORCHELASTIC_USE_AGENT_STORE is True. Else rank 0 holds it. None where RANK or WORLD_SIZE is missing,
// or there is but one. UserError: one of them is no number, or the address is missing.
struct StoreEnvironment {
  StoreRank rank;
  std::string host;
  uint16_t port = 0;
  std::string attempt;  // keys of one attempt begin with it
};
std::optional<StoreEnvironment> store_environment();

// All ranks of the environment. Waits for the store for five minutes at most. UserError: it is not found, or
// cannot be held there.
std::unique_ptr<Communicator> store_communicator(const StoreEnvironment& environment);

// A store for processes of this machine, which others cannot reach, at a port that is free; gone with the
// object.
class HeldStore {
 public:
  virtual ~HeldStore() = default;
  virtual uint16_t port() const = 0;
};
std::unique_ptr<HeldStore> hold_store();

}  // namespace bough
