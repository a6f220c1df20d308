// The CUDA kernels of tree attention process keys in tiles. The span of a tile is the smallest and the
// largest end_local of its keys (tree_attention.h). A CUDA thread block uses the spans to skip tiles that
// none of its queries sees. Spans depend only on end_local, so the host computes them once a pass. No torch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace bough {

constexpr int kPlainTile = 32;   // keys, and queries, per tile of the fp32 kernels
constexpr int kTensorTile = 64;  // keys per tile of the tensor-core kernels

// A tile has keys of the prefix KV stack or keys of the pass, never of both.
constexpr int64_t num_key_tiles(int64_t num_stack, int64_t num_tokens, int64_t tile_size) {
  return (num_stack + tile_size - 1) / tile_size + (num_tokens + tile_size - 1) / tile_size;
}

// key_spans() returns the spans for both tile sizes, because the tile size is known only when a kernel is
// launched. A span is two numbers. key_spans_begin() is the index of the first number of one tile size.
constexpr int64_t key_spans_begin(int64_t num_stack, int64_t num_tokens, int64_t tile_size) {
  return tile_size == kPlainTile ? 0 : 2 * num_key_tiles(num_stack, num_tokens, kPlainTile);
}
constexpr int64_t key_spans_size(int64_t num_stack, int64_t num_tokens) {
  return 2 * (num_key_tiles(num_stack, num_tokens, kPlainTile) +
              num_key_tiles(num_stack, num_tokens, kTensorTile));
}

// Returns (smallest, largest) end_local of each tile, first for tiles of kPlainTile keys, then of kTensorTile
// keys. The smallest is 0 if the tile lacks keys, because no query sees missing keys. end_local: [P + T].
std::vector<int32_t> key_spans(std::span<const int32_t> end_local, int64_t num_stack);

}  // namespace bough
