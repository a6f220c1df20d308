// Tree attention in plain fp32 arithmetic, for fp32 and for bf16 heads that do not suit the tensor cores. A
// CUDA thread block of 128 threads has 32 matrix rows (queries, or keys in plain_key_gradient_kernel) and
// iterates over tiles of 32 columns. Four threads compute one row. Each of them computes every fourth column
// of the scores and every fourth pack of four dimensions of the sums.
#pragma once

#include "kernels/tree_attention/tree_attention_tiles.cuh"

namespace bough {

constexpr int kPlainThreads = 4 * kPlainTile;
constexpr int kPlainColumns = kPlainTile / 4;  // columns of a thread
constexpr int kWeightStride = kPlainTile + 1;

// Matrix rows of fp32 in shared memory, in packs of four. The stride between rows is an odd number of packs,
// so that rows begin in different banks.
struct PlainTiles {
  int packs, stride;

  __host__ __device__ explicit PlainTiles(int64_t head_dim)
      : packs(static_cast<int>(head_dim + 3) / 4), stride(packs | 1) {}
  __host__ __device__ int elements() const { return kPlainTile * stride * 4; }
  __device__ float* tile(int index) const {
    return reinterpret_cast<float*>(dynamic_shared_memory()) + index * elements();
  }
  __device__ const float4* row(const float* tile, int row) const {
    return reinterpret_cast<const float4*>(tile) + row * stride;
  }
  // The weights (p or dS) of the thread block lie after the tiles.
  __device__ float* weights(int num_tiles, int index) const {
    return tile(num_tiles) + index * kPlainTile * kWeightStride;
  }
  __host__ __device__ int bytes(int num_tiles, int num_weights) const {
    return (num_tiles * elements() + num_weights * kPlainTile * kWeightStride) * 4;
  }

  // Loads a tile. Matrix rows from num_rows on and columns from head_dim on become zeros.
  template <class T>
  __device__ void load(float* tile, const T* rows, int64_t row_stride, int num_rows, int head_dim) const {
    for (int r = threadIdx.x / kWarp; r < kPlainTile; r += kPlainThreads / kWarp)
      for (int d = threadIdx.x % kWarp; d < packs * 4; d += kWarp)
        tile[r * stride * 4 + d] = r < num_rows && d < head_dim ? widen(rows[r * row_stride + d]) : 0;
  }

  // Computes this thread's columns of row a_row of a·bᵀ: the products with rows part, part + 4, ... of `b`.
  __device__ void multiply(float (&c)[kPlainColumns], const float* a, int a_row, const float* b,
                           int part) const {
    for (float& x : c) x = 0;
    for (int d = 0; d < packs; ++d) {
      const float4 x = row(a, a_row)[d];
#pragma unroll
      for (int j = 0; j < kPlainColumns; ++j) {
        const float4 y = row(b, part + 4 * j)[d];
        c[j] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
      }
    }
  }

  // sums += weights[32] · the 32 rows of the tile, for this thread's packs part, part + 4, ...
  template <int kPacks>
  __device__ void accumulate(float4 (&sums)[kPacks], const float* weights, const float* tile,
                             int part) const {
    for (int j = 0; j < kPlainTile; ++j) {
      const float w = weights[j];
      const float4* x = row(tile, j);
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (part + 4 * i < packs) {
          const float4 y = x[part + 4 * i];
          sums[i].x += w * y.x;
          sums[i].y += w * y.y;
          sums[i].z += w * y.z;
          sums[i].w += w * y.w;
        }
    }
  }

  // Calls put(d, sum) for each of this thread's dimensions.
  template <int kPacks, class Put>
  __device__ void store(const float4 (&sums)[kPacks], int part, int head_dim, Put&& put) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int d = (part + 4 * i) * 4;
      if (d < head_dim) put(d, sums[i].x);
      if (d + 1 < head_dim) put(d + 1, sums[i].y);
      if (d + 2 < head_dim) put(d + 2, sums[i].z);
      if (d + 3 < head_dim) put(d + 3, sums[i].w);
    }
  }
};

// The position of a thread in the thread block's tile of queries.
struct PlainQuery {
  int row, part, head, begin, query;

  __device__ PlainQuery()
      : row(static_cast<int>(threadIdx.x / 4)),
        part(static_cast<int>(threadIdx.x % 4)),
        head(static_cast<int>(blockIdx.x)),
        begin(static_cast<int>(gridDim.y - 1 - blockIdx.y) * kPlainTile),
        query(begin + row) {}
};

// Calls function(tile) for each tile of keys that the thread block's queries see, after loading the keys to
// shared tile 0 and the values to shared tile 1.
template <class T, class Function>
__device__ inline void for_visible_keys(const TreeAttentionCuda<T>& in, const PlainTiles& shared, int begin,
                                        int64_t group, Function&& function) {
  const KeyTiles tiles(in.num_stack, in.num_tokens, kPlainTile);
  const int num_tiles = tiles.count_before(begin + kPlainTile), head_dim = static_cast<int>(in.head_dim);
  const int64_t stride = in.num_groups * in.head_dim;
  const auto next = [&](int tile) {
    return next_visible_tile(tiles, in.spans, tile, num_tiles, begin, begin + kPlainTile);
  };
  for (int i = next(0); i < num_tiles; i = next(i + 1)) {
    const KeyTile tile = tiles[i];
    __syncthreads();  // all threads have read the previous tile
    shared.load(shared.tile(0), key_rows(in, tile, in.k_stack, in.k, group), stride, tile.count, head_dim);
    shared.load(shared.tile(1), key_rows(in, tile, in.v_stack, in.v, group), stride, tile.count, head_dim);
    __syncthreads();
    function(tile);
  }
}

template <class T>
__device__ inline bool plain_visible(const TreeAttentionCuda<T>& in, const KeyTile& tile, int key,
                                     int query) {
  return key < tile.count && tile.first_key + key <= query && query < in.end_local[tile.begin + key];
}

template <class T, int kMaxHead>
__global__ void __launch_bounds__(kPlainThreads)
    plain_forward_kernel(const TreeAttentionCuda<T> in, T* o, float* lse) {
  const PlainTiles shared(in.head_dim);
  const PlainQuery at;
  const int head_dim = static_cast<int>(in.head_dim),
            num_queries = static_cast<int>(in.num_tokens) - at.begin;
  const int64_t stride = in.num_heads * in.head_dim, offset = at.begin * stride + at.head * in.head_dim;
  float* const q = shared.tile(2);
  float* const weights = shared.weights(3, 0) + at.row * kWeightStride;
  shared.load(q, in.q + offset, stride, num_queries, head_dim);
  float4 sums[kMaxHead / 16] = {};
  float row_max = -INFINITY, row_sum = 0;
  for_visible_keys(in, shared, at.begin, at.head / (in.num_heads / in.num_groups), [&](const KeyTile& tile) {
    float scores[kPlainColumns];
    shared.multiply(scores, q, at.row, shared.tile(0), at.part);
    float largest = row_max;
#pragma unroll
    for (int j = 0; j < kPlainColumns; ++j) {
      scores[j] = plain_visible(in, tile, at.part + 4 * j, at.query) ? scores[j] * in.scale : -INFINITY;
      largest = fmaxf(largest, scores[j]);
    }
    largest = quad_max(largest);
    const float base = largest == -INFINITY ? 0 : largest;  // if no key is visible so far
    const float rescale = expf(row_max - base);
    row_max = largest;
    row_sum *= rescale;
    __syncwarp();  // the row's four threads have read the previous weights
#pragma unroll
    for (int j = 0; j < kPlainColumns; ++j) {
      const float p = expf(scores[j] - base);
      row_sum += p;
      weights[at.part + 4 * j] = p;
    }
    __syncwarp();
#pragma unroll
    for (float4& sum : sums) sum = {sum.x * rescale, sum.y * rescale, sum.z * rescale, sum.w * rescale};
    shared.accumulate(sums, weights, shared.tile(1), at.part);
  });
  const float sum = quad_sum(row_sum);
  if (at.row >= num_queries) return;
  T* const row = o + offset + at.row * stride;
  shared.store(sums, at.part, head_dim, [&](int d, float x) { round_to(row + d, x / sum); });
  if (at.part == 0) lse[at.query * in.num_heads + at.head] = row_max + logf(sum);
}

// Forward computed p = exp(scale · q·k - lse). The kernel computes dS = p · (d_o·v - D) · scale and dS k.
template <class T, int kMaxHead>
__global__ void __launch_bounds__(kPlainThreads)
    plain_query_gradient_kernel(const TreeAttentionCuda<T> in, const TreeAttentionCudaGradient<T> gradient) {
  const PlainTiles shared(in.head_dim);
  const PlainQuery at;
  const int head_dim = static_cast<int>(in.head_dim),
            num_queries = static_cast<int>(in.num_tokens) - at.begin;
  const int64_t stride = in.num_heads * in.head_dim, offset = at.begin * stride + at.head * in.head_dim;
  float *const q = shared.tile(2), *const d_o = shared.tile(3);
  float* const weights = shared.weights(4, 0) + at.row * kWeightStride;
  shared.load(q, in.q + offset, stride, num_queries, head_dim);
  shared.load(d_o, gradient.d_o + offset, stride, num_queries, head_dim);
  const bool valid = at.row < num_queries;
  const float lse = valid ? gradient.lse[at.query * in.num_heads + at.head] : 0;
  const float dots = valid ? gradient.dots[at.head * in.num_tokens + at.query] : 0;
  float4 sums[kMaxHead / 16] = {};
  for_visible_keys(in, shared, at.begin, at.head / (in.num_heads / in.num_groups), [&](const KeyTile& tile) {
    float scores[kPlainColumns], d_p[kPlainColumns];
    shared.multiply(scores, q, at.row, shared.tile(0), at.part);
    shared.multiply(d_p, d_o, at.row, shared.tile(1), at.part);
    __syncwarp();  // the row's four threads have read the previous weights
#pragma unroll
    for (int j = 0; j < kPlainColumns; ++j) {
      const bool visible = plain_visible(in, tile, at.part + 4 * j, at.query);
      const float p = visible ? expf(scores[j] * in.scale - lse) : 0;
      weights[at.part + 4 * j] = p * (d_p[j] - dots) * in.scale;
    }
    __syncwarp();
    shared.accumulate(sums, weights, shared.tile(0), at.part);
  });
  if (!valid) return;
  T* const row = gradient.d_q + offset + at.row * stride;
  shared.store(sums, at.part, head_dim, [&](int d, float x) { round_to(row + d, x); });
}

// A thread block computes the gradients of 32 keys of one key/value head, summed over all queries of its
// query heads.
template <class T, int kMaxHead>
__global__ void __launch_bounds__(kPlainThreads)
    plain_key_gradient_kernel(const TreeAttentionCuda<T> in, const TreeAttentionCudaGradient<T> gradient) {
  const PlainTiles shared(in.head_dim);
  const int row = static_cast<int>(threadIdx.x / 4), part = static_cast<int>(threadIdx.x % 4);
  const int head_dim = static_cast<int>(in.head_dim), num_tokens = static_cast<int>(in.num_tokens);
  const int64_t group = blockIdx.x, heads = in.num_heads / in.num_groups;
  const KeyTile tile = KeyTiles(in.num_stack, in.num_tokens, kPlainTile)[static_cast<int>(blockIdx.y)];
  const int max_end = key_span(in.spans, static_cast<int>(blockIdx.y)).max_end;
  const int first_query = max(tile.first_key, 0) / kPlainTile * kPlainTile;
  const int64_t stride = in.num_heads * in.head_dim, key_stride = in.num_groups * in.head_dim;
  float *const k = shared.tile(0), *const v = shared.tile(1), *const q = shared.tile(2),
               *const d_o = shared.tile(3);
  float* const p_row = shared.weights(4, 0) + row * kWeightStride;
  float* const d_s_row = shared.weights(4, 1) + row * kWeightStride;
  shared.load(k, key_rows(in, tile, in.k_stack, in.k, group), key_stride, tile.count, head_dim);
  shared.load(v, key_rows(in, tile, in.v_stack, in.v, group), key_stride, tile.count, head_dim);
  float4 d_k[kMaxHead / 16] = {}, d_v[kMaxHead / 16] = {};
  for (int64_t head = group * heads; head < (group + 1) * heads; ++head)
    for (int begin = first_query; begin < max_end; begin += kPlainTile) {
      const int64_t offset = begin * stride + head * in.head_dim;
      __syncthreads();  // all threads have read the previous tile
      shared.load(q, in.q + offset, stride, num_tokens - begin, head_dim);
      shared.load(d_o, gradient.d_o + offset, stride, num_tokens - begin, head_dim);
      __syncthreads();
      float scores[kPlainColumns], d_p[kPlainColumns];
      shared.multiply(scores, k, row, q, part);
      shared.multiply(d_p, v, row, d_o, part);
#pragma unroll
      for (int j = 0; j < kPlainColumns; ++j) {
        const int column = part + 4 * j, query = begin + column;
        float p = 0, d_s = 0;
        if (plain_visible(in, tile, row, query)) {
          p = expf(scores[j] * in.scale - gradient.lse[query * in.num_heads + head]);
          d_s = p * (d_p[j] - gradient.dots[head * num_tokens + query]) * in.scale;
        }
        p_row[column] = p;
        d_s_row[column] = d_s;
      }
      __syncwarp();
      shared.accumulate(d_v, p_row, d_o, part);
      shared.accumulate(d_k, d_s_row, q, part);
    }
  if (row >= tile.count) return;
  const bool on_stack = tile.first_key < 0;
  const int64_t out =
      (static_cast<int64_t>(on_stack ? tile.begin : tile.first_key) + row) * key_stride + group * in.head_dim;
  float* const k_out = (on_stack ? gradient.d_k_stack : gradient.d_k) + out;
  float* const v_out = (on_stack ? gradient.d_v_stack : gradient.d_v) + out;
  shared.store(d_k, part, head_dim, [&](int d, float x) { k_out[d] = on_stack ? k_out[d] + x : x; });
  shared.store(d_v, part, head_dim, [&](int d, float x) { v_out[d] = on_stack ? v_out[d] + x : x; });
}

}  // namespace bough
