// Tiles of up to 128 queries x 128 keys; products of fp32 tiles by ATen's brgemm (oneDNN), the softmax vectorised.
// bf16 is widened when a tile is loaded, so scores, probabilities and gradients are fp32 throughout. Every tile is
// padded to one of three sizes: brgemm compiles a kernel for each shape it meets.
#include <ATen/ATen.h>
#include <ATen/native/CPUBlas.h>

#include "kernels/common/dispatch.h"
#include "kernels/common/op.h"
#include "kernels/tree_attention/tree_attention.h"
#include "kernels/tree_attention/tree_attention_isa.h"

namespace bough {

namespace {
constexpr int64_t kTile = 128;
constexpr float kOne = 1.0f;

int64_t padded(int64_t rows) {
  return rows <= 32 ? 32 : rows <= 64 ? 64 : kTile;
}

// dst[m,n] (+)= a[m,k] · b[k,n], all dense row-major fp32.
void product(float* dst, const float* a, const float* b, int64_t m, int64_t n, int64_t k, bool accumulate) {
  at::native::cpublas::brgemm(m, n, k, k, n, n, accumulate, a, b, dst, /*is_vnni=*/false);
}

// brgemm refuses CPUs without AVX-512; there the reference computes.
bool has_brgemm() {
  static const bool has = [] {
    float a[1024] = {}, b[1024] = {}, c[1024] = {};
    try {
      product(c, a, b, 32, 32, 32, false);
      return best_isa() == Isa::kAvx512;
    } catch (const c10::Error&) {
      return false;
    }
  }();
  return has;
}

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
const T* key_rows(const KeyTile& tile, const Shape& shape, const T* stack, const T* own, int64_t group) {
  const bool on_stack = tile.keys.begin < shape.num_stack;
  const T* rows = on_stack ? stack + tile.keys.begin * shape.k_stride()
                           : own + (tile.keys.begin - shape.num_stack) * shape.k_stride();
  return rows + group * shape.head_dim;
}

template <class T>
void forward_tile(const TreeAttentionInput& in, const Shape& shape, const std::vector<KeyTile>& key_tiles,
                  int64_t group, Range queries, T* o_data, float* lse_data) {
  const int64_t heads = shape.heads_per_group();
  const int64_t width = shape.head_dim;
  const int64_t rows = padded(queries.size());
  std::vector<float> scratch(heads * rows * (2 * width + 2) + rows * kTile + 2 * kTile * width);
  float* q = scratch.data();
  float* o = q + heads * rows * width;
  float* row_max = o + heads * rows * width;
  float* row_sum = row_max + heads * rows;
  float* scores = row_sum + heads * rows;
  float* k_transposed = scores + rows * kTile;
  float* v = k_transposed + kTile * width;
  std::fill(row_max, row_max + heads * rows, -std::numeric_limits<float>::infinity());
  const T* q_data = data<T>(in.q_TNH) + queries.begin * shape.q_stride() + group * heads * width;
  for (int64_t h = 0; h < heads; ++h)
    BOUGH_ISA_CALL(load_tile, q + h * rows * width, q_data + h * width, queries.size(), rows, width,
                   shape.q_stride(), static_cast<float>(in.scale));
  const int32_t* end_local = data<int32_t>(in.end_local);
  for (const auto& tile : key_tiles) {
    if (!any_visible(shape, tile, queries)) continue;
    const int64_t keys = padded(tile.keys.size());
    const auto mask = make_mask(shape, tile, queries, end_local);
    BOUGH_ISA_CALL(load_tile_transposed, k_transposed,
                   key_rows(tile, shape, data<T>(in.k_stack_PGH), data<T>(in.k_TGH), group), tile.keys.size(),
                   keys, width, shape.k_stride(), 1.0f);
    BOUGH_ISA_CALL(load_tile, v, key_rows(tile, shape, data<T>(in.v_stack_PGH), data<T>(in.v_TGH), group),
                   tile.keys.size(), keys, width, shape.k_stride(), 1.0f);
    for (int64_t h = 0; h < heads; ++h) {
      float* o_h = o + h * rows * width;
      product(scores, q + h * rows * width, k_transposed, rows, keys, width, false);
      BOUGH_ISA_CALL(online_softmax_tile, scores, queries.size(), tile.keys.size(), keys, mask,
                     row_max + h * rows, row_sum + h * rows, o_h, width);
      product(o_h, scores, v, rows, width, keys, true);
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t head = group * heads + h;
    BOUGH_ISA_CALL(finish_tile, o_data + queries.begin * shape.q_stride() + head * width, shape.q_stride(),
                   o + h * rows * width, row_sum + h * rows, queries.size(), width);
    for (int64_t i = 0; i < queries.size(); ++i)
      lse_data[(queries.begin + i) * shape.num_heads + head] =
          row_max[h * rows + i] + std::log(row_sum[h * rows + i]);
  }
}

std::tuple<at::Tensor, at::Tensor> forward_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                               const at::Tensor& k_stack, const at::Tensor& v_stack,
                                               const at::Tensor& end_local, double scale) {
  const TreeAttentionInput in{q, k, v, k_stack, v_stack, end_local, scale};
  if (q.scalar_type() == at::kDouble || !has_brgemm()) {
    auto out = tree_attention_forward_reference(in);
    return {out.o_TNH, out.lse_TN};
  }
  const Shape shape(in);
  auto o = at::empty_like(q);
  auto lse = at::empty({shape.num_queries, shape.num_heads}, q.options().dtype(at::kFloat));
  const auto key_tiles = make_key_tiles(shape, data<int32_t>(end_local));
  // Small passes are cut into smaller query tiles where there would not be a task for every thread.
  const int64_t tile =
      shape.num_queries * shape.num_groups >= kTile * at::get_num_threads() ? kTile : kTile / 4;
  const int64_t query_tiles = (shape.num_queries + tile - 1) / tile;
  const auto run = [&]<class T>() {
    T* o_data = mutable_data<T>(o);
    float* lse_data = mutable_data<float>(lse);
    at::parallel_for(0, query_tiles * shape.num_groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task / shape.num_groups * tile;
        forward_tile<T>(in, shape, key_tiles, task % shape.num_groups,
                        {first, std::min(shape.num_queries, first + tile)}, o_data, lse_data);
      }
    });
  };
  q.scalar_type() == at::kFloat ? run.operator()<float>() : run.operator()<BFloat16Bits>();
  return {o, lse};
}

// Query tiles of one head in the forms that the backward products read, all fp32.
struct QueryTile {
  Range queries;
  int64_t rows;  // padded
  float *q, *q_transposed, *d_o, *d_o_transposed, *lse,
      *dots;  // [rows, H] [H, rows] [rows, H] [H, rows] [rows] [rows]
};

class QueryTiles {
 public:
  QueryTiles(const Shape& shape) : shape_(shape), per_head_((shape.num_queries + kTile - 1) / kTile) {
    for (int64_t i = 0; i < per_head_; ++i) {
      const Range queries{i * kTile, std::min(shape.num_queries, (i + 1) * kTile)};
      offsets_.push_back(floats_per_head_);
      floats_per_head_ += padded(queries.size()) * (4 * shape.head_dim + 2);
      rows_per_head_ += padded(queries.size());
    }
    storage_ = at::empty({shape.num_heads * floats_per_head_}, at::kFloat);
  }

  int64_t per_head() const { return per_head_; }
  int64_t rows_per_head() const { return rows_per_head_; }

  QueryTile tile(int64_t head, int64_t index) const {
    const Range queries{index * kTile, std::min(shape_.num_queries, (index + 1) * kTile)};
    const int64_t rows = padded(queries.size());
    float* base = storage_.data_ptr<float>() + head * floats_per_head_ + offsets_[index];
    const int64_t block = rows * shape_.head_dim;
    return {queries,
            rows,
            base,
            base + block,
            base + 2 * block,
            base + 3 * block,
            base + 4 * block,
            base + 4 * block + rows};
  }

 private:
  const Shape& shape_;
  int64_t per_head_;
  int64_t floats_per_head_ = 0;
  int64_t rows_per_head_ = 0;
  std::vector<int64_t> offsets_;
  at::Tensor storage_;
};

template <class T>
void load_query_tile(const TreeAttentionInput& in, const Shape& shape, const QueryTile& tile, int64_t head,
                     const T* d_o_data, const T* o_data, const float* lse_data) {
  const int64_t width = shape.head_dim;
  const int64_t offset = tile.queries.begin * shape.q_stride() + head * width;
  const int64_t count = tile.queries.size();
  const int64_t stride = shape.q_stride();
  const T* q = data<T>(in.q_TNH) + offset;
  const T* d_o = d_o_data + offset;
  BOUGH_ISA_CALL(load_tile, tile.q, q, count, tile.rows, width, stride, 1.0f);
  BOUGH_ISA_CALL(load_tile_transposed, tile.q_transposed, q, count, tile.rows, width, stride,
                 static_cast<float>(in.scale));
  BOUGH_ISA_CALL(load_tile, tile.d_o, d_o, count, tile.rows, width, stride, 1.0f);
  BOUGH_ISA_CALL(load_tile_transposed, tile.d_o_transposed, d_o, count, tile.rows, width, stride, 1.0f);
  BOUGH_ISA_CALL(row_dots, tile.dots, d_o, o_data + offset, count, width, stride);
  for (int64_t i = 0; i < count; ++i)
    tile.lse[i] = lse_data[(tile.queries.begin + i) * shape.num_heads + head];
}

struct KeyGradients {
  float *d_k_own, *d_v_own, *d_k_stack, *d_v_stack;
};

// One task: the key tiles [begin, end) of one group. Adds to its own d_q[heads of the group][query tiles][rows][H].
template <class T>
void backward_task(const TreeAttentionInput& in, const Shape& shape, const std::vector<KeyTile>& key_tiles,
                   Range tiles, int64_t group, const QueryTiles& query_tiles, const KeyGradients& gradients,
                   float* d_q) {
  const int64_t width = shape.head_dim;
  const int64_t heads = shape.heads_per_group();
  const int32_t* end_local = data<int32_t>(in.end_local);
  std::vector<float> scratch(4 * kTile * width + 3 * kTile * kTile);
  float* k = scratch.data();
  float* v = k + kTile * width;
  float* d_k = v + kTile * width;
  float* d_v = d_k + kTile * width;
  float* scores = d_v + kTile * width;
  float* d_scores = scores + kTile * kTile;
  float* transposed = d_scores + kTile * kTile;
  for (int64_t t = tiles.begin; t < tiles.end; ++t) {
    const auto& tile = key_tiles[t];
    const int64_t keys = padded(tile.keys.size());
    BOUGH_ISA_CALL(load_tile, k, key_rows(tile, shape, data<T>(in.k_stack_PGH), data<T>(in.k_TGH), group),
                   tile.keys.size(), keys, width, shape.k_stride(), 1.0f);
    BOUGH_ISA_CALL(load_tile, v, key_rows(tile, shape, data<T>(in.v_stack_PGH), data<T>(in.v_TGH), group),
                   tile.keys.size(), keys, width, shape.k_stride(), 1.0f);
    std::fill(d_k, d_k + 2 * kTile * width, 0.0f);
    for (int64_t h = 0; h < heads; ++h) {
      float* d_q_tile = d_q + h * query_tiles.rows_per_head() * width;
      for (int64_t i = 0; i < query_tiles.per_head(); ++i) {
        const auto q = query_tiles.tile(group * heads + h, i);
        if (any_visible(shape, tile, q.queries)) {
          product(scores, k, q.q_transposed, keys, q.rows, width, false);
          product(d_scores, v, q.d_o_transposed, keys, q.rows, width, false);
          BOUGH_ISA_CALL(softmax_backward_tile, scores, d_scores, q.queries.size(), q.rows, tile.keys.size(),
                         keys, make_mask(shape, tile, q.queries, end_local), q.lse, q.dots,
                         static_cast<float>(in.scale));
          product(d_v, scores, q.d_o, keys, width, q.rows, true);
          product(d_k, d_scores, q.q, keys, width, q.rows, true);
          BOUGH_ISA_CALL(transpose_tile, transposed, d_scores, keys, q.rows);
          product(d_q_tile, transposed, k, q.rows, width, keys, true);
        }
        d_q_tile += q.rows * width;
      }
    }
    const bool on_stack = tile.keys.begin < shape.num_stack;
    const int64_t row = on_stack ? tile.keys.begin : tile.keys.begin - shape.num_stack;
    for (int64_t j = 0; j < tile.keys.size(); ++j) {
      const int64_t offset = (row + j) * shape.k_stride() + group * width;
      for (int64_t d = 0; d < width; ++d) {
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
}

template <class T>
void store_query_gradient(at::Tensor& d_q, const Shape& shape, const QueryTiles& query_tiles,
                          const at::Tensor& partial, int64_t num_chunks) {
  T* out = mutable_data<T>(d_q);
  const int64_t width = shape.head_dim;
  const int64_t per_head = query_tiles.rows_per_head() * width;
  const float* sums = partial.data_ptr<float>();
  at::parallel_for(0, shape.num_queries, grain(shape.q_stride()), [&](int64_t begin, int64_t end) {
    std::vector<float> row(width);
    for (int64_t t = begin; t < end; ++t)
      for (int64_t head = 0; head < shape.num_heads; ++head) {
        // Rows of full tiles stand at their own number; only the last tile is padded, at its end.
        const float* source = sums + head * per_head + t * width;
        std::copy(source, source + width, row.begin());
        for (int64_t chunk = 1; chunk < num_chunks; ++chunk)
          for (int64_t d = 0; d < width; ++d) row[d] += source[chunk * shape.num_heads * per_head + d];
        BOUGH_ISA_CALL(finish_tile, out + t * shape.q_stride() + head * width, width, row.data(), &kOne, 1,
                       width);
      }
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_cpu(
    const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& k_stack, const at::Tensor& v_stack, const at::Tensor& end_local, const at::Tensor& o,
    const at::Tensor& lse, double scale, const at::Tensor& d_k_stack, const at::Tensor& d_v_stack) {
  const TreeAttentionInput in{q, k, v, k_stack, v_stack, end_local, scale};
  if (q.scalar_type() == at::kDouble || !has_brgemm()) {
    auto d = tree_attention_backward_reference(in, {o, lse}, d_o, d_k_stack, d_v_stack);
    return {d.d_q_TNH, d.d_k_TGH, d.d_v_TGH};
  }
  const Shape shape(in);
  const auto key_tiles = make_key_tiles(shape, data<int32_t>(end_local));
  const QueryTiles query_tiles(shape);
  auto d_q = at::empty_like(q);
  auto d_k = at::empty_like(k, k.options().dtype(at::kFloat));
  auto d_v = at::empty_like(d_k);
  // A task is a chunk of one group's key tiles, with query gradients of its own: more chunks than needed to feed
  // the threads would only cost memory.
  const int64_t num_tiles = static_cast<int64_t>(key_tiles.size());
  const int64_t num_chunks =
      std::clamp<int64_t>((at::get_num_threads() + shape.num_groups - 1) / shape.num_groups, 1, num_tiles);
  const auto partial =
      at::zeros({num_chunks, shape.num_heads, query_tiles.rows_per_head(), shape.head_dim}, d_k.options());
  const KeyGradients gradients{mutable_data<float>(d_k), mutable_data<float>(d_v),
                               mutable_data<float>(d_k_stack), mutable_data<float>(d_v_stack)};
  float* partial_data = mutable_data<float>(partial);
  const auto run = [&]<class T>() {
    at::parallel_for(0, shape.num_heads * query_tiles.per_head(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t head = task / query_tiles.per_head();
        load_query_tile<T>(in, shape, query_tiles.tile(head, task % query_tiles.per_head()), head,
                           data<T>(d_o), data<T>(o), data<float>(lse));
      }
    });
    at::parallel_for(0, shape.num_groups * num_chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t chunk = task / shape.num_groups;
        const int64_t group = task % shape.num_groups;
        const Range tiles{num_tiles * chunk / num_chunks, num_tiles * (chunk + 1) / num_chunks};
        float* d_q_group = partial_data + (chunk * shape.num_heads + group * shape.heads_per_group()) *
                                              query_tiles.rows_per_head() * shape.head_dim;
        backward_task<T>(in, shape, key_tiles, tiles, group, query_tiles, gradients, d_q_group);
      }
    });
    store_query_gradient<T>(d_q, shape, query_tiles, partial, num_chunks);
  };
  q.scalar_type() == at::kFloat ? run.operator()<float>() : run.operator()<BFloat16Bits>();
  return {d_q, d_k, d_v};
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("tree_attention_forward", TORCH_FN(bough::forward_cpu));
  m.impl("tree_attention_backward", TORCH_FN(bough::backward_cpu));
}
