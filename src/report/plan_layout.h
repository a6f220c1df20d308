// Where plan_svg draws what: evenly spread sequences where there are too many, one outline for neighbours of
// one block, and colours that differ between neighbours. No text and no markup.
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

// Blocks that share a colour: one, or several too small to be told apart. Numbers count the blocks that run,
// from 1, in the order of their forward passes.
struct PlanBand {
  int64_t first_number = 0, last_number = 0;  // 0: the blocks that never run
  int64_t num_blocks = 0;
  int64_t num_tokens = 0;
  int64_t first_pass = 0, last_pass = 0;
  int leaf_colour = 0, interior_colour = 0;
};

struct PlanShape {
  std::vector<PlanBox> strips;  // from left to right, each touching the one before it
  int64_t band = 0;
  bool interior = false;
  PlanPictureBlock::Keep keep = PlanPictureBlock::Keep::kNothing;  // of interior ones
  int64_t num_tokens = -1;  // of the node drawn; -1 where several are drawn as one
  int64_t begin = 0, end = 0;
  int64_t first_sequence = 0, last_sequence = 0;  // of the plan's, from left to right
  int64_t first_tree = 0, last_tree = 0;
};

struct PlanLayout {
  std::vector<PlanShape> shapes;
  std::vector<PlanBand> bands;
  std::vector<PlanBox> trees;  // of each tree; width 0 where none of its sequences is drawn
  int64_t num_sequences = 0, num_sequences_drawn = 0;
  int64_t depth = 0;       // the deepest token's, plus 1
  int64_t num_merged = 0;  // blocks that share a colour with others
  int64_t num_never_run = 0;
};

// Fills [0, width] x [0, height].
PlanLayout lay_out(const PlanPicture& plan, double width, double height);

}  // namespace bough
