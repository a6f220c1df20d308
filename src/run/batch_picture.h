// A batch's prefix tree as the picture of report/tree_picture.h, and as a page with nothing else on it.
#pragma once

#include <span>
#include <string>

#include "data/trajectory.h"
#include "report/tree_picture.h"
#include "tree/prefix_tree.h"

namespace bough {

// Each node is a run of tokens that the same sequences share; `tree` is of the rollouts' input_ids, in their
// order. A token counts as trained where any sequence trains it.
TreePicture tree_picture(const PrefixTree& tree, std::span<const Trajectory> rollouts,
                         const std::string& title);

// The picture as a page, with the note as a sentence below it.
std::string tree_page(const PrefixTree& tree, std::span<const Trajectory> rollouts, const std::string& title,
                      const std::string& note);

}  // namespace bough
