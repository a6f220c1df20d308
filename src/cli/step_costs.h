// What a training step costs, from shapes alone: operations for the work ratio W.
#pragma once

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

}  // namespace bough
