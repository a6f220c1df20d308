// Forward on the tensor cores, as in FlashAttention-2 (arXiv 2307.08691, algorithm 1). A CUDA thread block
// has 16 queries per warp, all of one head. Queries stay in registers. The thread block iterates over the
// tiles of keys that any of its queries sees.
#pragma once

#include "kernels/tree_attention/tree_attention_tiles.cuh"

namespace bough {

// Sets the scores of keys that a query does not see to -infinity. c: queries x keys. ends: of the keys.
template <int kTiles>
__device__ inline void mask_keys(float (&c)[kTiles][4], const int32_t* ends, int first_key, int first_query) {
  const int thread = thread_index(), query = first_query + thread % kWarp / 4, pair = thread % 4 * 2;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int2 end = *reinterpret_cast<const int2*>(ends + n * 8 + pair);
    const int key = first_key + n * 8 + pair;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = query + e / 2 * 8;
      if (key + e % 2 > i || i >= (e % 2 ? end.y : end.x)) c[n][e] = -INFINITY;
    }
  }
}

// CUDA thread blocks per multiprocessor: as many as fit without spilling registers.
template <int kHead, int kWarps>
constexpr int kForwardBlocks = (kHead > 64   ? 8
                                : kWarps > 4 ? 16
                                             : 12) /
                               kWarps;

template <int kHead, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp, kForwardBlocks<kHead, kWarps>)
    tree_attention_forward_kernel(const TreeAttentionCuda<BFloat16Bits> in, BFloat16Bits* o, float* lse) {
  constexpr int kKeys = kHead > 128 ? 32 : kTensorTile;  // keys at a time; q and sums need registers, too
  constexpr int kTiles = kKeys / 8;
  using Block = QueryBlock<kWarps>;
  using Stages = KeyStages<kHead, kWarps * kWarp>;
  const int num_tokens = static_cast<int>(in.num_tokens), head_dim = static_cast<int>(in.head_dim);
  const int64_t stride = in.num_heads * in.head_dim;
  KeyWalk<kHead, Block, kWarps * kWarp> walk(in);
  uint32_t q[kHead / 16][4];
  load_fragments<kHead>(q, in.q + Block::offset(in), stride, num_tokens - Block::warp_begin(), head_dim);
  const LaneOffsets<kHead> lanes;
  const float scale = in.scale * kLog2E;
  float sums[kHead / 8][4] = {};
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0, 0};
  walk.run([&](int stage, int first_key, bool masked) {
#pragma unroll 1
    for (int key = 0; key < kTensorTile; key += kKeys) {
      float scores[kTiles][4] = {};
      multiply_rows<kHead>(scores, q, Stages::k(stage) + lanes.wide, key);
      if (masked) mask_keys(scores, Stages::ends(stage) + key, first_key + key, Block::warp_begin());
      online_softmax(scores, row_max, row_sum, sums, scale);
      uint32_t p[kTiles / 2][4];
      round_fragments(p, scores);
      multiply_columns<kHead>(sums, p, Stages::v(stage) + lanes.tall, key);
    }
  });

  for (float& sum : row_sum) sum = quad_sum(sum);
  const int num_rows = num_tokens - Block::warp_begin();
  store_fragments<kHead>(o + Block::offset(in), stride, sums, {1 / row_sum[0], 1 / row_sum[1]}, num_rows,
                         head_dim);
  const int thread = thread_index();
  if (thread % 4 != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = thread % kWarp / 4 + half * 8;
    if (i < num_rows)
      lse[(Block::warp_begin() + i) * in.num_heads + Block::head()] =
          row_max[half] * in.scale + logf(row_sum[half]);
  }
}

}  // namespace bough
