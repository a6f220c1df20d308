#include "plan/recompute_policy.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

namespace bough {

namespace {

// The policies of leaf blocks, fastest first.
constexpr std::array kOfLeaf = {RecomputePolicy::kActivations, RecomputePolicy::kLayerInputsAndAttention,
                                RecomputePolicy::kLayerInputs, RecomputePolicy::kLayerInputsOnHost};
constexpr std::array kOfLeafWithHost = {RecomputePolicy::kActivations, RecomputePolicy::kLayerInputsOnHost};
constexpr std::array kOfInterior = {RecomputePolicy::kActivations, RecomputePolicy::kAttention,
                                    RecomputePolicy::kKeysValues};

// kActivations first, then the policies that recompute layers.
std::span<const RecomputePolicy> all_of_leaf(ActivationOffload offload) {
  if (offload == ActivationOffload::kAlways) return kOfLeafWithHost;
  return offload == ActivationOffload::kNever ? std::span(kOfLeaf).first(3) : std::span(kOfLeaf);
}

std::span<const RecomputePolicy> by_layer(ActivationOffload offload) {
  return all_of_leaf(offload).subspan(1);
}

std::span<const RecomputePolicy> choices_of_leaf(const RecomputeRules& rules) {
  if (rules.layers == LayerRecompute::kAlways) return by_layer(rules.offload);
  const std::span<const RecomputePolicy> all = all_of_leaf(rules.offload);
  return rules.layers == LayerRecompute::kNever ? all.first(1) : all;
}

// Bytes that a block and its descendants hold in addition to the chain above the block. `held`: the peak of
// its descendants. Includes the block's boundary hidden states, which are freed with the block.
int64_t bytes_with_below(const PassCosts& costs, const Block& block, RecomputePolicy keep, int64_t held) {
  const int64_t own = block.interior ? block.num_tokens * costs.kept_bytes(keep) : 0;
  return own + std::max(held, pass_bytes(costs, block, keep)) +
         block.num_boundary_tokens * costs.boundary_bytes();
}

// Chooses the least peak: a block recomputes its layers if it and its descendants then hold fewer bytes.
void choose_least(std::span<Block> blocks, const PassCosts& costs, ActivationOffload offload) {
  std::vector<int64_t> held(blocks.size() + 1, 0);  // by block + 1
  for (size_t i = blocks.size(); i-- > 0;) {
    Block& block = blocks[i];
    if (!block.needed) continue;
    const auto total = [&](RecomputePolicy keep) {
      return bytes_with_below(costs, block, keep, held[i + 1]);
    };
    block.keep = block.interior ? RecomputePolicy::kKeysValues : RecomputePolicy::kActivations;
    for (const RecomputePolicy keep : by_layer(offload))
      if (total(keep) < total(block.keep)) block.keep = keep;
    int64_t& held_above = held[static_cast<size_t>(block.above + 1)];
    held_above = std::max(held_above, total(block.keep));
  }
}

// Like choose_recompute_policies(), but does not try offloading by itself: `rules` are followed exactly.
// Returns true if everything fits. If it returns false and rules.layers is kWherePays, the chosen values are
// unusable.
bool choose_within(std::span<Block> blocks, const PassCosts& costs, int64_t room,
                   const RecomputeRules& rules) {
  // Indexed by block + 1; entry 0 stands above all root blocks. `reserved`: the least bytes that the blocks
  // from the root to this block, included, hold. `held`: the most bytes that a child of the block and the
  // child's descendants hold in addition.
  std::vector<int64_t> reserved(blocks.size() + 1, 0), held(blocks.size() + 1, 0);
  std::vector<bool> is_by_layer(blocks.size(), false);
  bool all_fit = true;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Block& block = blocks[i];
    int64_t& own = reserved[i + 1];
    own = reserved[static_cast<size_t>(block.above + 1)] + block.num_boundary_tokens * costs.boundary_bytes();
    if (!block.interior || !block.needed || rules.layers == LayerRecompute::kNever) continue;
    is_by_layer[i] = rules.layers == LayerRecompute::kAlways ||
                     own + pass_bytes(costs, block, RecomputePolicy::kKeysValues) > room;
    if (is_by_layer[i]) own += block.num_tokens * costs.kept_bytes(by_layer(rules.offload).back());
  }
  for (size_t i = blocks.size(); i-- > 0;) {
    Block& block = blocks[i];
    if (!block.needed) continue;
    std::span<const RecomputePolicy> choices = choices_of_leaf(rules);
    if (block.interior && is_by_layer[i]) choices = by_layer(rules.offload);
    else if (block.interior)
      choices = rules.interior_may_keep_more ? std::span(kOfInterior) : std::span(kOfInterior).last(1);
    const auto total = [&](RecomputePolicy keep) {
      return bytes_with_below(costs, block, keep, held[i + 1]);
    };
    const int64_t above = reserved[static_cast<size_t>(block.above + 1)];
    const auto fits = [&](RecomputePolicy keep) { return total(keep) + above <= room; };
    const auto found = std::ranges::find_if(choices, fits);
    all_fit &= found != choices.end();
    if (!all_fit && rules.layers == LayerRecompute::kWherePays) return false;
    block.keep = found != choices.end() ? *found : *std::ranges::min_element(choices, {}, total);
    int64_t& held_above = held[static_cast<size_t>(block.above + 1)];
    held_above = std::max(held_above, total(block.keep));
  }
  return all_fit;
}

}  // namespace

int64_t pass_bytes(const PassCosts& costs, const Block& block, RecomputePolicy keep) {
  const RecomputePolicy of_pass = keeps_graph(keep) ? keep : RecomputePolicy::kActivations;
  const bool adds = !block.interior || !keeps_graph(keep);
  return costs.temporary_bytes(block.shape(), of_pass) +
         (adds ? block.num_tokens * costs.kept_bytes(of_pass) : 0);
}

double backward_seconds(const PassCosts& costs, const Block& block) {
  const PassShape shape = block.shape();
  const double head =
      shape.head_rows == 0 ? 0 : costs.head_forward_seconds(shape) + costs.head_backward_seconds(shape);
  return costs.recompute_seconds(shape, block.keep) + costs.backward_seconds(shape) + head;
}

int64_t least_pass_bytes(const PassCosts& costs, const PassShape& pass, const RecomputeRules& rules) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const RecomputePolicy keep : choices_of_leaf(rules))
    least = std::min(least, pass.tokens * costs.kept_bytes(keep) + costs.temporary_bytes(pass, keep));
  return least;
}

void choose_recompute_policies(std::span<Block> blocks, const PassCosts& costs, int64_t room,
                               const RecomputeRules& rules) {
  RecomputeRules now = rules;
  if (rules.offload == ActivationOffload::kWhereNeeded) now.offload = ActivationOffload::kNever;
  if (choose_within(blocks, costs, room, now)) return;
  if (rules.offload == ActivationOffload::kWhereNeeded && rules.layers != LayerRecompute::kNever &&
      costs.kept_bytes(RecomputePolicy::kLayerInputsOnHost) <
          costs.kept_bytes(RecomputePolicy::kLayerInputs)) {
    now.offload = rules.offload;
    if (choose_within(blocks, costs, room, now)) return;
  }
  if (rules.layers == LayerRecompute::kWherePays) choose_least(blocks, costs, now.offload);
}

}  // namespace bough
