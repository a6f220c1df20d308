// The strategies of make_plan (tree/plan.h), each in a file of its own.
#pragma once

#include "tree/plan_builder.h"

namespace bough {

Plan plan_dense(const IndexedTree& flat, int64_t max_tokens_per_pass);  // of build_flat_forest
Plan plan_packed(const PlanRequest& request, const IndexedTree& whole, int64_t max_tokens_per_pass);
Plan plan_path(const IndexedTree& whole, int64_t max_tokens_per_pass);
Plan plan_blocks(const PlanRequest& request, const IndexedTree& whole, int64_t max_tokens_per_pass);

// Lets interior blocks keep attention's outputs, or all activations, where the plan's peak stays within `budget`
// bytes over weights and gradients: the most recomputation saved.
void choose_what_is_kept(Plan& plan, const CostModel& costs, int64_t budget);

}  // namespace bough
