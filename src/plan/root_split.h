// Where a common path is so short that a pass of its own costs more than computing it again (engine.md 2): the batch
// is cut into several trees that each repeat it.
#pragma once

#include <vector>

#include "plan/tree_part.h"

namespace bough {

// Parts to be planned as trees of their own with passes of at most `max_tokens_per_pass`; together they are all
// sequences. A part with a path either fits a pass or has one node. None where nothing is worth repeating.
std::vector<TreePart> split_short_roots(const IndexedTree& whole, const PassCosts& costs,
                                        int64_t max_tokens_per_pass, int64_t max_tokens_held);

}  // namespace bough
