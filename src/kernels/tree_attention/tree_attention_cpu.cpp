// Tiles of up to 128 queries x 128 keys, computed a slice of 32 rows at a time: a product, the softmax of its rows,
// the next product. Who multiplies, and in which form operands are kept, is the engine (tree_attention_engines.h):
// fp32 tiles, or bf16 tiles where the CPU has them. Scores, sums and gradients are fp32 in both.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "kernels/common/aligned_buffer.h"
#include "kernels/common/dispatch.h"
#include "kernels/common/op.h"
#include "kernels/tree_attention/tree_attention.h"
#include "kernels/tree_attention/tree_attention_engines.h"
#include "kernels/tree_attention/tree_attention_isa.h"

namespace bough {

namespace {
constexpr int64_t kTile = 128;
constexpr int64_t kSlice =
    32;  // rows of a tile whose scores are in flight at once: they stay in the nearest cache
constexpr float kOne = 1.0f;

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

struct Shape {
  int64_t num_queries, num_heads, num_groups, head_dim, num_stack;
  int64_t heads_per_group() const { return num_heads / num_groups; }
  int64_t q_stride() const { return num_heads * head_dim; }
  int64_t k_stride() const { return num_groups * head_dim; }

  explicit Shape(const TreeAttentionInput& in)
      : num_queries(in.q_TNH.size(0)),
        num_heads(in.q_TNH.size(1)),
        num_groups(in.k_TGH.size(1)),
        head_dim(in.q_TNH.size(2)),
        num_stack(in.k_stack_PGH.size(0)) {}
};

// Keys in tiles that do not straddle stack and pass, with the span of their ends: what decides whether a tile of
// queries can skip them.
struct KeyTile {
  Range keys;  // into end_local
  int32_t min_end, max_end;
};

std::vector<KeyTile> make_key_tiles(const Shape& shape, const int32_t* end_local) {
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

bool any_visible(const Shape& shape, const KeyTile& tile, const Range& queries) {
  return tile.keys.begin - shape.num_stack < queries.end && queries.begin < tile.max_end;
}

TileMask make_mask(const Shape& shape, const KeyTile& tile, const Range& queries, const int32_t* end_local) {
  const int64_t first_key = tile.keys.begin - shape.num_stack;
  const bool all_visible =
      tile.keys.end - 1 - shape.num_stack <= queries.begin && queries.end <= tile.min_end;
  return {queries.begin, first_key, end_local + tile.keys.begin, all_visible};
}

template <class T>
Rows<T> key_rows(const KeyTile& tile, const Shape& shape, const T* stack, const T* own, int64_t group) {
  const bool on_stack = tile.keys.begin < shape.num_stack;
  const T* rows = on_stack ? stack + tile.keys.begin * shape.k_stride()
                           : own + (tile.keys.begin - shape.num_stack) * shape.k_stride();
  return {rows + group * shape.head_dim, tile.keys.size(), shape.head_dim, shape.k_stride()};
}

template <class Engine, class T>
void forward_tile(const TreeAttentionInput& in, const Shape& shape, const std::vector<KeyTile>& key_tiles,
                  int64_t group, Range queries, T* o_data, float* lse_data) {
  using Tile = typename Engine::Tile;
  const int64_t heads = shape.heads_per_group();
  const int64_t width = Engine::padded_width(shape.head_dim);
  const int64_t rows = Engine::padded_rows(queries.size());
  const AlignedBuffer<float> sums(heads * rows * (width + 2) + kSlice * kTile);
  float* const o = sums.get();
  float* const row_max = o + heads * rows * width;
  float* const row_sum = row_max + heads * rows;
  float* const scores = row_sum + heads * rows;
  const AlignedBuffer<Tile> tiles(heads * rows * width + 2 * kTile * width + kSlice * kTile);
  Tile* const q = tiles.get();
  Tile* const k_transposed = q + heads * rows * width;
  Tile* const v = k_transposed + kTile * width;
  Tile* const probabilities = Engine::kTilesAreScores ? reinterpret_cast<Tile*>(scores) : v + kTile * width;
  std::fill(o, o + heads * rows * width, 0.0f);
  std::fill(row_sum, row_sum + heads * rows, 0.0f);
  std::fill(row_max, row_max + heads * rows, -std::numeric_limits<float>::infinity());
  const T* q_data = data<T>(in.q_TNH) + queries.begin * shape.q_stride() + group * heads * shape.head_dim;
  for (int64_t h = 0; h < heads; ++h)
    Engine::load_left(q + h * rows * width,
                      Rows<T>{q_data + h * shape.head_dim, queries.size(), shape.head_dim, shape.q_stride()},
                      rows);
  const int32_t* end_local = data<int32_t>(in.end_local);
  for (const auto& tile : key_tiles) {
    if (!any_visible(shape, tile, queries)) continue;
    const int64_t keys = Engine::padded_rows(tile.keys.size());
    Engine::load_right_transposed(
        k_transposed, key_rows(tile, shape, data<T>(in.k_stack_PGH), data<T>(in.k_TGH), group), keys);
    Engine::load_right(v, key_rows(tile, shape, data<T>(in.v_stack_PGH), data<T>(in.v_TGH), group), keys);
    for (int64_t first = 0; first < queries.size(); first += kSlice) {
      const Range slice{queries.begin + first, std::min(queries.end, queries.begin + first + kSlice)};
      if (!any_visible(shape, tile, slice)) continue;
      const auto mask = make_mask(shape, tile, slice, end_local);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t row = h * rows + first;
        Engine::multiply(scores, q + row * width, k_transposed, {kSlice, keys, width}, false);
        BOUGH_ISA_CALL(online_softmax_tile, scores, probabilities, slice.size(), tile.keys.size(), keys, mask,
                       static_cast<float>(in.scale), row_max + row, row_sum + row, o + row * width, width);
        Engine::multiply(o + row * width, probabilities, v, {kSlice, width, keys}, true);
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

template <class Engine, class T>
void forward_tiles(const TreeAttentionInput& in, const at::Tensor& o, const at::Tensor& lse) {
  const Shape shape(in);
  const auto key_tiles = make_key_tiles(shape, data<int32_t>(in.end_local));
  // Small passes are cut into smaller query tiles where there would not be a task for every thread.
  const int64_t tile =
      shape.num_queries * shape.num_groups >= kTile * at::get_num_threads() ? kTile : kTile / 4;
  const int64_t query_tiles = (shape.num_queries + tile - 1) / tile;
  T* o_data = mutable_data<T>(o);
  float* lse_data = mutable_data<float>(lse);
  at::parallel_for(0, query_tiles * shape.num_groups, 1, [&](int64_t begin, int64_t end) {
    const typename Engine::Session session;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task / shape.num_groups * tile;
      forward_tile<Engine, T>(in, shape, key_tiles, task % shape.num_groups,
                              {first, std::min(shape.num_queries, first + tile)}, o_data, lse_data);
    }
  });
}

std::tuple<at::Tensor, at::Tensor> forward_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                               const at::Tensor& k_stack, const at::Tensor& v_stack,
                                               const at::Tensor& end_local, double scale) {
  const TreeAttentionInput in{q, k, v, k_stack, v_stack, end_local, scale};
  auto o = at::empty_like(q);
  auto lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  const bool computed =
      with_engine(q.scalar_type(), [&]<class Engine, class T>() { forward_tiles<Engine, T>(in, o, lse); });
  if (computed) return {o, lse};
  auto out = tree_attention_forward_reference(in);
  return {out.o_TNH, out.lse_TN};
}

// Query tiles of one head in the forms that the backward products read.
template <class Tile>
struct QueryTile {
  Range queries;
  int64_t rows;                                   // padded
  Tile *q, *q_transposed, *d_o, *d_o_transposed;  // right factors: [rows, H], [H, rows], the same of d_o
  float *lse, *dots;                              // [rows]
};

template <class Engine>
class QueryTiles {
 public:
  using Tile = typename Engine::Tile;
  explicit QueryTiles(const Shape& shape)
      : shape_(shape),
        width_(Engine::padded_width(shape.head_dim)),
        per_head_((shape.num_queries + kTile - 1) / kTile),
        rows_per_head_(Engine::padded_rows(shape.num_queries - (per_head_ - 1) * kTile) +
                       (per_head_ - 1) * kTile) {
    const auto bytes = static_cast<int64_t>(sizeof(Tile));
    tiles_ = at::empty({shape.num_heads * rows_per_head_ * 4 * width_ * bytes}, at::kByte);
    scalars_ = at::empty({shape.num_heads * rows_per_head_ * 2}, at::kFloat);
  }

  int64_t per_head() const { return per_head_; }
  int64_t rows_per_head() const { return rows_per_head_; }
  int64_t width() const { return width_; }

  QueryTile<Tile> tile(int64_t head, int64_t index) const {
    const Range queries{index * kTile, std::min(shape_.num_queries, (index + 1) * kTile)};
    const int64_t rows = Engine::padded_rows(queries.size());
    const int64_t row = head * rows_per_head_ + queries.begin;
    Tile* base = static_cast<Tile*>(tiles_.mutable_data_ptr()) + row * 4 * width_;
    float* scalars = scalars_.data_ptr<float>() + row * 2;
    const int64_t block = rows * width_;
    return {queries, rows, base, base + block, base + 2 * block, base + 3 * block, scalars, scalars + rows};
  }

 private:
  const Shape& shape_;
  int64_t width_, per_head_, rows_per_head_;
  at::Tensor tiles_, scalars_;
};

template <class Engine, class T>
void load_query_tile(const TreeAttentionInput& in, const Shape& shape,
                     const QueryTile<typename Engine::Tile>& tile, int64_t head, const T* d_o_data,
                     const T* o_data, const float* lse_data) {
  const int64_t offset = tile.queries.begin * shape.q_stride() + head * shape.head_dim;
  const int64_t count = tile.queries.size();
  const Rows<T> q{data<T>(in.q_TNH) + offset, count, shape.head_dim, shape.q_stride()};
  const Rows<T> d_o{d_o_data + offset, count, shape.head_dim, shape.q_stride()};
  Engine::load_right(tile.q, q, tile.rows);
  Engine::load_right_transposed(tile.q_transposed, q, tile.rows);
  Engine::load_right(tile.d_o, d_o, tile.rows);
  Engine::load_right_transposed(tile.d_o_transposed, d_o, tile.rows);
  BOUGH_ISA_CALL(row_dots, tile.dots, d_o.data, o_data + offset, count, shape.head_dim, shape.q_stride());
  for (int64_t i = 0; i < count; ++i)
    tile.lse[i] = lse_data[(tile.queries.begin + i) * shape.num_heads + head];
}

struct KeyGradients {
  float *d_k_own, *d_v_own, *d_k_stack, *d_v_stack;
};

// Rows of one key tile's gradients: added to the stack's, or written to the pass's own.
void store_key_gradients(const Shape& shape, const KeyTile& tile, int64_t group, int64_t width,
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
template <class Engine, class T>
void backward_task(const TreeAttentionInput& in, const Shape& shape, const std::vector<KeyTile>& key_tiles,
                   Range tiles, int64_t group, const QueryTiles<Engine>& query_tiles,
                   const KeyGradients& gradients, float* d_q) {
  using Tile = typename Engine::Tile;
  const int64_t width = query_tiles.width();
  const int64_t heads = shape.heads_per_group();
  const auto scale = static_cast<float>(in.scale);
  const int32_t* end_local = data<int32_t>(in.end_local);
  const AlignedBuffer<float> sums(2 * kTile * width + 2 * kSlice * kTile);
  float* const d_k = sums.get();
  float* const d_v = d_k + kTile * width;
  float* const scores = d_v + kTile * width;
  float* const d_scores = scores + kSlice * kTile;
  const AlignedBuffer<Tile> factors(3 * kTile * width + kSlice * kTile + 2 * kTile * kTile);
  Tile* const k_left = factors.get();
  Tile* const v_left = k_left + kTile * width;
  Tile* const k_right = v_left + kTile * width;
  Tile* const d_s = k_right + kTile * width;  // of all slices: the query's gradient reads it turned
  Tile* const turned = d_s + kTile * kTile;
  Tile* const p = Engine::kTilesAreScores ? reinterpret_cast<Tile*>(scores) : turned + kTile * kTile;
  for (int64_t t = tiles.begin; t < tiles.end; ++t) {
    const auto& tile = key_tiles[t];
    const int64_t keys = Engine::padded_rows(tile.keys.size());
    const auto k = key_rows(tile, shape, data<T>(in.k_stack_PGH), data<T>(in.k_TGH), group);
    Engine::load_left(k_left, k, keys);
    Engine::load_left(v_left, key_rows(tile, shape, data<T>(in.v_stack_PGH), data<T>(in.v_TGH), group), keys);
    Engine::load_right(k_right, k, keys);
    std::fill(d_k, d_k + keys * width, 0.0f);
    std::fill(d_v, d_v + keys * width, 0.0f);
    for (int64_t h = 0; h < heads; ++h) {
      float* d_q_tile = d_q + h * query_tiles.rows_per_head() * width;
      for (int64_t i = 0; i < query_tiles.per_head(); ++i) {
        const auto q = query_tiles.tile(group * heads + h, i);
        if (any_visible(shape, tile, q.queries)) {
          const auto mask = make_mask(shape, tile, q.queries, end_local);
          for (int64_t j = 0; j < keys; j += kSlice) {
            Engine::multiply(scores, k_left + j * width, q.q_transposed, {kSlice, q.rows, width}, false);
            Engine::multiply(d_scores, v_left + j * width, q.d_o_transposed, {kSlice, q.rows, width}, false);
            const TileMask slice{mask.first_query, mask.first_key + j, mask.end_local + j, mask.all_visible};
            BOUGH_ISA_CALL(softmax_backward_tile, scores, d_scores, p, d_s + j * q.rows, q.queries.size(),
                           q.rows, std::clamp<int64_t>(tile.keys.size() - j, 0, kSlice), kSlice, slice, q.lse,
                           q.dots, scale);
            Engine::multiply(d_v + j * width, p, q.d_o, {kSlice, width, q.rows}, true);
            Engine::multiply(d_k + j * width, d_s + j * q.rows, q.q, {kSlice, width, q.rows}, true);
          }
          Engine::multiply_turned(d_q_tile, d_s, turned, k_right, {q.rows, width, keys});
        }
        d_q_tile += q.rows * width;
      }
    }
    store_key_gradients(shape, tile, group, width, d_k, d_v, gradients);
  }
}

template <class T>
void store_query_gradient(const at::Tensor& d_q, const Shape& shape, int64_t width, int64_t rows_per_head,
                          const float* sums, int64_t num_chunks) {
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

template <class Engine, class T>
TreeAttentionGradient backward_tiles(const TreeAttentionInput& in, const TreeAttentionOutput& out,
                                     const at::Tensor& d_o, const at::Tensor& d_k_stack,
                                     const at::Tensor& d_v_stack) {
  const Shape shape(in);
  const auto key_tiles = make_key_tiles(shape, data<int32_t>(in.end_local));
  const QueryTiles<Engine> query_tiles(shape);
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
      load_query_tile<Engine, T>(in, shape, query_tiles.tile(head, task % query_tiles.per_head()), head,
                                 data<T>(d_o), data<T>(out.o_TNH), data<float>(out.lse_TN));
    }
  });
  at::parallel_for(0, shape.num_groups * num_chunks, 1, [&](int64_t begin, int64_t end) {
    const typename Engine::Session session;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t chunk = task / shape.num_groups;
      const int64_t group = task % shape.num_groups;
      const Range tiles{num_tiles * chunk / num_chunks, num_tiles * (chunk + 1) / num_chunks};
      float* d_q_group =
          partial_data + (chunk * shape.num_heads + group * shape.heads_per_group()) * rows * width;
      backward_task<Engine, T>(in, shape, key_tiles, tiles, group, query_tiles, gradients, d_q_group);
    }
  });
  store_query_gradient<T>(d.d_q_TNH, shape, width, rows, partial_data, num_chunks);
  return d;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_cpu(
    const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& k_stack, const at::Tensor& v_stack, const at::Tensor& end_local, const at::Tensor& o,
    const at::Tensor& lse, double scale, const at::Tensor& d_k_stack, const at::Tensor& d_v_stack) {
  const TreeAttentionInput in{q, k, v, k_stack, v_stack, end_local, scale};
  const TreeAttentionOutput out{o, lse};
  TreeAttentionGradient d;
  const bool computed = with_engine(q.scalar_type(), [&]<class Engine, class T>() {
    d = backward_tiles<Engine, T>(in, out, d_o, d_k_stack, d_v_stack);
  });
  if (!computed) d = tree_attention_backward_reference(in, out, d_o, d_k_stack, d_v_stack);
  return {d.d_q_TNH, d.d_k_TGH, d.d_v_TGH};
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("tree_attention_forward", TORCH_FN(bough::forward_cpu));
  m.impl("tree_attention_backward", TORCH_FN(bough::backward_cpu));
}
