// Types and functions that several CUDA kernels of tree attention use: key tiles, their visibility, and, for
// the tensor cores, the queries and keys of a thread block.
#pragma once

#include <climits>

#include "kernels/common/cuda_tiles.cuh"
#include "kernels/tree_attention/key_spans.h"
#include "kernels/tree_attention/tree_attention_cuda.h"

namespace bough {

// Some consecutive keys. Either all are on the stack, or all are in the pass.
struct KeyTile {
  int begin;  // index into end_local
  int count;
  int first_key;  // number of the first key in the pass; negative on the stack
};

struct KeyTiles {
  int num_stack, num_tokens, size, num_stack_tiles;

  __host__ __device__ KeyTiles(int64_t stack, int64_t tokens, int tile_size)
      : num_stack(static_cast<int>(stack)),
        num_tokens(static_cast<int>(tokens)),
        size(tile_size),
        num_stack_tiles((num_stack + tile_size - 1) / tile_size) {}

  __host__ __device__ int count() const { return num_stack_tiles + (num_tokens + size - 1) / size; }
  // Number of tiles of the stack, plus those tiles of the pass that have a key numbered below `end`.
  __device__ int count_before(int end) const {
    return num_stack_tiles + (min(end, num_tokens) + size - 1) / size;
  }
  __device__ KeyTile operator[](int tile) const {
    const bool on_stack = tile < num_stack_tiles;
    const int begin = on_stack ? tile * size : num_stack + (tile - num_stack_tiles) * size;
    const int end = on_stack ? num_stack : num_stack + num_tokens;
    return {begin, min(size, end - begin), begin - num_stack};
  }
};

// Returns the first key (or value) of a tile in one key/value head. `own`: the tensor of the pass.
template <class T>
__device__ inline const T* key_rows(const TreeAttentionCuda<T>& in, const KeyTile& tile, const T* stack,
                                    const T* own, int64_t group) {
  const bool on_stack = tile.first_key < 0;
  const int64_t row = on_stack ? tile.begin : tile.first_key;
  return (on_stack ? stack : own) + (row * in.num_groups + group) * in.head_dim;
}

// Smallest and largest end_local of a tile (key_spans.h).
struct KeySpan {
  int min_end, max_end;
};

__device__ inline KeySpan key_span(const int32_t* spans, int tile) {
  const int2 span = reinterpret_cast<const int2*>(spans)[tile];
  return {span.x, span.y};
}

// For the queries [begin, end) and the keys of a tile, which begins at first_key. any_visible: false only if
// no query sees any key of the tile. all_visible: true only if every query sees every key of the tile.
__device__ inline bool any_visible(int first_key, KeySpan span, int begin, int end) {
  return first_key < end && begin < span.max_end;
}
__device__ inline bool all_visible(int first_key, int num_keys, KeySpan span, int begin, int end) {
  return first_key + num_keys - 1 <= begin && end <= span.min_end;
}

// Returns the first tile, from `tile` on, of which a query of [begin, end) may see a key, or num_tiles if
// there is none. A warp tests 32 tiles at once.
__device__ inline int next_visible_tile(const KeyTiles& tiles, const int32_t* spans, int tile, int num_tiles,
                                        int begin, int end) {
  for (; tile < num_tiles; tile += kWarp) {
    const int mine = tile + thread_index() % kWarp;
    const bool visible =
        mine < num_tiles && any_visible(tiles[mine].first_key, key_span(spans, mine), begin, end);
    const unsigned found = __ballot_sync(kAllLanes, visible);
    if (found) return tile + __ffs(static_cast<int>(found)) - 1;
  }
  return num_tiles;
}

// --- Tensor-core kernels: 16 queries of one head per warp; keys pass through two buffers (stages) ---

// Heads wider than 128 have one stage. Then a thread block fits into the 99 KiB of shared memory of GPUs of
// compute capability 8.6 and 8.9, and two thread blocks into that of an H100, so that one computes while the
// other loads.
template <int kHead>
constexpr int kStagesOf = kHead > 128 ? 1 : 2;

template <int kWarps>
struct QueryBlock {
  static constexpr int kQueries = kWarps * kFragmentRows;

  __device__ static int head() { return static_cast<int>(blockIdx.x); }
  // The last queries see the most keys, so their thread blocks start first.
  __device__ static int begin() { return static_cast<int>(gridDim.y - 1 - blockIdx.y) * kQueries; }
  __device__ static int end() { return begin() + kQueries; }
  __device__ static int warp_begin() { return begin() + thread_index() / kWarp * kFragmentRows; }
  // Offset of the warp's first query in [tokens, heads, head_dim].
  __device__ static int64_t offset(const TreeAttentionCuda<BFloat16Bits>& in) {
    return (warp_begin() * in.num_heads + head()) * in.head_dim;
  }
};

template <int kHead, int kThreads>
struct KeyStages {
  static constexpr int kTileBytes = kTensorTile * kRowBytes<kHead>;
  static constexpr int kStageBytes = 2 * kTileBytes + kTensorTile * 4;  // K, V, their end_local
  static constexpr int kBytes = kStagesOf<kHead> * kStageBytes;
  static_assert(kStageBytes % 256 == 0);

  const TreeAttentionCuda<BFloat16Bits>& in;
  KeyTiles tiles;
  int64_t group;

  __device__ static SharedAddress k(int stage) {
    return shared_address(dynamic_shared_memory()) + stage * kStageBytes;
  }
  __device__ static SharedAddress v(int stage) { return k(stage) + kTileBytes; }
  // end_local of the keys in the stage. 0 for the missing keys of a partial tile, which no query sees.
  __device__ static const int32_t* ends(int stage) {
    return reinterpret_cast<const int32_t*>(dynamic_shared_memory() + stage * kStageBytes + 2 * kTileBytes);
  }

  __device__ void load(int stage, int index) const {
    const KeyTile tile = tiles[index];
    const int64_t stride = in.num_groups * in.head_dim;
    const int head_dim = static_cast<int>(in.head_dim);
    load_tile<kHead, kTensorTile, kThreads>(k(stage), key_rows(in, tile, in.k_stack, in.k, group), stride,
                                            tile.count, head_dim);
    load_tile<kHead, kTensorTile, kThreads>(v(stage), key_rows(in, tile, in.v_stack, in.v, group), stride,
                                            tile.count, head_dim);
    load_scalars<kTensorTile>(v(stage) + kTileBytes, in.end_local + tile.begin, tile.count);
  }
};

// Iterates over the key tiles that some query of the CUDA thread block sees. With two stages, copies the next
// tile to shared memory while the current tile is computed. Block: a QueryBlock.
template <int kHead, class Block, int kThreads>
class KeyWalk {
 public:
  using Stages = KeyStages<kHead, kThreads>;

  // Starts to load the first visible tile.
  __device__ __forceinline__ explicit KeyWalk(const TreeAttentionCuda<BFloat16Bits>& in)
      : stages_{in, KeyTiles(in.num_stack, in.num_tokens, kTensorTile),
                Block::head() / (in.num_heads / in.num_groups)},
        num_tiles_(stages_.tiles.count_before(Block::end())),
        tile_(find(0)) {
    if (tile_ < num_tiles_) stages_.load(0, tile_);
    next_ = find(tile_ + 1);
  }
  KeyWalk(const KeyWalk&) = delete;

  // Calls body(stage, first_key, masked) for each tile that some query of the warp sees. masked is true if
  // some query of the warp does not see every key. The tile after the next is searched after the products, so
  // that other warps hide the latency of the search.
  template <class Body>
  __device__ __forceinline__ void run(const Body& body) {
    constexpr bool kHasTwo = kStagesOf<kHead> == 2;
    for (int stage = 0; tile_ < num_tiles_;
         stage ^= kHasTwo ? 1 : 0, tile_ = next_, next_ = find(next_ + 1)) {
      wait_for_copies();
      __syncthreads();  // this tile has arrived; all warps have read the tile that the next load overwrites
      if (kHasTwo && next_ < num_tiles_) stages_.load(stage ^ 1, next_);
      const int first_key = stages_.tiles[tile_].first_key;
      const KeySpan span = key_span(stages_.in.spans, tile_);
      const int begin = Block::warp_begin(), end = begin + kFragmentRows;
      if (any_visible(first_key, span, begin, end))
        body(stage, first_key, !all_visible(first_key, kTensorTile, span, begin, end));
      if constexpr (!kHasTwo) {
        __syncthreads();  // all warps have read this tile
        if (next_ < num_tiles_) stages_.load(0, next_);
      }
    }
  }

 private:
  __device__ __forceinline__ int find(int tile) const {
    return next_visible_tile(stages_.tiles, stages_.in.spans, tile, num_tiles_, Block::begin(), Block::end());
  }

  const Stages stages_;
  const int num_tiles_;
  int tile_, next_;
};

}  // namespace bough
