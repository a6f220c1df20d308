// What a training step costs, from shapes alone: operations for the work ratio W.
#pragma once

#include <cstdint>

#include "models/config.h"
#include "tree/plan.h"
#include "tree/prefix_tree.h"

namespace bough {

// B where the user gives none. Smaller passes stay in cache and hold less memory, but what a path has beyond
// one pass is computed forward twice; a thousand tokens hold most responses in one pass.
inline constexpr int64_t kDefaultMaxTokensPerPass = 1024;

// Multiply-adds of the forward pass, counted twice each. Backward is twice that for each of the three terms,
// so ratios of steps are ratios of these.
WorkModel work_model(const ModelConfig& config);

}  // namespace bough
