// `path` and `dense`: the two strategies that other trainers have.
#include <algorithm>

#include "plan/strategies.h"

namespace bough {

Plan plan_dense(const IndexedTree& flat, int64_t max_tokens_per_pass) {
  Plan plan{"dense", max_tokens_per_pass, {}};
  const auto& tree = *flat.tree;
  PlanBuilder builder(flat, max_tokens_per_pass);
  TokenRange pass{0, 0};
  const auto flush = [&] {
    if (pass.size() > 0) builder.add_leaf({pass});
    pass.begin = pass.end;
  };
  for (int32_t root = 0; root < tree.num_tokens(); root = tree.subtree_end[root]) {
    const int32_t end = tree.subtree_end[root];
    if (end - pass.begin > max_tokens_per_pass) flush();
    if (end - root > max_tokens_per_pass) {
      builder.add_run(root, end, /*is_leaf=*/true);
      builder.close_to(0);
      pass.begin = end;
    }
    pass.end = end;
  }
  flush();
  plan.trees.push_back(builder.finish(flat));
  return plan;
}

namespace {

// Children in the order of Algorithm 1 reversed: internal ones first, those of larger tail before, so that short
// leaves come last, when nothing above needs to be forwarded again for them. A tail is the depth of the leaf that is
// visited last.
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
  auto branches = whole.branches;
  order_for_backward(branches);
  struct Visit {
    int32_t node;
    size_t num_open;  // blocks open above it
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
  plan.trees.push_back(builder.finish(whole));
  return plan;
}

}  // namespace bough
