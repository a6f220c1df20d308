// Parts of attention on the tensor cores: tiles of rows in shared memory, products of fragments with tiles,
// and the online softmax of a fragment of scores (FlashAttention-2, Dao 2023, algorithm 1).
#pragma once

#include "kernels/common/cuda_kernel.cuh"
#include "kernels/common/cuda_mma.cuh"

namespace bough {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr int kFragmentRows = 16;

// Maximum and sum over the four lanes that hold a row of C.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// A tile in shared memory has rows of kHead bf16. Chunk c (16 bytes) of row r is stored at index c ^ (r %
// 8), so that chunk c of eight consecutive rows is in eight different bank groups. Tiles start at multiples
// of 256 bytes.
template <int kHead>
constexpr int kRowBytes = kHead * 2;

// Offsets of a lane within a tile for load_matrices(). at() then moves them by whole fragments.
template <int kHead>
struct LaneOffsets {
  SharedAddress
      tall;  // 16 rows, 16 columns: one A, or with a transposed load two B of 16 rows and 8 columns each
  SharedAddress wide;  // 16 rows, 16 columns: two B, whose 8 columns each are rows of the tile

  __device__ LaneOffsets() {
    const unsigned lane = threadIdx.x % kWarp;
    tall = lane % 16 * kRowBytes<kHead> + ((lane / 16) ^ (lane % 8)) * 16;
    wide = (lane / 16 * 8 + lane % 8) * kRowBytes<kHead> + ((lane / 8 % 2) ^ (lane % 8)) * 16;
  }
};

// Returns an address within a tile. `lane`: address of the tile plus a lane's offset. row must be a multiple
// of 8 and column of 16. Only bits below 256 are changed by xor, because tiles start at multiples of 256.
template <int kHead>
__device__ inline SharedAddress at(SharedAddress lane, int row, int column) {
  return (lane ^ static_cast<SharedAddress>(column * 2 % 256)) + column * 2 / 256 * 256 +
         row * kRowBytes<kHead>;
}

// Starts loading a tile. Rows from num_rows on and columns from head_dim on become zeros.
template <int kHead, int kRows, int kThreads>
__device__ inline void load_tile(SharedAddress tile, const BFloat16Bits* rows, int64_t stride, int num_rows,
                                 int head_dim) {
  constexpr int kChunks = kHead / 8, kStep = kThreads / kChunks;  // rows that the block copies at once
  static_assert(kRows % kStep == 0 && (kStep % 8 == 0 || 8 % kStep == 0));
  const int thread = thread_index(), first = thread / kChunks, chunk = thread % kChunks;
  const bool in_head = chunk * 8 < head_dim;
  const BFloat16Bits* from = rows + first * stride + chunk * 8;
  tile += first * kRowBytes<kHead>;
#pragma unroll
  for (int row = 0; row < kRows; row += kStep, from += kStep * stride) {
    const int index = chunk ^ (kStep % 8 == 0 ? first % 8 : first + row % 8);
    copy_async<16>(tile + row * kRowBytes<kHead> + index * 16, from, first + row < num_rows && in_head);
  }
}

template <int kCount, class T>
__device__ inline void load_scalars(SharedAddress to, const T* from, int count) {
  static_assert(sizeof(T) == 4);
  const int i = thread_index();
  if (i < kCount) copy_async<4>(to + i * 4, from + i, i < count);
}

// Loads A of 16 rows directly from global memory. Rows from num_rows on and columns from head_dim on are
// zeros.
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

// Stores 16 rows of C, each multiplied by its factor and rounded. factor: of this lane's rows `row` and
// `row` + 8.
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

// c[16][8 · kTiles] += a[16][16 · kDepth] · b. The columns of b are rows of a tile, from `row` on.
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

// c[16][8 · kTiles] += a[16][kHead] · b. a is in a tile, from row a_row on. The columns of b are the rows of
// another tile, from row 0 on.
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

// c[16][kHead] += a[16][16 · kDepth] · b. The rows of b are rows of a tile, from `row` on.
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

// Rounds C to bf16 as A of the next product.
template <int kTiles>
__device__ inline void round_fragments(uint32_t (&a)[kTiles / 2][4], const float (&c)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    a[n / 2][n % 2 * 2] = pack_bf16(c[n][0], c[n][1]);
    a[n / 2][n % 2 * 2 + 1] = pack_bf16(c[n][2], c[n][3]);
  }
}

// One step of the online softmax over scores[16][8 · kTiles]. The scores are replaced by weights
// 2^(scale · score - base), where base is the largest scaled score of the row so far. row_max (unscaled),
// row_sum (this lane's part) and sums are updated to the new base.
template <int kTiles, int kColumns>
__device__ inline void online_softmax(float (&scores)[kTiles][4], float (&row_max)[2], float (&row_sum)[2],
                                      float (&sums)[kColumns][4], float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // rows row and row + 8 of the fragments
    float largest = row_max[half];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      largest = fmaxf(largest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    largest = quad_max(largest);
    const float base = largest == -INFINITY ? 0 : largest * scale;  // -infinity: no visible key yet
    const float rescale = exp2_approximate(row_max[half] * scale - base);
    row_max[half] = largest;
    row_sum[half] *= rescale;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        scores[n][e] = exp2_approximate(scores[n][e] * scale - base);
        row_sum[half] += scores[n][e];
      }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      sums[n][2 * half] *= rescale;
      sums[n][2 * half + 1] *= rescale;
    }
  }
}

}  // namespace bough
