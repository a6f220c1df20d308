// The prefix tree of a batch as an icicle: width = sequences, height = depth in tokens, roots at the top.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace bough {

// A run of tokens that the same sequences share. Nodes stand in preorder: parents before children, siblings
// in the order in which they are drawn.
struct TreePictureNode {
  int64_t parent = -1;         // index; -1: begins at position 0
  int64_t begin = 0, end = 0;  // positions [begin, end); begin is the parent's end
  int64_t num_sequences =
      0;  // that pass through it; those that end here are num_sequences minus the children's
  std::vector<std::pair<int64_t, int64_t>>
      trained;  // position ranges inside [begin, end) that are trained on
};

struct TreePicture {
  std::string title;  // "step 40"
  std::vector<TreePictureNode> nodes;
  int64_t num_tokens = 0;  // of the flat batch
};

// A <figure>; "" for a tree without nodes. The page's script adds hover text and zooming into a subtree by
// click. InternalError when the nodes are not a preorder forest as above. Nodes too narrow to be seen (less
// than a fiftieth of a pixel, or beyond the 20,000 widest) are left out and counted in the caption.
std::string tree_figure(const TreePicture& tree);

}  // namespace bough
