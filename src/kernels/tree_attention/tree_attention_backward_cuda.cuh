// Backward on the tensor cores: FlashAttention-2 (arXiv 2307.08691, algorithm 2) as two kernels, so that no
// sum needs atomics. Forward computed p = exp(scale · q·k - lse). With dS = p · (d_o·v - D):
//   d_q = scale · dS k,  d_k = scale · dSᵀ q,  d_v = pᵀ d_o
#pragma once

#include "kernels/tree_attention/tree_attention_forward_cuda.cuh"

namespace bough {

// Warps and threads per CUDA thread block, and thread blocks per multiprocessor, of both backward kernels: as
// many as fit without spilling registers.
constexpr int kGradientWarps = 4;
constexpr int kGradientThreads = kGradientWarps * kWarp;
template <int kHead>
constexpr int kGradientBlocks = kHead > 64 ? 2 : 3;

// Thread blocks for d_q. The registers of a thread do not hold q, d_o and d_q of wide heads. Their q and d_o
// are in shared memory, behind the keys, which leaves room for two warps.
template <int kHead>
struct QueryGradient {
  static constexpr bool kInShared = kHead > 128;
  static constexpr int kWarps = kInShared ? 2 : kGradientWarps, kThreads = kWarps * kWarp;
  using Block = QueryBlock<kWarps>;
  using Stages = KeyStages<kHead, kThreads>;
  static constexpr int kTileBytes = Block::kQueries * kRowBytes<kHead>;
  static constexpr int kBytes = Stages::kBytes + (kInShared ? 2 * kTileBytes : 0);

  __device__ static SharedAddress q() { return Stages::k(0) + Stages::kBytes; }
  __device__ static SharedAddress d_o() { return q() + kTileBytes; }
};

// Computes d_q, 16 queries per warp. As in forward, queries stay in registers (or shared memory) and tiles of
// keys pass through shared memory.
template <int kHead>
__global__ void __launch_bounds__(QueryGradient<kHead>::kThreads, kGradientBlocks<kHead>)
    tree_attention_query_gradient_kernel(const TreeAttentionCuda<BFloat16Bits> in,
                                         const TreeAttentionCudaGradient<BFloat16Bits> gradient) {
  constexpr int kKeys = kHead > 64 ? 32 : 64;  // keys at a time; q and d_o need registers, too
  constexpr int kTiles = kKeys / 8;
  using Shape = QueryGradient<kHead>;
  using Block = typename Shape::Block;
  using Stages = typename Shape::Stages;
  const int num_tokens = static_cast<int>(in.num_tokens), head_dim = static_cast<int>(in.head_dim);
  const int64_t stride = in.num_heads * in.head_dim;
  KeyWalk<kHead, Block, Shape::kThreads> walk(in);
  constexpr int kDepth = Shape::kInShared ? 1 : kHead / 16;
  uint32_t q[kDepth][4], d_o[kDepth][4];
  const int num_rows = num_tokens - Block::warp_begin();
  if constexpr (Shape::kInShared) {
    const int64_t first = (Block::begin() * in.num_heads + Block::head()) * in.head_dim;
    const int count = num_tokens - Block::begin();
    load_tile<kHead, Block::kQueries, Shape::kThreads>(Shape::q(), in.q + first, stride, count, head_dim);
    load_tile<kHead, Block::kQueries, Shape::kThreads>(Shape::d_o(), gradient.d_o + first, stride, count,
                                                       head_dim);
  } else {
    load_fragments<kHead>(q, in.q + Block::offset(in), stride, num_rows, head_dim);
    load_fragments<kHead>(d_o, gradient.d_o + Block::offset(in), stride, num_rows, head_dim);
  }
  float lse[2], dots[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = thread_index() % kWarp / 4 + half * 8;
    const int64_t scalar = Block::head() * in.num_tokens + Block::warp_begin() + i;
    lse[half] = i < num_rows ? gradient.log2_sums[scalar] : 0;
    dots[half] = i < num_rows ? gradient.dots[scalar] : 0;
  }
  const LaneOffsets<kHead> lanes;
  const float scale = in.scale * kLog2E;
  float d_q[kHead / 8][4] = {};
  walk.run([&](int stage, int first_key, bool masked) {
#pragma unroll 1
    for (int key = 0; key < kTensorTile; key += kKeys) {
      float scores[kTiles][4] = {}, d_p[kTiles][4] = {};
      const auto multiply = [&](float(&c)[kTiles][4], const uint32_t(&a)[kDepth][4], SharedAddress shared_a,
                                SharedAddress b) {
        if constexpr (Shape::kInShared)
          multiply_tile_rows<kHead>(c, shared_a + lanes.tall, Block::warp_begin() - Block::begin(),
                                    b + lanes.wide + key * kRowBytes<kHead>);
        else multiply_rows<kHead>(c, a, b + lanes.wide, key);
      };
      multiply(scores, q, Shape::q(), Stages::k(stage));
      if (masked) mask_keys(scores, Stages::ends(stage) + key, first_key + key, Block::warp_begin());
      multiply(d_p, d_o, Shape::d_o(), Stages::v(stage));
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          d_p[n][e] = exp2_approximate(scores[n][e] * scale - lse[e / 2]) * (d_p[n][e] - dots[e / 2]);
      uint32_t d_s[kTiles / 2][4];
      round_fragments(d_s, d_p);
      multiply_columns<kHead>(d_q, d_s, Stages::k(stage) + lanes.tall, key);
    }
  });

  store_fragments<kHead>(gradient.d_q + Block::offset(in), stride, d_q, {in.scale, in.scale},
                         num_tokens - Block::warp_begin(), head_dim);
}

// Shared memory of a thread block: its tile of keys and values, and two buffers (stages) of queries; for wide
// heads one.
template <int kHead>
struct QueryStages {
  static constexpr int kQueries = 32;
  static constexpr int kKeyBytes = kTensorTile * kRowBytes<kHead>;
  static constexpr int kTileBytes = kQueries * kRowBytes<kHead>;
  static constexpr int kStageBytes = 2 * kTileBytes + 2 * kQueries * 4;  // q, d_o, log-sum-exp, D
  static constexpr int kBytes = 2 * kKeyBytes + kStagesOf<kHead> * kStageBytes;
  static_assert(kStageBytes % 256 == 0);

  __device__ static SharedAddress k() { return shared_address(dynamic_shared_memory()); }
  __device__ static SharedAddress v() { return k() + kKeyBytes; }
  __device__ static SharedAddress q(int stage) { return k() + 2 * kKeyBytes + stage * kStageBytes; }
  __device__ static SharedAddress d_o(int stage) { return q(stage) + kTileBytes; }
  // Per query of the stage: [kQueries] log-sum-exp in base 2, then [kQueries] D.
  __device__ static const float* scalars(int stage) {
    return reinterpret_cast<const float*>(dynamic_shared_memory() + 2 * kKeyBytes + stage * kStageBytes +
                                          2 * kTileBytes);
  }

  __device__ static void load(int stage, const TreeAttentionCuda<BFloat16Bits>& in,
                              const TreeAttentionCudaGradient<BFloat16Bits>& gradient, int64_t head,
                              int begin) {
    const int count = static_cast<int>(in.num_tokens) - begin, head_dim = static_cast<int>(in.head_dim);
    const int64_t stride = in.num_heads * in.head_dim, offset = begin * stride + head * in.head_dim;
    load_tile<kHead, kQueries, kGradientThreads>(q(stage), in.q + offset, stride, count, head_dim);
    load_tile<kHead, kQueries, kGradientThreads>(d_o(stage), gradient.d_o + offset, stride, count, head_dim);
    const int64_t scalar = head * in.num_tokens + begin;
    load_scalars<kQueries>(d_o(stage) + kTileBytes, gradient.log2_sums + scalar, count);
    load_scalars<kQueries>(d_o(stage) + kTileBytes + kQueries * 4, gradient.dots + scalar, count);
  }
};

// The destination of a tile's gradients, [keys, groups, head_dim]: the stack's tensors or the pass's tensors.
// If in_parts, the part of this thread block, which covers the keys of stack and pass.
struct KeyGradientRows {
  float *d_k, *d_v;

  __device__ KeyGradientRows(const TreeAttentionCuda<BFloat16Bits>& in,
                             const TreeAttentionCudaGradient<BFloat16Bits>& gradient, const KeyTile& tile,
                             bool in_parts) {
    const int64_t row = in.num_groups * in.head_dim, size = (in.num_stack + in.num_tokens) * row;
    if (in_parts) {
      d_k = gradient.parts + 2 * blockIdx.z * size + tile.begin * row;
      d_v = d_k + size;
    } else if (tile.first_key < 0) {
      d_k = gradient.d_k_stack + tile.begin * row;
      d_v = gradient.d_v_stack + tile.begin * row;
    } else {
      d_k = gradient.d_k + tile.first_key * row;
      d_v = gradient.d_v + tile.first_key * row;
    }
  }
};

// Computes d_k and d_v, 16 keys per warp, in registers. Sums over all queries of all query heads of the
// key/value head. Scores are transposed: matrix rows are keys, so that pᵀ and dSᵀ are operands of the next
// product without leaving their registers. If several thread blocks (gridDim.z) divide the query heads, each
// writes its sums to its own part. The registers of a thread do not hold both sums of wide heads, so these
// take one kernel for d_k and one for d_v, which both compute the weights.
enum class KeySums { kBoth, kKeys, kValues };
template <int kHead, KeySums kSums>
__global__ void __launch_bounds__(kGradientThreads, kGradientBlocks<kHead>)
    tree_attention_key_gradient_kernel(const TreeAttentionCuda<BFloat16Bits> in,
                                       const TreeAttentionCudaGradient<BFloat16Bits> gradient) {
  using Stages = QueryStages<kHead>;
  constexpr int kQueries = Stages::kQueries, kTiles = kQueries / 8;
  constexpr bool kHasKeys = kSums != KeySums::kValues, kHasValues = kSums != KeySums::kKeys;
  constexpr bool kHasTwo = kStagesOf<kHead> == 2;
  static_assert(kGradientWarps * kFragmentRows == kTensorTile);
  const int64_t group = blockIdx.x, heads = in.num_heads / in.num_groups;
  const bool in_parts = gridDim.z > 1;
  const KeyTiles tiles(in.num_stack, in.num_tokens, kTensorTile);
  const KeyTile tile = tiles[static_cast<int>(blockIdx.y)];
  const bool on_stack = tile.first_key < 0;
  const int head_dim = static_cast<int>(in.head_dim);
  const int max_end = key_span(in.spans, static_cast<int>(blockIdx.y)).max_end;
  // Only queries in [first_query, max_end) see keys of the tile.
  const int first_query = max(tile.first_key, 0) / kQueries * kQueries;
  const bool seen = first_query < max_end;  // false for stack tiles that no query sees
  if (!seen && !in_parts) return;
  int64_t head = group * heads + heads * blockIdx.z / gridDim.z;
  const int64_t last_head = seen ? group * heads + heads * (blockIdx.z + 1) / gridDim.z : head;

  const int64_t key_stride = in.num_groups * in.head_dim;
  if (seen) {
    load_tile<kHead, kTensorTile, kGradientThreads>(Stages::k(), key_rows(in, tile, in.k_stack, in.k, group),
                                                    key_stride, tile.count, head_dim);
    load_tile<kHead, kTensorTile, kGradientThreads>(Stages::v(), key_rows(in, tile, in.v_stack, in.v, group),
                                                    key_stride, tile.count, head_dim);
    Stages::load(0, in, gradient, head, first_query);
  }

  const int warp_row = static_cast<int>(threadIdx.x / kWarp) * kFragmentRows;
  const int row = warp_row + static_cast<int>(threadIdx.x % kWarp / 4), pair = threadIdx.x % 4 * 2;
  const int warp_key = tile.first_key + warp_row;
  int end[2];  // end_local of the tile's keys `row` and `row + 8`
#pragma unroll
  for (int half = 0; half < 2; ++half)
    end[half] = row + half * 8 < tile.count ? in.end_local[tile.begin + row + half * 8] : 0;
  KeySpan span{min(end[0], end[1]), max(end[0], end[1])};
#pragma unroll
  for (int lane = 4; lane < kWarp; lane *= 2) {
    span.min_end = min(span.min_end, __shfl_xor_sync(kAllLanes, span.min_end, lane));
    span.max_end = max(span.max_end, __shfl_xor_sync(kAllLanes, span.max_end, lane));
  }

  const LaneOffsets<kHead> lanes;
  const SharedAddress k = Stages::k() + lanes.tall, v = Stages::v() + lanes.tall;
  const float scale = in.scale * kLog2E;
  float d_k[kHasKeys ? kHead / 8 : 1][4] = {}, d_v[kHasValues ? kHead / 8 : 1][4] = {};
  const auto compute = [&](int stage, int begin) {
    const bool masked = !all_visible(warp_key, kFragmentRows, span, begin, begin + kQueries);
    float scores[kTiles][4] = {}, d_p[kTiles][4] = {};
    multiply_tile_rows<kHead>(scores, k, warp_row, Stages::q(stage) + lanes.wide);
    if constexpr (kHasKeys) multiply_tile_rows<kHead>(d_p, v, warp_row, Stages::d_o(stage) + lanes.wide);
    const float* scalars = Stages::scalars(stage) + pair;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(scalars + n * 8);
      const float2 dots = *reinterpret_cast<const float2*>(scalars + kQueries + n * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = begin + n * 8 + pair + e % 2;
        const bool hidden = masked && (tile.first_key + row + e / 2 * 8 > i || i >= end[e / 2]);
        const float p = hidden ? 0 : exp2_approximate(scores[n][e] * scale - (e % 2 ? lse.y : lse.x));
        scores[n][e] = p;
        d_p[n][e] = p * (d_p[n][e] - (e % 2 ? dots.y : dots.x));
      }
    }
    uint32_t p[kTiles / 2][4], d_s[kTiles / 2][4];
    if constexpr (kHasValues) {
      round_fragments(p, scores);
      multiply_columns<kHead>(d_v, p, Stages::d_o(stage) + lanes.tall, 0);
    }
    if constexpr (kHasKeys) {
      round_fragments(d_s, d_p);
      multiply_columns<kHead>(d_k, d_s, Stages::q(stage) + lanes.tall, 0);
    }
  };
  int query = first_query;
  for (int stage = 0; head < last_head; stage ^= kHasTwo ? 1 : 0) {
    const bool last = query + kQueries >= max_end;
    const int64_t next_head = head + (last ? 1 : 0);
    const int next_query = last ? first_query : query + kQueries;
    wait_for_copies();
    __syncthreads();  // this tile has arrived; all warps have read the tile that the next load overwrites
    if (kHasTwo && next_head < last_head) Stages::load(stage ^ 1, in, gradient, next_head, next_query);
    const int begin = query;
    head = next_head;
    query = next_query;
    if (any_visible(warp_key, span, begin, begin + kQueries)) compute(stage, begin);
    if constexpr (!kHasTwo) {
      __syncthreads();  // all warps have read these queries
      if (head < last_head) Stages::load(0, in, gradient, head, query);
    }
  }

  const KeyGradientRows to(in, gradient, tile, in_parts);
  const bool add = on_stack && !in_parts;
  const auto put = [&](float* rows, int i, int column, float x, float y) {
    auto* p = reinterpret_cast<float2*>(rows + i * key_stride + group * in.head_dim + column);
    const float2 old = add ? *p : float2{0, 0};
    *p = {old.x + x, old.y + y};
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + half * 8;
    if (i >= tile.count) break;
#pragma unroll
    for (int n = 0; n < kHead / 8; ++n) {
      if (n * 8 >= head_dim) break;
      if constexpr (kHasKeys)
        put(to.d_k, i, n * 8 + pair, d_k[n][2 * half] * in.scale, d_k[n][2 * half + 1] * in.scale);
      if constexpr (kHasValues) put(to.d_v, i, n * 8 + pair, d_v[n][2 * half], d_v[n][2 * half + 1]);
    }
  }
}

// Sums the parts in order into d_k (blockIdx.y 0) or d_v (1). Each thread sums four elements.
__global__ void add_key_gradient_parts_kernel(const TreeAttentionCuda<BFloat16Bits> in,
                                              const TreeAttentionCudaGradient<BFloat16Bits> gradient,
                                              int64_t num_parts) {
  const int64_t row = in.num_groups * in.head_dim, size = (in.num_stack + in.num_tokens) * row;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
  if (i >= size) return;
  const bool on_stack = i < in.num_stack * row, is_k = blockIdx.y == 0;
  float* const out = on_stack ? (is_k ? gradient.d_k_stack : gradient.d_v_stack) + i
                              : (is_k ? gradient.d_k : gradient.d_v) + i - in.num_stack * row;
  const float* part = gradient.parts + blockIdx.y * size + i;
  float sum[4], x[4];
  load(sum, part);
  for (int64_t p = 1; p < num_parts; ++p) {
    load(x, part + 2 * p * size);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] += x[j];
  }
  if (on_stack) {
    load(x, out);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] += x[j];
  }
  store(out, sum);
}

}  // namespace bough
