// The memory plan of a run on a GPU: what every part of the run takes, computed from settings and
// config.json alone before any weight is loaded. It decides what the settings leave open (the memory of keys
// and values and of training passes, a critic of its own, offloading) and refuses a run that would not fit,
// with the smallest change that makes it fit.
//
//   total = used by others and the CUDA context + reserve
//         + weights, gradients, optimizer, copies for generation     (fixed by the settings)
//         + generation: logits, activations, graphs, library workspaces
//         + keys and values + training passes                        (share what is left)
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "cost/device_profile.h"
#include "models/decoder_cost.h"
#include "run/run_settings.h"

namespace bough {

// Memory that each rank of a run may use: with several ranks, the least of all.
struct RunMemory {
  int64_t device_total = 0;
  int64_t device_free = 0;  // without what other processes and this process's CUDA context take
  int64_t host_free = 0;    // this rank's part of what its host has
  int64_t ranks_per_host = 1;
};

// The memory of a GPU that is not there: all of the profile's memory, minus that of a CUDA context. The host
// is assumed to have enough.
RunMemory memory_of_profile(const DeviceProfile& device);

struct MemoryRow {
  std::string what;
  int64_t device_bytes = 0, host_bytes = 0;
  std::string note;
};

struct MemoryPlan {
  std::vector<MemoryRow> rows;  // in the order of the sum above; the last two are keys and values, and passes
  RunMemory memory;
  // The plan's decisions. With kv_bytes and pass_bytes the device is full up to the reserve, unless the run
  // cannot use as much.
  int64_t kv_bytes = 0;
  int64_t pass_bytes = 0;  // over weights, gradients and optimizers
  bool offloads = false;
  bool shares_backbone = false;
  int64_t critic_bytes = 0;  // of a critic of its own
  int64_t least_bytes = 0;   // of the device: with the smallest keys and values and passes that suffice
  std::string shortage;      // why the run does not fit, with the remedy; empty if it fits

  int64_t device_bytes() const;
  int64_t host_bytes() const;
};

// Plans the memory of one of `num_ranks` ranks that train. `profile`: of the device; only its kernels and
// rates count, not its memory. `resumed_critic_shares`: the decision of the process that began the run.
// Throws UserError if a config.json is missing or wrong.
MemoryPlan plan_memory(const RunSettings& settings, const DeviceProfile& profile, const RunMemory& memory,
                       int64_t num_ranks, std::optional<bool> resumed_critic_shares = {});

// Returns the settings with the plan's decisions in place of `auto` and null. Throws UserError with the table
// and the remedy if the run does not fit.
RunSettings with_memory_plan(const RunSettings& settings, const MemoryPlan& plan);

std::string memory_table(const MemoryPlan& plan);
Json to_json(const MemoryPlan& plan);

}  // namespace bough
