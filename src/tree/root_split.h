// Where a common path is so short that a pass of its own costs more than computing it again (engine.md 2): the batch
// is cut into several trees that each repeat it.
#pragma once

#include <vector>

#include "tree/plan_builder.h"

namespace bough {

// Groups of sequences (indices into the tree's), each to be planned as a tree of its own with passes of at most
// `max_tokens_per_pass`; together they are all sequences. None where nothing is worth repeating.
std::vector<std::vector<int64_t>> split_short_roots(const IndexedTree& whole, const CostModel& costs,
                                                    int64_t max_tokens_per_pass, int64_t max_tokens_held);

}  // namespace bough
