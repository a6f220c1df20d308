#include "cli/plan_page.h"

#include <vector>

namespace bough {

namespace {

PlanPictureBlock::RecomputePolicy keep_of(const Block& block) {
  switch (block.keep) {
    case RecomputePolicy::kKeysValues: return PlanPictureBlock::RecomputePolicy::kNothing;
    case RecomputePolicy::kAttention: return PlanPictureBlock::RecomputePolicy::kAttention;
    case RecomputePolicy::kLayerInputs:
    case RecomputePolicy::kLayerInputsAndAttention:
    case RecomputePolicy::kLayerInputsOnHost: return PlanPictureBlock::RecomputePolicy::kLayerInputs;
    case RecomputePolicy::kActivations: return PlanPictureBlock::RecomputePolicy::kActivations;
  }
  return PlanPictureBlock::RecomputePolicy::kNothing;
}

// Appends the tree's plan blocks to `picture` and numbers their passes in plan order, from num_passes + 1.
// Returns each block's index in the picture.
std::vector<int64_t> add_blocks(const PlannedTree& planned, int64_t& num_passes, PlanPicture& picture) {
  std::vector<int64_t> index(planned.blocks.size(), -1);
  for (const auto& step : planned.steps) {
    const Block& block = planned.blocks[static_cast<size_t>(step.block)];
    if (step.kind != Step::Kind::kBackward) {
      index[static_cast<size_t>(step.block)] = static_cast<int64_t>(picture.blocks.size());
      picture.blocks.push_back(
          {.interior = block.interior, .keep = keep_of(block), .num_tokens = block.num_tokens});
    }
    if (!block.needed) continue;
    ++num_passes;
    auto& sampled = picture.blocks[static_cast<size_t>(index[static_cast<size_t>(step.block)])];
    if (step.kind != Step::Kind::kBackward) sampled.forward_pass = num_passes;
    if (step.kind != Step::Kind::kForward) sampled.backward_pass = num_passes;
  }
  return index;
}

PlanPictureTree picture_of(const PlannedTree& planned, const std::vector<int64_t>& block_index) {
  const PrefixTree& tree = *planned.tree;
  std::vector<int32_t> block_of(static_cast<size_t>(tree.num_tokens()));
  for (size_t b = 0; b < planned.blocks.size(); ++b)
    for (const auto& range : planned.blocks[b].ranges)
      for (int32_t t = range.begin; t < range.end; ++t) block_of[t] = static_cast<int32_t>(block_index[b]);

  PlanPictureTree picture;
  std::vector<int32_t> node_of(static_cast<size_t>(tree.num_tokens()));
  std::vector<int64_t> next;  // by node: the first sequence of its next child
  int64_t next_root = 0;
  for (int32_t t = 0; t < tree.num_tokens(); ++t) {
    const int32_t parent = tree.parent[t];
    // If a token and its parent are in equally many sequences, the parent has no other child, and no sequence
    // ends there.
    if (parent >= 0 && tree.num_sequences[t] == tree.num_sequences[parent] &&
        block_of[t] == block_of[parent]) {
      node_of[t] = node_of[parent];
      ++picture.nodes[static_cast<size_t>(node_of[t])].end;
      continue;
    }
    const int64_t above = parent < 0 ? -1 : node_of[parent];
    int64_t& first = above < 0 ? next_root : next[static_cast<size_t>(above)];
    node_of[t] = static_cast<int32_t>(picture.nodes.size());
    picture.nodes.push_back({.parent = above,
                             .begin = tree.depth[t],
                             .end = tree.depth[t] + 1,
                             .first_sequence = first,
                             .num_sequences = tree.num_sequences[t],
                             .block = block_of[t]});
    first += tree.num_sequences[t];
    next.push_back(picture.nodes.back().first_sequence);
  }
  return picture;
}

}  // namespace

PlanPicture plan_picture(const Plan& plan, const std::string& headline) {
  PlanPicture picture;
  picture.headline = headline;
  int64_t num_passes = 0;
  for (const auto& planned : plan.trees) {
    const auto block_index = add_blocks(planned, num_passes, picture);
    picture.trees.push_back(picture_of(planned, block_index));
  }
  return picture;
}

}  // namespace bough
