// The picture of a plan: its trees as icicles (width = sequences, height = depth in tokens, roots at the
// top), coloured by block.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bough {

// A run of tokens of one path that the same sequences share and one block holds. Nodes stand in preorder:
// parents before children, siblings in the order in which they are drawn.
struct PlanPictureNode {
  int64_t parent = -1;         // index in the tree's nodes; -1: begins at position 0
  int64_t begin = 0, end = 0;  // positions [begin, end); begin is the parent's end
  int64_t first_sequence = 0;  // of its tree's, numbered from left to right; inside the parent's
  int64_t num_sequences = 0;
  int64_t block = 0;  // index in PlanPicture::blocks
};

struct PlanPictureTree {
  std::vector<PlanPictureNode> nodes;
};

// A block has a pass forward and one backward, or both at once (a leaf block).
struct PlanPictureBlock {
  // Beside keys and values; of interior blocks.
  enum class Keep { kNothing, kAttention, kLayerInputs, kActivations };
  bool interior = false;
  Keep keep = Keep::kNothing;
  int64_t num_tokens = 0;
  int64_t forward_pass = 0, backward_pass = 0;  // counted from 1 in the order of execution; 0: never run
};

struct PlanPicture {
  std::string headline;  // "blocks: 14 passes of at most 1,024 tokens; ..."
  std::vector<PlanPictureTree> trees;
  std::vector<PlanPictureBlock> blocks;  // in the order of their forward passes
};

// A standalone SVG file of at most about 2 MB, however large the plan. Where there are more sequences than
// columns of a visible width, evenly spread ones are drawn; blocks too small to be seen share a colour with
// those that run next to them. The caption says how many of either. InternalError when the nodes are not as
// above.
std::string plan_svg(const PlanPicture& plan);

}  // namespace bough
