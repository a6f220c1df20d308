// `path` and `dense`: the two strategies that other trainers have.
#include <algorithm>

#include "tree/strategies.h"

namespace bough {

Plan plan_dense(const PlanRequest& request, int64_t max_tokens_per_pass) {
  Plan plan{"dense", max_tokens_per_pass, {}};
  const auto indexed = index_tree(build_flat_forest(request.sequences), all_sequences(request), request);
  const auto& tree = *indexed.tree;
  PlanBuilder builder(indexed, max_tokens_per_pass);
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
  plan.trees.push_back(builder.finish());
  return plan;
}

namespace {

// Children in the order of Algorithm 1 reversed: internal ones first, those of larger tail before, so that short
// leaves come last, when nothing above needs to be forwarded again for them. A tail is the depth of the leaf that is
// visited last.
void order_for_backward(const PrefixTree& tree, Stretches& stretches) {
  auto& list = stretches.list;
  std::vector<int64_t> tail(list.size());
  const auto order = [&](std::vector<int32_t>& children) {
    std::stable_sort(children.begin(), children.end(), [&](int32_t a, int32_t b) {
      return list[a].is_leaf() != list[b].is_leaf() ? !list[a].is_leaf() : tail[a] > tail[b];
    });
  };
  for (auto i = static_cast<int32_t>(list.size()) - 1; i >= 0; --i) {
    order(list[i].children);
    tail[i] = list[i].is_leaf() ? tree.depth[list[i].end - 1] + 1 : tail[list[i].children.back()];
  }
  order(stretches.roots);
}

}  // namespace

Plan plan_path(const PlanRequest&, const IndexedTree& whole, int64_t max_tokens_per_pass) {
  Plan plan{"path", max_tokens_per_pass, {}};
  PlanBuilder builder(whole, max_tokens_per_pass);
  auto stretches = make_stretches(*whole.tree);
  order_for_backward(*whole.tree, stretches);
  struct Visit {
    int32_t stretch;
    size_t num_open;  // blocks open above it
  };
  std::vector<Visit> todo;
  for (auto it = stretches.roots.rbegin(); it != stretches.roots.rend(); ++it) todo.push_back({*it, 0});
  while (!todo.empty()) {
    const auto [index, num_open] = todo.back();
    todo.pop_back();
    const auto& stretch = stretches.list[index];
    builder.close_to(num_open);
    builder.add_run(stretch.begin, stretch.end, stretch.is_leaf());
    for (auto it = stretch.children.rbegin(); it != stretch.children.rend(); ++it)
      todo.push_back({*it, builder.num_open()});
  }
  plan.trees.push_back(builder.finish());
  return plan;
}

}  // namespace bough
