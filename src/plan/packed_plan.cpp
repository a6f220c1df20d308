// `packed`: trees of at most B tokens, one pass each (papers/tree-training.txt, section 2.2).
#include "plan/packing.h"
#include "plan/strategies.h"

namespace bough {

Plan plan_packed(const PlanRequest& request, const IndexedTree& whole, int64_t max_tokens_per_pass) {
  Plan plan{"packed", max_tokens_per_pass, {}};
  const Packing packing = pack(*whole.tree, whole.branches, max_tokens_per_pass);
  for (const auto& bin : packing.bins) {
    std::vector<TokenSpan> sequences;
    for (const int64_t s : bin.sequences) sequences.push_back(request.sequences[s]);
    std::optional<IndexedTree> own;
    if (packing.bins.size() > 1)
      own = index_tree(build_prefix_tree(sequences), bin.sequences, request, whole.tree.get());
    const IndexedTree& indexed = own ? *own : whole;
    PlanBuilder builder(indexed, max_tokens_per_pass);
    if (const auto count = static_cast<int32_t>(indexed.tree->num_tokens()); count > 0)
      builder.add_leaf({{0, count}});
    plan.trees.push_back(builder.finish(indexed));
  }
  return plan;
}

}  // namespace bough
