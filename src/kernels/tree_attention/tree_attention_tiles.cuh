// What the CUDA kernels of tree attention share: tiles of keys, which of them a range of queries sees, and, for the
// tensor cores, tiles of rows in shared memory and fragments of queries.
#pragma once

#include <climits>

#include "kernels/common/cuda_kernel.cuh"
#include "kernels/common/cuda_mma.cuh"
#include "kernels/tree_attention/tree_attention_cuda.h"

namespace bough {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr int kPlainTile = 32;   // keys and queries of a tile of the fp32 kernels
constexpr int kTensorTile = 64;  // keys of a tile of the tensor cores' kernels
constexpr int kFragmentRows = 16;

// Keys whose rows lie together: no tile straddles stack and pass.
struct KeyTile {
  int begin;  // into end_local
  int count;
  int first_key;  // the first key's number in the pass; below 0 on the stack
};

struct KeyTiles {
  int num_stack, num_tokens, size, num_stack_tiles;

  __host__ __device__ KeyTiles(int64_t stack, int64_t tokens, int tile_size)
      : num_stack(static_cast<int>(stack)),
        num_tokens(static_cast<int>(tokens)),
        size(tile_size),
        num_stack_tiles((num_stack + tile_size - 1) / tile_size) {}

  __host__ __device__ int count() const { return num_stack_tiles + (num_tokens + size - 1) / size; }
  // Tiles of the stack and of keys numbered below `end`.
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

// Rows of one group's head, of a tile's keys.
template <class T>
__device__ inline const T* key_rows(const TreeAttentionCuda<T>& in, const KeyTile& tile, const T* stack,
                                    const T* own, int64_t group) {
  const bool on_stack = tile.first_key < 0;
  const int64_t row = on_stack ? tile.begin : tile.first_key;
  return (on_stack ? stack : own) + (row * in.num_groups + group) * in.head_dim;
}

// Least and largest end_local of a tile. The least of a tile that is not full is 0, the end of the keys it lacks: so
// it counts as one that not all queries see.
struct KeySpan {
  int min_end, max_end;
};

__device__ inline KeySpan key_span(const int32_t* spans, int tile) {
  const int2 span = reinterpret_cast<const int2*>(spans)[tile];
  return {span.x, span.y};
}

// Queries [begin, end), keys first_key, first_key + 1, ...
__device__ inline bool any_visible(int first_key, KeySpan span, int begin, int end) {
  return first_key < end && begin < span.max_end;
}
__device__ inline bool all_visible(int first_key, int num_keys, KeySpan span, int begin, int end) {
  return first_key + num_keys - 1 <= begin && end <= span.min_end;
}

// The first tile from `tile` on that a query of [begin, end) sees, or `num_tiles`; a warp looks at 32 at once.
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

// Over the four lanes that hold a row of C.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// --- Tensor cores ---

// A tile in shared memory: rows of kHead bf16. The 16-byte chunks of row r stand at chunk ^ (r % 8), so that eight
// rows of one chunk lie in eight different bank groups. Tiles start at multiples of 256 bytes.
template <int kHead>
constexpr int kRowBytes = kHead * 2;

// Offsets of the lanes for load_matrices() within a tile; `at` then moves by whole fragments.
template <int kHead>
struct LaneOffsets {
  SharedAddress
      tall;  // 16 rows, 16 columns: A as it lies, or two B, transposed, of 16 rows and 8 columns each
  SharedAddress wide;  // 16 rows, 16 columns: two B of 8 columns each that are rows of the tile

  __device__ LaneOffsets() {
    const unsigned lane = threadIdx.x % kWarp;
    tall = lane % 16 * kRowBytes<kHead> + ((lane / 16) ^ (lane % 8)) * 16;
    wide = (lane / 16 * 8 + lane % 8) * kRowBytes<kHead> + ((lane / 8 % 2) ^ (lane % 8)) * 16;
  }
};

// `lane`: address of a tile plus a lane's offset; row a multiple of 8, column of 16.
template <int kHead>
__device__ inline SharedAddress at(SharedAddress lane, int row, int column) {
  return (lane ^ static_cast<SharedAddress>(column * 2)) + row * kRowBytes<kHead>;
}

// Rows beyond `num_rows` and columns beyond head_dim become zeros.
template <int kHead, int kRows, int kThreads>
__device__ inline void load_tile(SharedAddress tile, const BFloat16Bits* rows, int64_t stride, int num_rows,
                                 int head_dim) {
  constexpr int kChunks = kHead / 8, kStep = kThreads / kChunks;  // rows that the block copies at once
  static_assert(kStep % 8 == 0 && kRows % kStep == 0);
  const int thread = thread_index(), first = thread / kChunks, chunk = thread % kChunks;
  const bool in_head = chunk * 8 < head_dim;
  const BFloat16Bits* from = rows + first * stride + chunk * 8;
  tile += first * kRowBytes<kHead> + (chunk ^ (first % 8)) * 16;
#pragma unroll
  for (int row = 0; row < kRows; row += kStep, from += kStep * stride) {
    copy_async<16>(tile + row * kRowBytes<kHead>, from, first + row < num_rows && in_head);
  }
}

template <int kCount, class T>
__device__ inline void load_scalars(SharedAddress to, const T* from, int count) {
  static_assert(sizeof(T) == 4);
  const int i = thread_index();
  if (i < kCount) copy_async<4>(to + i * 4, from + i, i < count);
}

// A of 16 rows straight from memory; rows beyond num_rows and columns beyond head_dim are zeros.
template <int kHead>
__device__ inline void load_fragments(uint32_t (&a)[kHead / 16][4], const BFloat16Bits* rows, int64_t stride,
                                      int num_rows, int head_dim) {
  const int row = threadIdx.x % kWarp / 4, pair = threadIdx.x % 4 * 2;
#pragma unroll
  for (int k = 0; k < kHead / 16; ++k)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int i = row + r % 2 * 8, column = k * 16 + pair + r / 2 * 8;
      const bool valid = i < num_rows && column < head_dim;
      a[k][r] = valid ? *reinterpret_cast<const uint32_t*>(rows + i * stride + column) : 0;
    }
}

// 16 rows of C, each times its factor (of rows row and row + 8), rounded.
template <int kHead>
__device__ inline void store_fragments(BFloat16Bits* rows, int64_t stride, const float (&c)[kHead / 8][4],
                                       const float (&factor)[2], int num_rows, int head_dim) {
  const int thread = thread_index(), row = thread % kWarp / 4, pair = thread % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + half * 8;
    if (i >= num_rows) break;
#pragma unroll
    for (int n = 0; n < kHead / 8; ++n)
      if (n * 8 < head_dim)
        *reinterpret_cast<uint32_t*>(rows + i * stride + n * 8 + pair) =
            pack_bf16(c[n][2 * half] * factor[half], c[n][2 * half + 1] * factor[half]);
  }
}

// c[16][8 · kTiles] += a[16][16 · kDepth] · b, b's columns being rows of a tile.
template <int kHead, int kDepth, int kTiles>
__device__ inline void multiply_rows(float (&c)[kTiles][4], const uint32_t (&a)[kDepth][4],
                                     SharedAddress wide, int row) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k)
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      uint32_t b[4];
      load_matrices(b, at<kHead>(wide, row + n * 8, k * 16));
      multiply_add(c[n], a[k], b[0], b[1]);
      multiply_add(c[n + 1], a[k], b[2], b[3]);
    }
}

// The same with a[16][kHead] in a tile, from its row `a_row` on; b's columns are the rows of another, from its first.
template <int kHead, int kTiles>
__device__ inline void multiply_tile_rows(float (&c)[kTiles][4], SharedAddress tall, int a_row,
                                          SharedAddress wide) {
#pragma unroll
  for (int k = 0; k < kHead / 16; ++k) {
    uint32_t a[4];
    load_matrices(a, at<kHead>(tall, a_row, k * 16));
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      uint32_t b[4];
      load_matrices(b, at<kHead>(wide, n * 8, k * 16));
      multiply_add(c[n], a, b[0], b[1]);
      multiply_add(c[n + 1], a, b[2], b[3]);
    }
  }
}

// c[16][kHead] += a[16][16 · kDepth] · b, b's rows being rows of a tile.
template <int kHead, int kDepth>
__device__ inline void multiply_columns(float (&c)[kHead / 8][4], const uint32_t (&a)[kDepth][4],
                                        SharedAddress tall, int row) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k)
#pragma unroll
    for (int n = 0; n < kHead / 8; n += 2) {
      uint32_t b[4];
      load_matrices_transposed(b, at<kHead>(tall, row + k * 16, n * 8));
      multiply_add(c[n], a[k], b[0], b[1]);
      multiply_add(c[n + 1], a[k], b[2], b[3]);
    }
}

// C of 8-column tiles, rounded, as A of the next product.
template <int kTiles>
__device__ inline void round_fragments(uint32_t (&a)[kTiles / 2][4], const float (&c)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    a[n / 2][n % 2 * 2] = pack_bf16(c[n][0], c[n][1]);
    a[n / 2][n % 2 * 2 + 1] = pack_bf16(c[n][2], c[n][3]);
  }
}

// --- Kernels of one tile of queries: 16 a warp of one head, keys through two stages of shared memory ---

template <int kWarps>
struct QueryBlock {
  static constexpr int kQueries = kWarps * kFragmentRows;

  __device__ static int head() { return static_cast<int>(blockIdx.x); }
  // The last queries see the most keys: their blocks start first.
  __device__ static int begin() { return static_cast<int>(gridDim.y - 1 - blockIdx.y) * kQueries; }
  __device__ static int end() { return begin() + kQueries; }
  __device__ static int warp_begin() { return begin() + thread_index() / kWarp * kFragmentRows; }
  // Of the warp's first row in [tokens, heads, head_dim].
  __device__ static int64_t offset(const TreeAttentionCuda<BFloat16Bits>& in) {
    return (warp_begin() * in.num_heads + head()) * in.head_dim;
  }
};

template <int kHead, int kThreads>
struct KeyStages {
  static constexpr int kTileBytes = kTensorTile * kRowBytes<kHead>;
  static constexpr int kStageBytes = 2 * kTileBytes + kTensorTile * 4;  // K, V, their end_local
  static constexpr int kBytes = 2 * kStageBytes;
  static_assert(kStageBytes % 256 == 0);

  const TreeAttentionCuda<BFloat16Bits>& in;
  const KeyTiles& tiles;
  int64_t group;

  __device__ static SharedAddress k(int stage) {
    return shared_address(dynamic_shared_memory()) + stage * kStageBytes;
  }
  __device__ static SharedAddress v(int stage) { return k(stage) + kTileBytes; }
  // 0 where the tile has no key: no query sees it.
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

}  // namespace bough
