// The picture of a batch's prefix tree: nodes for report/tree_picture.h, and a page with nothing else on it.
#pragma once

#include <string>

#include "cli/rollout_batch.h"
#include "report/tree_picture.h"
#include "tree/prefix_tree.h"

namespace bough {

// One node a run of tokens that the same sequences share. A token is trained where any sequence trains it.
TreePicture tree_picture(const PrefixTree& tree, const RolloutBatch& batch, const std::string& title);

std::string tree_page(const PrefixTree& tree, const RolloutBatch& batch, const std::string& title);

}  // namespace bough
