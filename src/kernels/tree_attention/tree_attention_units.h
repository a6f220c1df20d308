// Tree attention in units. A unit is a tile of 32 queries by 32 keys of one query head. "Unit of keys" means
// 32 keys, "block of queries" means 32 queries (not a block of a plan), "group" means the query heads that
// share one key/value head. Units in which no query sees a key are skipped, so that short branches cost only
// what they see. The bf16 kernels and the fp32 kernels both use this file.
#pragma once

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "kernels/common/op.h"
#include "kernels/common/scratch.h"
#include "kernels/tree_attention/tree_attention_cost.h"
#include "kernels/tree_attention/tree_attention_cpu.h"
#include "kernels/tree_attention/tree_attention_softmax.h"
#include "kernels/tree_attention/unit_mask.h"

namespace bough {

constexpr float kLog2E = 1.44269504f;

inline int64_t num_units(int64_t rows) {
  return ceil_div(rows, kUnit);
}

inline Range block_queries(const AttentionShape& shape, int64_t block) {
  return {block * kUnit, std::min(shape.num_queries, (block + 1) * kUnit)};
}

// Up to 32 consecutive keys. Either all are on the prefix KV stack, or all are in the pass.
struct KeyUnit {
  Range rows;  // of the stack, or of the pass
  bool on_stack;
  int32_t first_key;         // number of the first key, if key P has number 0: negative on the stack
  int32_t min_end, max_end;  // smallest and largest of `end`; min_end is 0 if padding must be masked
  const int32_t* end;        // [32], end_local of the keys; 0 for padding
};

class KeyUnits {
 public:
  KeyUnits(const AttentionShape& shape, const int32_t* end_local)
      : ends_((num_units(shape.num_stack) + num_units(shape.num_queries)) * kUnit) {
    add(0, shape.num_stack, true, shape, end_local);
    add(0, shape.num_queries, false, shape, end_local + shape.num_stack);
  }

  int64_t size() const { return static_cast<int64_t>(units_.size()); }
  const KeyUnit& operator[](int64_t i) const { return units_[i]; }

  // visible(): whether a query of the range may see a key of the unit. mask(): which pairs are visible.
  static bool visible(const KeyUnit& unit, const Range& queries) {
    return unit.first_key < queries.end && queries.begin < unit.max_end;
  }
  static UnitMask mask(const KeyUnit& unit, const Range& queries) {
    const bool all = unit.first_key + kUnit - 1 <= queries.begin && queries.end <= unit.min_end;
    return {all ? nullptr : unit.end, static_cast<int32_t>(queries.begin), unit.first_key};
  }
  // Returns the blocks of queries that may see a key of the unit. Some blocks of the range may see none, but
  // few, because the queries that see one key are consecutive.
  static Range blocks(const KeyUnit& unit) {
    return {std::max(0, unit.first_key) / kUnit, num_units(unit.max_end)};
  }

 private:
  void add(int64_t begin, int64_t end, bool on_stack, const AttentionShape& shape, const int32_t* end_local) {
    for (; begin < end; begin += kUnit) {
      const Range rows{begin, std::min(end, begin + kUnit)};
      int32_t* ends = ends_.get() + size() * kUnit;
      std::fill(std::copy(end_local + rows.begin, end_local + rows.end, ends), ends + kUnit, 0);
      const auto [min, max] = std::minmax_element(ends, ends + kUnit);
      const auto first = static_cast<int32_t>(on_stack ? begin - shape.num_stack : begin);
      units_.push_back({rows, on_stack, first, *min, *max, ends});
    }
  }

  AlignedBuffer<int32_t> ends_;
  std::vector<KeyUnit> units_;
};

template <class T>
struct UnitInputs {
  explicit UnitInputs(const TreeAttentionInput& input)
      : in(input),
        shape(input),
        width(rounded_up(shape.head_dim, kUnit)),
        units(shape, data<int32_t>(input.end_local)) {}

  // Returns the first key (or value) of a unit of keys in one key/value head. `own`: the tensor of the pass.
  const T* key_rows(const at::Tensor& own, const at::Tensor& stack, const KeyUnit& unit,
                    int64_t group) const {
    return data<T>(unit.on_stack ? stack : own) + unit.rows.begin * shape.k_stride() + group * shape.head_dim;
  }
  const T* k(const KeyUnit& unit, int64_t group) const {
    return key_rows(in.k_TGH, in.k_stack_PGH, unit, group);
  }
  const T* v(const KeyUnit& unit, int64_t group) const {
    return key_rows(in.v_TGH, in.v_stack_PGH, unit, group);
  }
  int64_t num_blocks() const { return num_units(shape.num_queries); }
  // Elements of 32 padded keys or queries of one head.
  int64_t factor_elements() const { return kUnit * width; }

  const TreeAttentionInput& in;
  AttentionShape shape;
  int64_t width;  // head_dim, padded to a multiple of 32
  KeyUnits units;
};

// The destinations of key and value gradients, all fp32 [keys, G, H]. store() adds to the gradients of the
// stack and overwrites those of the pass.
struct KeyGradients {
  float *d_k_own, *d_v_own, *d_k_stack, *d_v_stack;

  KeyGradients(const TreeAttentionGradient& own, const at::Tensor& d_k_stack, const at::Tensor& d_v_stack)
      : d_k_own(mutable_data<float>(own.d_k_TGH)),
        d_v_own(mutable_data<float>(own.d_v_TGH)),
        d_k_stack(mutable_data<float>(d_k_stack)),
        d_v_stack(mutable_data<float>(d_v_stack)) {}

  // Stores the sums d_k, d_v [count][32][width] of units of keys [first, first + count) of one key/value
  // head. d_k is multiplied by the attention's scale.
  template <class T>
  void store(const UnitInputs<T>& x, int64_t group, int64_t first, int64_t count, const float* d_k,
             const float* d_v) const {
    const auto scale = static_cast<float>(x.in.scale);
    for (int64_t i = 0; i < count; ++i) {
      const auto& unit = x.units[first + i];
      const int64_t offset = unit.rows.begin * x.shape.k_stride() + group * x.shape.head_dim;
      const auto store_rows = [&](const float* sums, float factor, float* own, float* stack) {
        BOUGH_AVX_CALL(store_gradients, sums + i * x.factor_elements(), x.width, factor, unit.rows.size(),
                       unit.on_stack, (unit.on_stack ? stack : own) + offset, x.shape.k_stride(),
                       x.shape.head_dim);
      };
      store_rows(d_k, scale, d_k_own, d_k_stack);
      store_rows(d_v, 1.0f, d_v_own, d_v_stack);
    }
  }
};

// Calls work(group, share) for all groups and shares in parallel. A share is a part of the keys (see
// backward_in_units). Each thread constructs a Session before its calls and destroys it after them. A Session
// enables the AMX tiles for the bf16 kernels and is empty for the fp32 kernels.
template <class Session, class Work>
void for_each_share(int64_t num_groups, int64_t num_shares, Work&& work) {
  at::parallel_for(0, num_groups * num_shares, 1, [&](int64_t begin, int64_t end) {
    [[maybe_unused]] const Session session{};
    for (int64_t task = begin; task < end; ++task) work(task / num_shares, task % num_shares);
  });
}

// The sums of d_q of one share (a part of the keys, see backward_in_units) of one group, [heads][blocks of
// queries][elements]. of() sets a block to zero at its first use, because the block is brought into the cache
// then anyway. `begun` marks the blocks that were used.
class QuerySums {
 public:
  QuerySums(float* data, char* begun, int64_t blocks, int64_t elements)
      : data_(data), begun_(begun), blocks_(blocks), elements_(elements) {}

  float* of(int64_t head, const Range& blocks) const {
    float* const first = data_ + (head * blocks_ + blocks.begin) * elements_;
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
      char& begun = begun_[head * blocks_ + b];
      if (!begun) std::fill_n(first + (b - blocks.begin) * elements_, elements_, 0.0f);
      begun = 1;
    }
    return first;
  }

 private:
  float* data_;
  char* begun_;
  int64_t blocks_, elements_;
};

// Backward of tree attention. `Way` is the fp32 or the bf16 computation of units and has
//   Element, kUnits (units of keys per batch), Session (state that one thread needs while it computes)
//   QueryBlocks(x): load(x, head, block, d_o, o, lse) loads one block of queries of one head
//   Scratch(elements): memory of one thread, for units of `elements` floats. d_k, d_v: sums of up to kUnits
//     units, [units][32][width]
//   add_units(x, group, first, count, queries, scratch, d_q): overwrites d_k and d_v of the scratch
//     with those of units [first, first + count); adds to d_q, the QuerySums of the group
//   store_d_q(x, queries, sums, out): stores the sums of one block of queries, scaled, to rows of `out`
template <class Way>
TreeAttentionGradient backward_in_units(const TreeAttentionInput& in, const TreeAttentionOutput& out,
                                        const at::Tensor& d_o, const at::Tensor& d_k_stack,
                                        const at::Tensor& d_v_stack) {
  using T = typename Way::Element;
  const UnitInputs<T> x(in);
  const auto& shape = x.shape;
  TreeAttentionGradient d;
  d.d_q_TNH = at::empty_like(in.q_TNH);
  d.d_k_TGH = at::empty_like(in.k_TGH, in.k_TGH.options().dtype(at::kFloat));
  d.d_v_TGH = at::empty_like(d.d_k_TGH);
  const KeyGradients gradients(d, d_k_stack, d_v_stack);
  const typename Way::QueryBlocks queries(x);
  const int64_t blocks = x.num_blocks(), elements = x.factor_elements(), heads = shape.heads_per_group();
  // The heads of a block of queries are loaded one after another, because they are adjacent in memory.
  at::parallel_for(0, blocks * shape.num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      queries.load(x, i % shape.num_heads, i / shape.num_heads, data<T>(d_o), data<T>(out.o_TNH),
                   data<float>(out.lse_TN));
  });
  // A share is every num_shares-th batch of a group's units of keys. Each share has separate sums of d_q.
  const int64_t batches = (x.units.size() + Way::kUnits - 1) / Way::kUnits;
  const int64_t num_shares = attention_shares(at::get_num_threads(), shape.num_groups, batches);
  const auto d_q = at::empty({num_shares, shape.num_heads, blocks, elements}, d.d_k_TGH.options());
  auto* d_q_data = mutable_data<float>(d_q);
  const int64_t blocks_of_share = shape.num_heads * blocks;
  std::vector<char> begun(num_shares * blocks_of_share);  // not bool: threads write neighbouring elements
  for_each_share<typename Way::Session>(shape.num_groups, num_shares, [&](int64_t group, int64_t share) {
    const typename Way::Scratch scratch(elements);
    const int64_t first_block = share * blocks_of_share + group * heads * blocks;
    const QuerySums sums(d_q_data + first_block * elements, begun.data() + first_block, blocks, elements);
    for (int64_t batch = share; batch < batches; batch += num_shares) {
      const int64_t first = batch * Way::kUnits, count = std::min(Way::kUnits, x.units.size() - first);
      Way::add_units(x, group, first, count, queries, scratch, sums);
      gradients.store(x, group, first, count, scratch.d_k, scratch.d_v);
    }
  });
  T* out_data = mutable_data<T>(d.d_q_TNH);
  at::parallel_for(0, blocks * shape.num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i % shape.num_heads, block = i / shape.num_heads, at = head * blocks + block;
      float* sums = d_q_data + at * elements;
      if (!begun[at]) std::fill_n(sums, elements, 0.0f);
      for (int64_t share = 1; share < num_shares; ++share) {
        if (!begun[share * blocks_of_share + at]) continue;
        const float* more = sums + share * blocks_of_share * elements;
        for (int64_t j = 0; j < elements; ++j) sums[j] += more[j];
      }
      const Range rows = block_queries(shape, block);
      Way::store_d_q(x, rows, sums, out_data + rows.begin * shape.q_stride() + head * shape.head_dim);
    }
  });
  return d;
}

}  // namespace bough
