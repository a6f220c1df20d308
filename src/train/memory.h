// Bytes that executing a plan takes over weights and gradients, from shapes alone.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "models/config.h"
#include "tree/plan.h"

namespace bough {

struct MemoryEstimate {
  int64_t stack = 0;  // keys and values of the deepest chain, and their gradients in the accumulator type
  int64_t activations = 0;  // what autograd keeps of the largest pass
  int64_t temporaries = 0;  // gradients in flight, attention's tiles, one chunk of the head: an upper bound
  int64_t total() const { return stack + activations + temporaries; }
};

// An upper bound: the measured peak stays below total().
MemoryEstimate estimate_memory(const ModelConfig& config, at::ScalarType dtype, const Simulation& simulation);

}  // namespace bough
