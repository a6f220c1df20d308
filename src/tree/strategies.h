// The strategies of make_plan (tree/plan.h), each in a file of its own.
#pragma once

#include <map>

#include "tree/plan_builder.h"

namespace bough {

Plan plan_dense(const IndexedTree& flat, int64_t max_tokens_per_pass);  // of build_flat_forest
Plan plan_packed(const PlanRequest& request, const IndexedTree& whole, int64_t max_tokens_per_pass);
Plan plan_path(const IndexedTree& whole, int64_t max_tokens_per_pass);

// Trees of parts of the batch. Neighbouring pass sizes often part it alike: what one plan used, the next finds again.
class PartTrees {
 public:
  void begin_plan() {
    last_ = std::move(own_);
    own_.clear();
  }
  // Stays until the plan after the next begins. part: indices of the request's sequences.
  const IndexedTree& get(std::vector<int64_t> part, const PlanRequest& request, const IndexedTree& whole);

 private:
  std::map<std::vector<int64_t>, IndexedTree> own_, last_;  // of this plan and the one before
};

Plan plan_blocks(const PlanRequest& request, const IndexedTree& whole, int64_t max_tokens_per_pass,
                 PartTrees& parts);

// Lets interior blocks keep attention's outputs, or all activations, where the plan's peak stays within `budget`
// bytes over weights and gradients: the most recomputation saved.
void choose_what_is_kept(Plan& plan, const CostModel& costs, int64_t budget);

}  // namespace bough
