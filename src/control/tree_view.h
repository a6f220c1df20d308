// A batch's prefix tree as the picture of report/tree_picture.h.
#pragma once

#include <span>
#include <string>

#include "report/tree_picture.h"
#include "tree/prefix_tree.h"
#include "data/rollout_file.h"

namespace bough {

// One node a run of tokens that the same sequences share; `tree` is of the rollouts' input_ids, in their
// order. A token counts as trained where any sequence trains it.
TreePicture tree_picture(const PrefixTree& tree, std::span<const Trajectory> rollouts, const std::string& title);

}  // namespace bough
