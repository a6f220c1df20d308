#include "run/batch_picture.h"

#include "base/error.h"
#include "report/html_text.h"
#include "report/page.h"

namespace bough {

TreePicture tree_picture(const PrefixTree& tree, std::span<const Trajectory> rollouts,
                         const std::string& title) {
  BOUGH_CHECK(tree.num_sequences_total() == static_cast<int64_t>(rollouts.size()), "tree of ",
              tree.num_sequences_total(), " sequences for ", rollouts.size(), " rollouts");
  std::vector<uint8_t> trained(static_cast<size_t>(tree.num_tokens()));
  for (size_t s = 0; s < rollouts.size(); ++s) {
    const std::vector<int32_t> path = tree.path(static_cast<int64_t>(s));
    for (size_t i = 0; i < path.size(); ++i)
      if (rollouts[s].trains(i)) trained[static_cast<size_t>(path[i])] = 1;
  }
  TreePicture picture{title, {}, tree.num_flat_tokens()};
  std::vector<int64_t> node_of(trained.size());
  for (size_t t = 0; t < trained.size(); ++t) {
    const int32_t parent = tree.parent[t], depth = tree.depth[t];
    // If as many sequences pass through a token as through its parent, the token is the parent's only child
    // and no sequence ends at the parent.
    if (parent >= 0 && tree.num_sequences[t] == tree.num_sequences[static_cast<size_t>(parent)]) {
      node_of[t] = node_of[static_cast<size_t>(parent)];
    } else {
      node_of[t] = static_cast<int64_t>(picture.nodes.size());
      picture.nodes.push_back({.parent = parent < 0 ? -1 : node_of[static_cast<size_t>(parent)],
                               .begin = depth,
                               .end = depth,
                               .num_sequences = tree.num_sequences[t]});
    }
    TreePictureNode& node = picture.nodes[static_cast<size_t>(node_of[t])];
    node.end = depth + 1;
    if (!trained[t]) continue;
    if (!node.trained.empty() && node.trained.back().second == depth) ++node.trained.back().second;
    else node.trained.emplace_back(depth, depth + 1);
  }
  return picture;
}

std::string tree_page(const PrefixTree& tree, std::span<const Trajectory> rollouts, const std::string& title,
                      const std::string& note) {
  return "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>" + html_escape(title) +
         "</title><style>" + kPageStyle + "</style><main>" +
         tree_figure(tree_picture(tree, rollouts, title)) + "<p>" + html_escape(note) +
         "</p></main><script>" + kPageScript + "</script></html>\n";
}

}  // namespace bough
