// Draws a batch's prefix tree: as a TreePicture (report/tree_picture.h), and as an HTML page with only that
// picture.
#pragma once

#include <span>
#include <string>

#include "data/trajectory.h"
#include "report/tree_picture.h"
#include "tree/prefix_tree.h"

namespace bough {

// A node of the picture is a run of consecutive tree tokens that have the same sequences in common. `tree`
// must be made of the rollouts' input_ids, in their order. A token counts as trained if any sequence trains
// it.
TreePicture tree_picture(const PrefixTree& tree, std::span<const Trajectory> rollouts,
                         const std::string& title);

// Returns the picture as an HTML page, with the note below it.
std::string tree_page(const PrefixTree& tree, std::span<const Trajectory> rollouts, const std::string& title,
                      const std::string& note);

}  // namespace bough
