// What `dense` and `packed` would do, as simulate() says of their plans, bit for bit, but without the plans: those hold
// trees of their own, which spell a shared token again for each tree, so that a batch of ten thousand nested prefixes
// would take gigabytes only to learn that it is better shared. `auto` prices both so and builds what it takes.
#pragma once

#include <limits>

#include "plan/indexed_tree.h"
#include "plan/packing.h"

namespace bough {

// O(N) reads of flags, O(passes) otherwise. Above most_bytes or most_seconds it says only that it is above.
Simulation simulate_dense(const PlanRequest& request, int64_t max_tokens_per_pass,
                          std::optional<int64_t> most_bytes = {},
                          double most_seconds = std::numeric_limits<double>::infinity());

// whole: the tree of all of the request's sequences, that was packed. O(nodes of the bins); with flags O(N).
Simulation simulate_packed(const PlanRequest& request, const IndexedTree& whole, const Packing& packing);

}  // namespace bough
