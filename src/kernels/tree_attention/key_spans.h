// The tiles of keys that the CUDA kernels of tree attention walk over, and the span of each: the least and
// the largest end_local of its keys, by which a block of queries passes over what none of them sees. Spans
// follow from end_local alone, which is the pass's: they are made once a pass, on the host. No torch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace bough {

constexpr int kPlainTile = 32;   // keys and queries of a tile of the fp32 kernels
constexpr int kTensorTile = 64;  // keys of a tile of the tensor cores' kernels

// No tile straddles stack and pass.
constexpr int64_t num_key_tiles(int64_t num_stack, int64_t num_tokens, int64_t tile_size) {
  return (num_stack + tile_size - 1) / tile_size + (num_tokens + tile_size - 1) / tile_size;
}

// How many numbers key_spans() has, and where those of a tile size begin: which kernels run is known only
// where they are launched.
constexpr int64_t key_spans_begin(int64_t num_stack, int64_t num_tokens, int64_t tile_size) {
  return tile_size == kPlainTile ? 0 : 2 * num_key_tiles(num_stack, num_tokens, kPlainTile);
}
constexpr int64_t key_spans_size(int64_t num_stack, int64_t num_tokens) {
  return 2 * (num_key_tiles(num_stack, num_tokens, kPlainTile) +
              num_key_tiles(num_stack, num_tokens, kTensorTile));
}

// (least, largest) end_local of each tile, first of kPlainTile and then of kTensorTile keys. The least of a
// tile that is not full is 0, the end of the keys it lacks: it counts as one that not all queries see.
// end_local: [P + T].
std::vector<int32_t> key_spans(std::span<const int32_t> end_local, int64_t num_stack);

}  // namespace bough
