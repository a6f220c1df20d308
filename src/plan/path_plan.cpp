// Strategy `path`: DTA, one path at a time (papers/areal-dta.txt, Algorithms 1-3).
#include <algorithm>

#include "plan/plan_builder.h"
#include "plan/plan_strategies.h"

namespace bough {

namespace {

// Orders children in DTA's order of execution, the reverse order of Algorithm 1: internal children first,
// larger tail first, then leaves. The tail of a node is the depth of the leaf that is visited last below it.
void order_for_backward(BranchTree& branches) {
  const auto& nodes = branches.nodes;
  std::vector<int64_t> tail(nodes.size());
  for (int32_t n = branches.size() - 1; n >= -1; --n) {
    const auto children = branches.children(n);
    std::stable_sort(children.begin(), children.end(), [&](int32_t a, int32_t b) {
      return nodes[a].is_leaf() != nodes[b].is_leaf() ? !nodes[a].is_leaf() : tail[a] > tail[b];
    });
    if (n >= 0) tail[n] = nodes[n].is_leaf() ? nodes[n].depth : tail[children.back()];
  }
}

}  // namespace

Plan plan_path(const IndexedTree& whole, int64_t max_tokens_per_pass) {
  Plan plan{"path", max_tokens_per_pass, {}};
  PlanBuilder builder(whole, max_tokens_per_pass);
  auto branches = whole.branches();
  order_for_backward(branches);
  struct Visit {
    int32_t node;
    size_t num_open;  // blocks open above this node
  };
  std::vector<Visit> todo = {{-1, 0}};
  while (!todo.empty()) {
    const auto [index, num_open] = todo.back();
    todo.pop_back();
    builder.close_to(num_open);
    if (index >= 0) {
      const auto& node = branches.nodes[index];
      builder.add_run(node.begin, node.end, node.is_leaf());
    }
    const auto children = branches.children(index);
    for (auto it = children.rbegin(); it != children.rend(); ++it) todo.push_back({*it, builder.num_open()});
  }
  auto& planned = plan.trees.emplace_back(builder.finish());
  planned.tree = whole.shared_tree();
  planned.sequences = whole.all_sequences();
  return plan;
}

}  // namespace bough
