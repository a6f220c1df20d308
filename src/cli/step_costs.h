// What a training step costs, from shapes alone: operations for the work ratio W, bytes for --memory.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "models/config.h"
#include "tree/plan.h"
#include "tree/prefix_tree.h"

namespace bough {

// B where the user gives none. On a CPU passes of a few hundred tokens stay in cache, and more of them cost little
// but the reading and writing of all parameter gradients once a pass; on a GPU a later issue's cost model chooses.
inline constexpr int64_t kDefaultMaxTokensPerPass = 1024;

// Multiply-adds of the forward pass, counted twice each. Backward is twice that for each of the three terms, so
// ratios of steps are ratios of these.
WorkModel work_model(const ModelConfig& config);

// Peak bytes over weights and gradients of executing a plan: the stack (keys and values in `dtype`, their gradients
// in the accumulator type) for its deepest chain, and the activations that autograd keeps of its largest pass.
// Chunks of logits, workspaces and gradients in flight are not counted: the real peak is somewhat above, so what
// does not fit this surely does not fit.
int64_t estimate_peak_bytes(const ModelConfig& config, at::ScalarType dtype, const Simulation& simulation);

}  // namespace bough
