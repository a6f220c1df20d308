// The geometry and colours of plan_svg, without text and markup.
// - If there are too many sequences for visible columns, evenly spaced sequences are drawn.
// - Nodes of one plan block that touch in the picture get one outline.
// - Plan blocks that touch in the picture get different colours.
#pragma once

#include <cstdint>
#include <vector>

#include "report/plan_picture.h"

namespace bough {

inline constexpr int kNumLeafColours = 6, kNumInteriorColours = 5;

struct PlanBox {
  double left = 0, right = 0, top = 0, bottom = 0;  // pixels
  double width() const { return right - left; }
  double height() const { return bottom - top; }
};

// Plan blocks that have one colour: one block, or several that are too small to be distinguished. Blocks are
// numbered from 1 in the order of their forward passes. Blocks that never run have no number.
struct PlanBand {
  int64_t first_number = 0, last_number = 0;  // both 0: this band has the blocks that never run
  int64_t num_blocks = 0;
  int64_t num_tokens = 0;
  int64_t first_pass = 0, last_pass = 0;
  int leaf_colour = 0, interior_colour = 0;
};

struct PlanShape {
  std::vector<PlanBox> strips;  // from left to right; each strip touches the previous one
  int64_t band = 0;
  bool interior = false;
  PlanPictureBlock::RecomputePolicy keep = PlanPictureBlock::RecomputePolicy::kNothing;  // if interior
  int64_t num_tokens = -1;  // tokens of the drawn node; -1 if several nodes are drawn as one
  int64_t begin = 0, end = 0;
  int64_t first_sequence = 0, last_sequence = 0;  // sequence numbers, from left to right over all trees
  int64_t first_tree = 0, last_tree = 0;
};

struct PlanLayout {
  std::vector<PlanShape> shapes;
  std::vector<PlanBand> bands;
  std::vector<PlanBox> trees;  // one box per tree; width 0 if none of its sequences is drawn
  int64_t num_sequences = 0, num_sequences_drawn = 0;
  int64_t depth = 0;       // position of the deepest token, plus 1
  int64_t num_merged = 0;  // number of blocks that have their colour in common with other blocks
  int64_t num_never_run = 0;
};

// Lays the plan out in [0, width] x [0, height], in pixels. Throws InternalError if the nodes break the rules
// of PlanPictureNode.
PlanLayout lay_out(const PlanPicture& plan, double width, double height);

// Returns round numbers (1, 2 or 5 times a power of ten) inside [low, high]. They divide the range into at
// most `most` parts.
std::vector<double> axis_ticks(double low, double high, int most);

}  // namespace bough
