// Paged attention of bf16 heads on the tensor cores. A CUDA thread block computes one item (paged_work.h) for
// one key/value head. Tiles of 64 keys (four pages) pass through two buffers (stages) of shared memory. Heads
// wider than 128 have one stage, so that a thread block fits into the 99 KiB of compute capability 8.6 and
// 8.9, and two into the shared memory of an H100. A fragment is 16 query vectors. Small items have one
// fragment: each warp takes one page of each tile, and the warps' running softmaxes are merged at the end.
// Large items have four fragments: each warp takes one fragment and all keys.
#pragma once

#include "kernels/common/cuda_tiles.cuh"
#include "kernels/paged_attention/paged_attention_cuda.h"

namespace bough {

constexpr int kPagedWarps = 4;
constexpr int kPagedThreads = kPagedWarps * kWarp;
constexpr int kPagedTile = 64;  // keys
constexpr int kTilePages = kPagedTile / kPagedPageTokens;

// Pointers to the sections of the work.
struct PagedWorkView {
  const PagedHeader* header;
  const PagedItem *large, *small;
  const PagedRow* rows;
  const PagedMerge* merges;
  const int32_t *slots, *pages;

  __device__ PagedWorkView(const int32_t* work, const PagedLayout& layout)
      : header(reinterpret_cast<const PagedHeader*>(work)),
        large(reinterpret_cast<const PagedItem*>(work + layout.large())),
        small(reinterpret_cast<const PagedItem*>(work + layout.small())),
        rows(reinterpret_cast<const PagedRow*>(work + layout.rows())),
        merges(reinterpret_cast<const PagedMerge*>(work + layout.merges())),
        slots(work + layout.slots()),
        pages(work + layout.pages()) {}
};

// One query vector of an item: a row (query token) and a query head of the thread block's key/value head.
struct PagedEntry {
  int token = -1, head = 0, limit = 0, part = -1;  // token is -1 if there is no such vector

  __device__ PagedEntry(const PagedItem& item, const PagedRow* rows, int index, int group, int heads) {
    if (index >= item.num_rows * heads) return;
    const PagedRow row = rows[item.row_begin + index / heads];
    token = row.token;
    head = group * heads + index % heads;
    limit = min(row.limit, item.key_end);  // keys from it on are zeros in the tile
    part = row.part;
  }
};

// The place that an entry is written to: o if this item finishes the row (part is nullptr), else a part.
template <class T>
struct PagedOutput {
  T* o;
  float* part;
  float* part_sums;

  __device__ PagedOutput(const PagedAttentionCuda<T>& in, const PagedEntry& entry) {
    const bool is_part = entry.part >= 0;
    const int64_t row = static_cast<int64_t>(is_part ? entry.part : entry.token) * in.num_heads + entry.head;
    o = is_part ? nullptr : in.o + row * in.head_dim;
    part = is_part ? in.parts + row * in.head_dim : nullptr;
    part_sums = is_part ? in.part_sums + row * 2 : nullptr;
  }
};

template <int kHead>
struct PageStages {
  static constexpr bool kHasTwo = kHead <= 128;
  static constexpr int kTileBytes = kPagedTile * kRowBytes<kHead>;
  static constexpr int kJoinStride = kHead + 8;  // of write_joined()
  static constexpr int kJoinBytes = kPagedWarps * kFragmentRows * (kJoinStride + 2) * 4;
  static constexpr int kStageBytes = 2 * kTileBytes * (kHasTwo ? 2 : 1);
  static constexpr int kBytes = kStageBytes > kJoinBytes ? kStageBytes : kJoinBytes;
  static_assert(kBytes <= 99 << 10);
  static constexpr int kChunks = kHead / 8;              // chunks of 16 bytes per row
  static constexpr int kStep = kPagedThreads / kChunks;  // keys that the thread block copies at a time
  static_assert(kPagedPageTokens % kStep == 0 && (kStep % 8 == 0 || 8 % kStep == 0));

  __device__ static SharedAddress k(int stage) {
    return shared_address(dynamic_shared_memory()) + stage * 2 * kTileBytes;
  }
  __device__ static SharedAddress v(int stage) { return k(stage) + kTileBytes; }

  // Reads the page ids of a tile. Called one tile before load(), which computes addresses from them.
  __device__ static void read_pages(int (&ids)[kTilePages], const int32_t* pages, int tile, int num_pages) {
#pragma unroll
    for (int p = 0; p < kTilePages; ++p) {
      const int page = tile * kTilePages + p;
      ids[p] = page < num_pages ? pages[page] : 0;
    }
  }

  // Loads a tile of keys and values, with zeros from key num_keys on, because pages may hold anything there.
  __device__ static void load(int stage, const PagedAttentionCuda<BFloat16Bits>& in,
                              const int (&ids)[kTilePages], int group, int num_keys) {
    const int thread = thread_index(), first = thread / kChunks, chunk = thread % kChunks;
    const int head_dim = static_cast<int>(in.head_dim);
    const bool in_head = chunk * 8 < head_dim;
    const SharedAddress tile = k(stage) + first * kRowBytes<kHead>;
#pragma unroll
    for (int row = 0; row < kPagedTile; row += kStep) {
      const int64_t page = static_cast<int64_t>(ids[row / kPagedPageTokens]) * in.num_groups + group;
      const int place = row % kPagedPageTokens + first;
      const int64_t from = (page * kPagedPageTokens + place) * head_dim + chunk * 8;
      const bool valid = row + first < num_keys && in_head;
      const SharedAddress to = tile + (chunk ^ (kStep % 8 == 0 ? first % 8 : first + row % 8)) * 16;
      copy_async<16>(to + row * kRowBytes<kHead>, in.keys + from, valid);
      copy_async<16>(to + kTileBytes + row * kRowBytes<kHead>, in.values + from, valid);
    }
  }
};

// Loads the fragment of 16 query vectors. Each lane holds pieces of two of the vectors.
template <int kHead>
__device__ inline void load_entries(uint32_t (&a)[kHead / 16][4], const PagedAttentionCuda<BFloat16Bits>& in,
                                    const PagedEntry (&entries)[2]) {
  const int pair = thread_index() % 4 * 2, head_dim = static_cast<int>(in.head_dim);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const PagedEntry& entry = entries[half];
    const BFloat16Bits* q =
        in.q + (static_cast<int64_t>(max(entry.token, 0)) * in.num_heads + entry.head) * head_dim;
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k)
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const int column = k * 16 + right * 8 + pair;
        const bool valid = entry.token >= 0 && column < head_dim;
        a[k][right * 2 + half] = valid ? *reinterpret_cast<const uint32_t*>(q + column) : 0;
      }
  }
}

// Sets the scores of keys from an entry's limit on to -infinity. first_key: number of the key in the
// fragment's first column.
template <int kTiles>
__device__ inline void mask_limits(float (&c)[kTiles][4], int first_key, const PagedEntry (&entries)[2]) {
  const int key = first_key + thread_index() % 4 * 2;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (key + n * 8 + e % 2 >= entries[e / 2].limit) c[n][e] = -INFINITY;
}

// Writes two adjacent sums of an entry.
__device__ inline void put(const PagedOutput<BFloat16Bits>& out, int column, float a, float b,
                           float inverse) {
  if (out.part) *reinterpret_cast<float2*>(out.part + column) = {a, b};
  else *reinterpret_cast<uint32_t*>(out.o + column) = pack_bf16(a * inverse, b * inverse);
}

// For large items: writes the 16 entries of this warp.
template <int kHead>
__device__ inline void write_own(const PagedAttentionCuda<BFloat16Bits>& in, const PagedEntry (&entries)[2],
                                 const float (&sums)[kHead / 8][4], const float (&row_max)[2],
                                 const float (&row_sum)[2], float scale) {
  const int pair = thread_index() % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (entries[half].token < 0) continue;
    const PagedOutput<BFloat16Bits> out(in, entries[half]);
    const float inverse = 1 / row_sum[half];
#pragma unroll
    for (int n = 0; n < kHead / 8; ++n)
      if (n * 8 < in.head_dim) put(out, n * 8 + pair, sums[n][2 * half], sums[n][2 * half + 1], inverse);
    if (out.part && pair == 0)
      *reinterpret_cast<float2*>(out.part_sums) = {row_max[half] * scale, row_sum[half]};
  }
}

// For small items: merges the softmaxes of the four warps, in the order of the warps, and writes the result.
// The warps have the same 16 entries and different keys.
template <int kHead>
__device__ inline void write_joined(const PagedAttentionCuda<BFloat16Bits>& in, const PagedItem& item,
                                    const PagedRow* rows, int group, const float (&sums)[kHead / 8][4],
                                    const float (&row_max)[2], const float (&row_sum)[2], float scale) {
  // This stride puts eight matrix rows of a fragment in different banks.
  constexpr int kStride = PageStages<kHead>::kJoinStride;
  float* const shared = reinterpret_cast<float*>(dynamic_shared_memory());
  float2* const states = reinterpret_cast<float2*>(shared + kPagedWarps * kFragmentRows * kStride);
  const int thread = thread_index(), warp = thread / kWarp, lane_row = thread % kWarp / 4,
            pair = thread % 4 * 2;
  __syncthreads();  // all warps have read the last tile
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * kFragmentRows + lane_row + half * 8;
#pragma unroll
    for (int n = 0; n < kHead / 8; ++n)
      *reinterpret_cast<float2*>(shared + row * kStride + n * 8 + pair) = {sums[n][2 * half],
                                                                           sums[n][2 * half + 1]};
    if (pair == 0) states[row] = {row_max[half] * scale, row_sum[half]};
  }
  __syncthreads();
  const int heads = static_cast<int>(in.num_heads / in.num_groups);
  const int row = thread / 8, part = thread % 8;  // eight threads per entry
  const PagedEntry entry(item, rows, row, group, heads);
  if (entry.token < 0) return;
  const PagedOutput<BFloat16Bits> out(in, entry);
  float largest = -INFINITY, weights[kPagedWarps], sum = 0;
#pragma unroll
  for (int w = 0; w < kPagedWarps; ++w) largest = fmaxf(largest, states[w * kFragmentRows + row].x);
  const float base = largest == -INFINITY ? 0 : largest;
#pragma unroll
  for (int w = 0; w < kPagedWarps; ++w) {
    const float2 state = states[w * kFragmentRows + row];
    weights[w] = exp2_approximate(state.x - base);
    sum += weights[w] * state.y;
  }
  for (int column = part * 2; column < in.head_dim; column += 16) {
    float a = 0, b = 0;
#pragma unroll
    for (int w = 0; w < kPagedWarps; ++w) {
      const float2 x =
          *reinterpret_cast<const float2*>(shared + (w * kFragmentRows + row) * kStride + column);
      a += weights[w] * x.x;
      b += weights[w] * x.y;
    }
    put(out, column, a, b, 1 / sum);
  }
  if (out.part && part == 0) *reinterpret_cast<float2*>(out.part_sums) = {largest, sum};
}

// CUDA thread blocks per multiprocessor: as many as fit without spilling registers.
template <int kHead, bool kLarge>
constexpr int kPagedBlocks = kHead > 128  ? 2
                             : kHead > 64 ? (kLarge ? 2 : 3)
                                          : (kLarge ? 3 : 4);

// If kLarge, each warp has a different fragment of 16 entries. Otherwise all warps have the same fragment.
template <int kHead, bool kLarge>
__global__ void __launch_bounds__(kPagedThreads, kPagedBlocks<kHead, kLarge>)
    paged_attention_kernel(const PagedAttentionCuda<BFloat16Bits> in) {
  constexpr int kWarpKeys = kLarge ? kPagedTile : kPagedPageTokens;  // of a tile
  // Keys at a time. q and sums of wide heads leave few registers.
  constexpr int kKeys = kHead > 128 ? kPagedPageTokens : kWarpKeys;
  constexpr int kTiles = kKeys / 8;
  using Stages = PageStages<kHead>;
  const PagedWorkView work(in.work, in.layout);
  const int index = static_cast<int>(blockIdx.x);
  if (index >= (kLarge ? work.header->num_large : work.header->num_small)) return;
  const PagedItem item = (kLarge ? work.large : work.small)[index];
  const int group = item.group < 0 ? static_cast<int>(blockIdx.y) : item.group;
  const int heads = static_cast<int>(in.num_heads / in.num_groups);
  const int warp = static_cast<int>(threadIdx.x / kWarp),
            lane_row = static_cast<int>(threadIdx.x % kWarp / 4);
  const int first_entry = (kLarge ? warp * kFragmentRows : 0) + lane_row;
  const int warp_key = kLarge ? 0 : warp * kPagedPageTokens;  // first key of the warp in a tile
  const int num_keys = item.key_end - item.first_key;
  const int num_tiles = (num_keys + kPagedTile - 1) / kPagedTile;
  const int num_pages = (num_keys + kPagedPageTokens - 1) / kPagedPageTokens;
  const int32_t* pages = work.pages + item.page_begin;

  int ids[kTilePages];
  Stages::read_pages(ids, pages, 0, num_pages);
  Stages::load(0, in, ids, group, num_keys);
  Stages::read_pages(ids, pages, 1, num_pages);
  const PagedEntry entries[2] = {{item, work.rows, first_entry, group, heads},
                                 {item, work.rows, first_entry + 8, group, heads}};
  uint32_t q[kHead / 16][4];
  load_entries<kHead>(q, in, entries);
  const LaneOffsets<kHead> lanes;
  const float scale = in.scale * kLog2E;
  float sums[kHead / 8][4] = {};
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0, 0};
  const auto load_next = [&](int stage, int tile) {
    if (tile + 1 >= num_tiles) return;
    Stages::load(stage, in, ids, group, num_keys - (tile + 1) * kPagedTile);
    Stages::read_pages(ids, pages, tile + 2, num_pages);
  };
  for (int tile = 0, stage = 0; tile < num_tiles; ++tile, stage ^= Stages::kHasTwo ? 1 : 0) {
    wait_for_copies();
    __syncthreads();  // this tile has arrived; all warps have read the tile that the next load overwrites
    if constexpr (Stages::kHasTwo) load_next(stage ^ 1, tile);
#pragma unroll 1
    for (int key = warp_key; key < warp_key + kWarpKeys; key += kKeys) {
      const int first_key = item.first_key + tile * kPagedTile + key;
      if (first_key >= item.key_end) break;
      float scores[kTiles][4] = {};
      multiply_rows<kHead>(scores, q, Stages::k(stage) + lanes.wide, key);
      if (first_key + kTiles * 8 > item.min_limit) mask_limits(scores, first_key, entries);
      online_softmax(scores, row_max, row_sum, sums, scale);
      uint32_t p[kTiles / 2][4];
      round_fragments(p, scores);
      multiply_columns<kHead>(sums, p, Stages::v(stage) + lanes.tall, key);
    }
    if constexpr (!Stages::kHasTwo) {
      __syncthreads();  // all warps have read this tile
      load_next(0, tile);
    }
  }
  for (float& sum : row_sum) sum = quad_sum(sum);
  if constexpr (kLarge) write_own<kHead>(in, entries, sums, row_max, row_sum, scale);
  else write_joined<kHead>(in, item, work.rows, group, sums, row_max, row_sum, scale);
}

}  // namespace bough
