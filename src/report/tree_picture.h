// The prefix tree of a batch as an icicle: width = number of sequences, height = depth in tokens, roots at
// the top.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace bough {

// A node of the picture: a run of tokens that belong to the same sequences. Nodes are in preorder: parents
// before children, siblings in the order of drawing.
struct TreePictureNode {
  int64_t parent = -1;         // index; -1: begins at position 0
  int64_t begin = 0, end = 0;  // positions [begin, end); begin is the parent's end
  int64_t num_sequences = 0;   // sequences through this node, those that end in it included
  std::vector<std::pair<int64_t, int64_t>>
      trained;  // position ranges inside [begin, end) that are trained on
};

struct TreePicture {
  std::string title;  // "step 40"
  std::vector<TreePictureNode> nodes;
  int64_t num_tokens = 0;  // tokens of the flat batch
};

// Returns a <figure>, or "" if the tree has no nodes. The page's script adds hover text, and zooms into a
// subtree on a click. Nodes narrower than a fiftieth of a pixel are left out, and so are all but the 20,000
// widest nodes. The caption says how many were left out. Throws InternalError if the nodes are not a forest
// in preorder.
std::string tree_figure(const TreePicture& tree);

}  // namespace bough
