// The picture of a plan: each tree as an icicle (width = number of sequences, height = depth in tokens, roots
// at the top), coloured by plan block.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bough {

// A node of the picture: a run of tokens of one path. All its tokens belong to the same sequences and to one
// plan block. Nodes are in preorder: parents before children, siblings in the order of drawing.
struct PlanPictureNode {
  int64_t parent = -1;         // index in the tree's nodes; -1: begins at position 0
  int64_t begin = 0, end = 0;  // token positions [begin, end); begin is the parent's end
  int64_t first_sequence = 0;  // numbered from left to right in the tree; a parent has those of its children
  int64_t num_sequences = 0;
  int64_t block = 0;  // index in PlanPicture::blocks
};

struct PlanPictureTree {
  std::vector<PlanPictureNode> nodes;
};

// A plan block. An interior block has a forward pass and a backward pass. A leaf block has one for
// forward and backward.
struct PlanPictureBlock {
  // The activations of an interior block that stay in memory, in addition to keys and values.
  enum class RecomputePolicy { kNothing, kAttention, kLayerInputs, kActivations };
  bool interior = false;
  RecomputePolicy keep = RecomputePolicy::kNothing;
  int64_t num_tokens = 0;
  int64_t forward_pass = 0, backward_pass = 0;  // counted from 1 in the order of execution; 0: never runs
};

struct PlanPicture {
  std::string headline;  // "blocks: 14 passes of at most 1,024 tokens; ..."
  std::vector<PlanPictureTree> trees;
  std::vector<PlanPictureBlock> blocks;  // in the order of their forward passes
};

// Returns a standalone SVG file of at most about 2 MB, for any size of plan. If not all sequences fit at a
// visible width, evenly spaced ones are drawn. Blocks that are too small to be seen have one colour with
// blocks that run before or after them. The caption says how many sequences are drawn and how many blocks
// have a common colour. Throws InternalError if the nodes break the rules of PlanPictureNode.
std::string plan_svg(const PlanPicture& plan);

}  // namespace bough
