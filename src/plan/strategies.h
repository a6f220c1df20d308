// The strategies of make_plan (plan/plan.h), each in a file of its own.
#pragma once

#include "plan/plan_builder.h"
#include "plan/tree_part.h"

namespace bough {

Plan plan_dense(const IndexedTree& flat, int64_t max_tokens_per_pass);  // of build_flat_forest
Plan plan_packed(const PlanRequest& request, const IndexedTree& whole, int64_t max_tokens_per_pass);
Plan plan_path(const IndexedTree& whole, int64_t max_tokens_per_pass);

// `blocks` before its trees are built, which only the plan that is chosen needs.
struct BlocksDraft {
  Plan plan;                    // its trees have blocks and steps
  std::vector<TreePart> parts;  // one a tree; none: the only tree is the whole one
  bool fits = true;             // else it was given up: its peak is above what was asked for
};
// most_bytes: where given, with the request's costs: plans of a larger peak are given up, most of them early.
BlocksDraft draft_blocks(const PlanRequest& request, const IndexedTree& whole, PartReader& parts,
                         int64_t max_tokens_per_pass, std::optional<int64_t> most_bytes = {});
Plan finish_blocks(BlocksDraft draft, const PlanRequest& request, const IndexedTree& whole,
                   PartReader& parts);

// Lets interior blocks keep attention's outputs, or all activations, where the plan's peak stays within `budget`
// bytes over weights and gradients: the most recomputation saved.
void choose_what_is_kept(Plan& plan, const PassCosts& costs, int64_t budget);

}  // namespace bough
