// fp32 tiles of up to 128 queries x 128 keys by ATen's brgemm (oneDNN), computed a slice of 32 rows at a time: a
// product, the softmax of its rows, the next product. bf16 is widened when a tile is loaded.
//
//   left factor [m, k]: rows, m a multiple of 32; right factor [k, n]; product [m, n]; all row-major, padded with zeros
//   to padded_rows() rows
#include <ATen/ATen.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include "kernels/common/aligned_buffer.h"
#include "kernels/common/dispatch.h"
#include "kernels/tree_attention/tree_attention_cpu.h"
#include "kernels/tree_attention/tree_attention_isa.h"

namespace bough {

namespace {
constexpr int64_t kTile = 128;
constexpr int64_t kSlice =
    32;  // rows of a tile whose scores are in flight at once: they stay in the nearest cache
constexpr float kOne = 1.0f;

// Rows of `width` elements of a tensor.
template <class T>
struct Rows {
  const T* data;
  int64_t count, width, stride;
};

// brgemm compiles a kernel for each shape it meets, hence three sizes of tiles.
int64_t padded_rows(int64_t rows) {
  return rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
}

template <class T>
void load_rows(float* dst, const Rows<T>& src, int64_t rows) {
  BOUGH_ISA_CALL(load_tile, dst, src.data, src.count, rows, src.width, src.stride);
}
template <class T>
void load_transposed(float* dst, const Rows<T>& src, int64_t rows) {
  BOUGH_ISA_CALL(load_tile_transposed, dst, src.data, src.count, rows, src.width, src.stride);
}

struct ProductShape {
  int64_t m, n, k;
};
void multiply(float* c, const float* left, const float* right, ProductShape s, bool accumulate) {
  at::native::cpublas::brgemm(s.m, s.n, s.k, s.k, s.n, s.n, accumulate, left, right, c, /*is_vnni=*/false);
}
// c += leftᵀ · right; left: [k, m].
void multiply_turned(float* c, const float* left, float* scratch, const float* right, ProductShape s) {
  BOUGH_ISA_CALL(transpose_tile, scratch, left, s.k, s.m);
  multiply(c, scratch, right, s, true);
}

// Keys in tiles that do not straddle stack and pass, with the span of their ends: what decides whether a tile of
// queries can skip them.
struct KeyTile {
  Range keys;  // into end_local
  int32_t min_end, max_end;
};

std::vector<KeyTile> make_key_tiles(const AttentionShape& shape, const int32_t* end_local) {
  std::vector<KeyTile> tiles;
  const auto add = [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kTile) {
      const int64_t last = std::min(end, begin + kTile);
      const auto [min, max] = std::minmax_element(end_local + begin, end_local + last);
      tiles.push_back({{begin, last}, *min, *max});
    }
  };
  add(0, shape.num_stack);
  add(shape.num_stack, shape.num_stack + shape.num_queries);
  return tiles;
}

bool any_visible(const AttentionShape& shape, const KeyTile& tile, const Range& queries) {
  return tile.keys.begin - shape.num_stack < queries.end && queries.begin < tile.max_end;
}

TileMask make_mask(const AttentionShape& shape, const KeyTile& tile, const Range& queries,
                   const int32_t* end_local) {
  const int64_t first_key = tile.keys.begin - shape.num_stack;
  const bool all_visible =
      tile.keys.end - 1 - shape.num_stack <= queries.begin && queries.end <= tile.min_end;
  return {queries.begin, first_key, end_local + tile.keys.begin, all_visible};
}

template <class T>
Rows<T> key_rows(const KeyTile& tile, const AttentionShape& shape, const T* stack, const T* own,
                 int64_t group) {
  const bool on_stack = tile.keys.begin < shape.num_stack;
  const T* rows = on_stack ? stack + tile.keys.begin * shape.k_stride()
                           : own + (tile.keys.begin - shape.num_stack) * shape.k_stride();
  return {rows + group * shape.head_dim, tile.keys.size(), shape.head_dim, shape.k_stride()};
}

template <class T>
void forward_tile(const TreeAttentionInput& in, const AttentionShape& shape,
                  const std::vector<KeyTile>& key_tiles, int64_t group, Range queries, T* o_data,
                  float* lse_data) {
  const int64_t heads = shape.heads_per_group();
  const int64_t width = shape.head_dim;
  const int64_t rows = padded_rows(queries.size());
  const AlignedBuffer<float> sums(heads * rows * (width + 2) + kSlice * kTile);
  float* const o = sums.get();
  float* const row_max = o + heads * rows * width;
  float* const row_sum = row_max + heads * rows;
  float* const scores = row_sum + heads * rows;
  const AlignedBuffer<float> tiles(heads * rows * width + 2 * kTile * width);
  float* const q = tiles.get();
  float* const k_transposed = q + heads * rows * width;
  float* const v = k_transposed + kTile * width;
  std::fill(o, o + heads * rows * width, 0.0f);
  std::fill(row_sum, row_sum + heads * rows, 0.0f);
  std::fill(row_max, row_max + heads * rows, -std::numeric_limits<float>::infinity());
  const T* q_data = data<T>(in.q_TNH) + queries.begin * shape.q_stride() + group * heads * shape.head_dim;
  for (int64_t h = 0; h < heads; ++h)
    load_rows(q + h * rows * width,
              Rows<T>{q_data + h * shape.head_dim, queries.size(), shape.head_dim, shape.q_stride()}, rows);
  const int32_t* end_local = data<int32_t>(in.end_local);
  for (const auto& tile : key_tiles) {
    if (!any_visible(shape, tile, queries)) continue;
    const int64_t keys = padded_rows(tile.keys.size());
    load_transposed(k_transposed, key_rows(tile, shape, data<T>(in.k_stack_PGH), data<T>(in.k_TGH), group),
                    keys);
    load_rows(v, key_rows(tile, shape, data<T>(in.v_stack_PGH), data<T>(in.v_TGH), group), keys);
    for (int64_t first = 0; first < queries.size(); first += kSlice) {
      const Range slice{queries.begin + first, std::min(queries.end, queries.begin + first + kSlice)};
      if (!any_visible(shape, tile, slice)) continue;
      const auto mask = make_mask(shape, tile, slice, end_local);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t row = h * rows + first;
        multiply(scores, q + row * width, k_transposed, {kSlice, keys, width}, false);
        BOUGH_ISA_CALL(online_softmax_tile, scores, scores, slice.size(), tile.keys.size(), keys, mask,
                       static_cast<float>(in.scale), row_max + row, row_sum + row, o + row * width, width);
        multiply(o + row * width, scores, v, {kSlice, width, keys}, true);
      }
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t head = group * heads + h;
    BOUGH_ISA_CALL(finish_tile, o_data + queries.begin * shape.q_stride() + head * shape.head_dim,
                   shape.q_stride(), o + h * rows * width, width, row_sum + h * rows, queries.size(),
                   shape.head_dim);
    for (int64_t i = 0; i < queries.size(); ++i)
      lse_data[(queries.begin + i) * shape.num_heads + head] =
          row_max[h * rows + i] + std::log(row_sum[h * rows + i]);
  }
}

template <class T>
void forward_tiles(const TreeAttentionInput& in, const at::Tensor& o, const at::Tensor& lse) {
  const AttentionShape shape(in);
  const auto key_tiles = make_key_tiles(shape, data<int32_t>(in.end_local));
  // Small passes are cut into smaller query tiles where there would not be a task for every thread.
  const int64_t tile =
      shape.num_queries * shape.num_groups >= kTile * at::get_num_threads() ? kTile : kTile / 4;
  const int64_t query_tiles = (shape.num_queries + tile - 1) / tile;
  T* o_data = mutable_data<T>(o);
  float* lse_data = mutable_data<float>(lse);
  at::parallel_for(0, query_tiles * shape.num_groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task / shape.num_groups * tile;
      forward_tile<T>(in, shape, key_tiles, task % shape.num_groups,
                      {first, std::min(shape.num_queries, first + tile)}, o_data, lse_data);
    }
  });
}

// Query tiles of one head in the forms that the backward products read.
struct QueryTile {
  Range queries;
  int64_t rows;                                    // padded
  float *q, *q_transposed, *d_o, *d_o_transposed;  // right factors: [rows, H], [H, rows], the same of d_o
  float *lse, *dots;                               // [rows]
};

class QueryTiles {
 public:
  explicit QueryTiles(const AttentionShape& shape)
      : shape_(shape),
        width_(shape.head_dim),
        per_head_((shape.num_queries + kTile - 1) / kTile),
        rows_per_head_(padded_rows(shape.num_queries - (per_head_ - 1) * kTile) + (per_head_ - 1) * kTile) {
    tiles_ = at::empty({shape.num_heads * rows_per_head_ * 4 * width_}, at::kFloat);
    scalars_ = at::empty({shape.num_heads * rows_per_head_ * 2}, at::kFloat);
  }

  int64_t per_head() const { return per_head_; }
  int64_t rows_per_head() const { return rows_per_head_; }
  int64_t width() const { return width_; }

  QueryTile tile(int64_t head, int64_t index) const {
    const Range queries{index * kTile, std::min(shape_.num_queries, (index + 1) * kTile)};
    const int64_t rows = padded_rows(queries.size());
    const int64_t row = head * rows_per_head_ + queries.begin;
    float* base = tiles_.data_ptr<float>() + row * 4 * width_;
    float* scalars = scalars_.data_ptr<float>() + row * 2;
    const int64_t block = rows * width_;
    return {queries, rows, base, base + block, base + 2 * block, base + 3 * block, scalars, scalars + rows};
  }

 private:
  const AttentionShape& shape_;
  int64_t width_, per_head_, rows_per_head_;
  at::Tensor tiles_, scalars_;
};

template <class T>
void load_query_tile(const TreeAttentionInput& in, const AttentionShape& shape, const QueryTile& tile,
                     int64_t head, const T* d_o_data, const T* o_data, const float* lse_data) {
  const int64_t offset = tile.queries.begin * shape.q_stride() + head * shape.head_dim;
  const int64_t count = tile.queries.size();
  const Rows<T> q{data<T>(in.q_TNH) + offset, count, shape.head_dim, shape.q_stride()};
  const Rows<T> d_o{d_o_data + offset, count, shape.head_dim, shape.q_stride()};
  load_rows(tile.q, q, tile.rows);
  load_transposed(tile.q_transposed, q, tile.rows);
  load_rows(tile.d_o, d_o, tile.rows);
  load_transposed(tile.d_o_transposed, d_o, tile.rows);
  BOUGH_ISA_CALL(row_dots, tile.dots, d_o.data, o_data + offset, count, shape.head_dim, shape.q_stride());
  for (int64_t i = 0; i < count; ++i)
    tile.lse[i] = lse_data[(tile.queries.begin + i) * shape.num_heads + head];
}

struct KeyGradients {
  float *d_k_own, *d_v_own, *d_k_stack, *d_v_stack;
};

// Rows of one key tile's gradients: added to the stack's, or written to the pass's own.
void store_key_gradients(const AttentionShape& shape, const KeyTile& tile, int64_t group, int64_t width,
                         const float* d_k, const float* d_v, const KeyGradients& gradients) {
  const bool on_stack = tile.keys.begin < shape.num_stack;
  const int64_t row = on_stack ? tile.keys.begin : tile.keys.begin - shape.num_stack;
  for (int64_t j = 0; j < tile.keys.size(); ++j) {
    const int64_t offset = (row + j) * shape.k_stride() + group * shape.head_dim;
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      if (on_stack) {
        gradients.d_k_stack[offset + d] += d_k[j * width + d];
        gradients.d_v_stack[offset + d] += d_v[j * width + d];
      } else {
        gradients.d_k_own[offset + d] = d_k[j * width + d];
        gradients.d_v_own[offset + d] = d_v[j * width + d];
      }
    }
  }
}

// One task: the key tiles [begin, end) of one group. Adds to its own d_q[heads of the group][query tiles][rows][H].
template <class T>
void backward_task(const TreeAttentionInput& in, const AttentionShape& shape,
                   const std::vector<KeyTile>& key_tiles, Range tiles, int64_t group,
                   const QueryTiles& query_tiles, const KeyGradients& gradients, float* d_q) {
  const int64_t width = query_tiles.width();
  const int64_t heads = shape.heads_per_group();
  const auto scale = static_cast<float>(in.scale);
  const int32_t* end_local = data<int32_t>(in.end_local);
  const AlignedBuffer<float> sums(2 * kTile * width + 2 * kSlice * kTile);
  float* const d_k = sums.get();
  float* const d_v = d_k + kTile * width;
  float* const scores = d_v + kTile * width;
  float* const d_scores = scores + kSlice * kTile;
  const AlignedBuffer<float> factors(2 * kTile * width + 2 * kTile * kTile);
  float* const k_tile = factors.get();
  float* const v_tile = k_tile + kTile * width;
  float* const d_s = v_tile + kTile * width;  // of all slices: the query's gradient reads it turned
  float* const turned = d_s + kTile * kTile;
  for (int64_t t = tiles.begin; t < tiles.end; ++t) {
    const auto& tile = key_tiles[t];
    const int64_t keys = padded_rows(tile.keys.size());
    const auto k = key_rows(tile, shape, data<T>(in.k_stack_PGH), data<T>(in.k_TGH), group);
    load_rows(k_tile, k, keys);
    load_rows(v_tile, key_rows(tile, shape, data<T>(in.v_stack_PGH), data<T>(in.v_TGH), group), keys);
    std::fill(d_k, d_k + keys * width, 0.0f);
    std::fill(d_v, d_v + keys * width, 0.0f);
    for (int64_t h = 0; h < heads; ++h) {
      float* d_q_tile = d_q + h * query_tiles.rows_per_head() * width;
      for (int64_t i = 0; i < query_tiles.per_head(); ++i) {
        const auto q = query_tiles.tile(group * heads + h, i);
        if (any_visible(shape, tile, q.queries)) {
          const auto mask = make_mask(shape, tile, q.queries, end_local);
          for (int64_t j = 0; j < keys; j += kSlice) {
            multiply(scores, k_tile + j * width, q.q_transposed, {kSlice, q.rows, width}, false);
            multiply(d_scores, v_tile + j * width, q.d_o_transposed, {kSlice, q.rows, width}, false);
            const TileMask slice{mask.first_query, mask.first_key + j, mask.end_local + j, mask.all_visible};
            BOUGH_ISA_CALL(softmax_backward_tile, scores, d_scores, scores, d_s + j * q.rows,
                           q.queries.size(), q.rows, std::clamp<int64_t>(tile.keys.size() - j, 0, kSlice),
                           kSlice, slice, q.lse, q.dots, scale);
            multiply(d_v + j * width, scores, q.d_o, {kSlice, width, q.rows}, true);
            multiply(d_k + j * width, d_s + j * q.rows, q.q, {kSlice, width, q.rows}, true);
          }
          multiply_turned(d_q_tile, d_s, turned, k_tile, {q.rows, width, keys});
        }
        d_q_tile += q.rows * width;
      }
    }
    store_key_gradients(shape, tile, group, width, d_k, d_v, gradients);
  }
}

template <class T>
void store_query_gradient(const at::Tensor& d_q, const AttentionShape& shape, int64_t width,
                          int64_t rows_per_head, const float* sums, int64_t num_chunks) {
  T* out = mutable_data<T>(d_q);
  const int64_t per_head = rows_per_head * width;
  at::parallel_for(0, shape.num_queries, grain(shape.q_stride()), [&](int64_t begin, int64_t end) {
    std::vector<float> row(width);
    for (int64_t t = begin; t < end; ++t)
      for (int64_t head = 0; head < shape.num_heads; ++head) {
        // Rows of full tiles stand at their own number; only the last tile is padded, at its end.
        const float* source = sums + head * per_head + t * width;
        std::copy(source, source + width, row.begin());
        for (int64_t chunk = 1; chunk < num_chunks; ++chunk)
          for (int64_t d = 0; d < width; ++d) row[d] += source[chunk * shape.num_heads * per_head + d];
        BOUGH_ISA_CALL(finish_tile, out + t * shape.q_stride() + head * shape.head_dim, shape.head_dim,
                       row.data(), width, &kOne, 1, shape.head_dim);
      }
  });
}

template <class T>
TreeAttentionGradient backward_tiles(const TreeAttentionInput& in, const TreeAttentionOutput& out,
                                     const at::Tensor& d_o, const at::Tensor& d_k_stack,
                                     const at::Tensor& d_v_stack) {
  const AttentionShape shape(in);
  const auto key_tiles = make_key_tiles(shape, data<int32_t>(in.end_local));
  const QueryTiles query_tiles(shape);
  TreeAttentionGradient d;
  d.d_q_TNH = at::empty_like(in.q_TNH);
  d.d_k_TGH = at::empty_like(in.k_TGH, in.k_TGH.options().dtype(at::kFloat));
  d.d_v_TGH = at::empty_like(d.d_k_TGH);
  // A task is a chunk of one group's key tiles, with query gradients of its own: more chunks than needed to feed
  // the threads would only cost memory.
  const auto num_tiles = static_cast<int64_t>(key_tiles.size());
  const int64_t num_chunks =
      std::clamp<int64_t>((at::get_num_threads() + shape.num_groups - 1) / shape.num_groups, 1, num_tiles);
  const int64_t rows = query_tiles.rows_per_head(), width = query_tiles.width();
  const auto partial = at::zeros({num_chunks, shape.num_heads, rows, width}, d.d_k_TGH.options());
  const KeyGradients gradients{mutable_data<float>(d.d_k_TGH), mutable_data<float>(d.d_v_TGH),
                               mutable_data<float>(d_k_stack), mutable_data<float>(d_v_stack)};
  float* partial_data = mutable_data<float>(partial);
  at::parallel_for(0, shape.num_heads * query_tiles.per_head(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / query_tiles.per_head();
      load_query_tile<T>(in, shape, query_tiles.tile(head, task % query_tiles.per_head()), head, data<T>(d_o),
                         data<T>(out.o_TNH), data<float>(out.lse_TN));
    }
  });
  at::parallel_for(0, shape.num_groups * num_chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t chunk = task / shape.num_groups;
      const int64_t group = task % shape.num_groups;
      const Range tiles{num_tiles * chunk / num_chunks, num_tiles * (chunk + 1) / num_chunks};
      float* d_q_group =
          partial_data + (chunk * shape.num_heads + group * shape.heads_per_group()) * rows * width;
      backward_task<T>(in, shape, key_tiles, tiles, group, query_tiles, gradients, d_q_group);
    }
  });
  store_query_gradient<T>(d.d_q_TNH, shape, width, rows, partial_data, num_chunks);
  return d;
}
}  // namespace

bool has_brgemm() {
  static const bool has = [] {
    const AlignedBuffer<float> zeros(3 * 1024);
    std::fill(zeros.get(), zeros.get() + 3 * 1024, 0.0f);
    try {
      multiply(zeros.get(), zeros.get() + 1024, zeros.get() + 2048, {32, 32, 32}, false);
      return best_isa() == Isa::kAvx512;
    } catch (const c10::Error&) {
      return false;
    }
  }();
  return has;
}

void tree_attention_forward_brgemm(const TreeAttentionInput& in, const at::Tensor& o, const at::Tensor& lse) {
  in.q_TNH.scalar_type() == at::kFloat ? forward_tiles<float>(in, o, lse)
                                       : forward_tiles<BFloat16Bits>(in, o, lse);
}

TreeAttentionGradient tree_attention_backward_brgemm(const TreeAttentionInput& in,
                                                     const TreeAttentionOutput& out, const at::Tensor& d_o,
                                                     const at::Tensor& d_k_stack,
                                                     const at::Tensor& d_v_stack) {
  return in.q_TNH.scalar_type() == at::kFloat
             ? backward_tiles<float>(in, out, d_o, d_k_stack, d_v_stack)
             : backward_tiles<BFloat16Bits>(in, out, d_o, d_k_stack, d_v_stack);
}

}  // namespace bough
