#include "cli/tree_page.h"

#include "report/html_text.h"
#include "report/page.h"

namespace bough {

namespace {

// One flag a tree token: some sequence trains it.
std::vector<uint8_t> trained_tree_tokens(const PrefixTree& tree, const RolloutBatch& batch) {
  std::vector<uint8_t> trained(static_cast<size_t>(tree.num_tokens()));
  for (size_t s = 0; s < batch.rollouts.size(); ++s) {
    const std::vector<int32_t> path = tree.path(static_cast<int64_t>(s));
    for (size_t i = 0; i < path.size(); ++i)
      if (batch.rollouts[s].trains(i)) trained[path[i]] = 1;
  }
  return trained;
}

}  // namespace

TreePicture tree_picture(const PrefixTree& tree, const RolloutBatch& batch, const std::string& title) {
  const auto trained = trained_tree_tokens(tree, batch);
  TreePicture picture;
  picture.title = title;
  picture.num_tokens = tree.num_flat_tokens();
  std::vector<int64_t> node_of(static_cast<size_t>(tree.num_tokens()));
  for (int32_t t = 0; t < tree.num_tokens(); ++t) {
    const int32_t parent = tree.parent[t];
    // A child with its parent's sequences continues its node: the parent has no other child and no end.
    if (parent >= 0 && tree.num_sequences[t] == tree.num_sequences[parent]) {
      node_of[t] = node_of[parent];
    } else {
      node_of[t] = static_cast<int64_t>(picture.nodes.size());
      picture.nodes.push_back({.parent = parent < 0 ? -1 : node_of[parent],
                               .begin = tree.depth[t],
                               .end = tree.depth[t],
                               .num_sequences = tree.num_sequences[t]});
    }
    auto& node = picture.nodes[static_cast<size_t>(node_of[t])];
    node.end = tree.depth[t] + 1;
    if (!trained[t]) continue;
    if (!node.trained.empty() && node.trained.back().second == tree.depth[t]) ++node.trained.back().second;
    else node.trained.emplace_back(tree.depth[t], tree.depth[t] + 1);
  }
  return picture;
}

std::string tree_page(const PrefixTree& tree, const RolloutBatch& batch, const std::string& title) {
  return "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>" + html_escape(title) +
         "</title><style>" + kPageStyle + "</style><main>" + tree_figure(tree_picture(tree, batch, title)) +
         "</main><script>" + kPageScript + "</script></html>\n";
}

}  // namespace bough
