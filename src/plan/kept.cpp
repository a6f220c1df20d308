#include "plan/kept.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

namespace bough {

namespace {

// In order of time, the fastest first.
constexpr std::array kOfLeaf = {Keep::kActivations, Keep::kLayerInputsAndAttention, Keep::kLayerInputs};
constexpr std::array kOfInterior = {Keep::kActivations, Keep::kAttention, Keep::kKeysValues};

std::span<const Keep> by_layer() {
  return std::span(kOfLeaf).subspan(1);
}

std::span<const Keep> choices_of_leaf(LayerRecompute layers) {
  if (layers == LayerRecompute::kAlways) return by_layer();
  return layers == LayerRecompute::kNever ? std::span(kOfLeaf).first(1) : std::span(kOfLeaf);
}

}  // namespace

int64_t pass_bytes(const PassCosts& costs, const Block& block, Keep keep) {
  const bool computes_all = block.interior && !recomputes_layers(keep) && keep != Keep::kActivations;
  const Keep of_pass = computes_all ? Keep::kActivations : keep;
  const bool adds = !block.interior || computes_all;
  return costs.temporary_bytes(block.shape(), of_pass) +
         (adds ? block.num_tokens * costs.kept_bytes(of_pass) : 0);
}

int64_t least_pass_bytes(const PassCosts& costs, const PassShape& pass, LayerRecompute layers) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const Keep keep : choices_of_leaf(layers))
    least = std::min(least, pass.tokens * costs.kept_bytes(keep) + costs.temporary_bytes(pass, keep));
  return least;
}

void choose_kept(std::span<Block> blocks, const PassCosts& costs, int64_t room, const KeepRules& rules) {
  // Indexed by block + 1, the root being 0: what the chain down to the block holds for certain; and what is
  // held beside that while what hangs off it runs.
  std::vector<int64_t> reserved(blocks.size() + 1, 0), held(blocks.size() + 1, 0);
  std::vector<bool> is_by_layer(blocks.size(), false);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Block& block = blocks[i];
    int64_t& own = reserved[i + 1];
    own = reserved[static_cast<size_t>(block.above + 1)] + block.num_exits * costs.exit_bytes();
    if (!block.interior || !block.needed || rules.layers == LayerRecompute::kNever) continue;
    is_by_layer[i] = rules.layers == LayerRecompute::kAlways ||
                     own + pass_bytes(costs, block, Keep::kKeysValues) > room;
    if (is_by_layer[i]) own += block.num_tokens * costs.kept_bytes(Keep::kLayerInputs);
  }
  for (size_t i = blocks.size(); i-- > 0;) {
    Block& block = blocks[i];
    if (!block.needed) continue;
    std::span<const Keep> choices = choices_of_leaf(rules.layers);
    if (block.interior && is_by_layer[i]) choices = by_layer();
    else if (block.interior)
      choices = rules.interior_may_keep_more ? std::span(kOfInterior) : std::span(kOfInterior).last(1);
    // With the block's exits, which end with it, as what is held above it has them.
    const auto total = [&](Keep keep) {
      const int64_t own = block.interior ? block.num_tokens * costs.kept_bytes(keep) : 0;
      return own + std::max(held[i + 1], pass_bytes(costs, block, keep)) +
             block.num_exits * costs.exit_bytes();
    };
    const int64_t above = reserved[static_cast<size_t>(block.above + 1)];
    const auto fits = [&](Keep keep) { return total(keep) + above <= room; };
    const auto found = std::ranges::find_if(choices, fits);
    block.keep = found != choices.end() ? *found : *std::ranges::min_element(choices, {}, total);
    int64_t& held_above = held[static_cast<size_t>(block.above + 1)];
    held_above = std::max(held_above, total(block.keep));
  }
}

}  // namespace bough
