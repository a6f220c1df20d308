// Attention in units of 32 queries times 32 keys of one head, each a product of AMX tiles, its softmax
// (tree_attention_amx_softmax.h) and the products that read it. Units of which no entry is visible are skipped, so
// that short branches cost what they see. This file: what forward and backward share.
#pragma once

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/common/aligned_buffer.h"
#include "kernels/common/dispatch.h"
#include "kernels/common/workspace.h"
#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/tree_attention/tree_attention_amx_softmax.h"
#include "kernels/tree_attention/tree_attention_cpu.h"

namespace bough::amx {

using Element = BFloat16Bits;
constexpr float kLog2E = 1.44269504f;

// A thread's use of the tiles.
struct Session {
  Session() { begin_tiles(); }
  ~Session() { end_tiles(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

inline int64_t num_units(int64_t rows) {
  return (rows + kUnit - 1) / kUnit;
}

inline Range block_queries(const AttentionShape& shape, int64_t block) {
  return {block * kUnit, std::min(shape.num_queries, (block + 1) * kUnit)};
}

// Up to 32 keys, all of the stack or all of the pass.
struct KeyUnit {
  Range rows;  // of the stack, or of the pass
  bool on_stack;
  int32_t first_key;         // numbered like the queries
  int32_t min_end, max_end;  // min_end is 0 where padding must be masked
  const int32_t* end;        // [32]
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

  // Whether any query of the range sees any key of the unit, and the mask of the two.
  static bool visible(const KeyUnit& unit, const Range& queries) {
    return unit.first_key < queries.end && queries.begin < unit.max_end;
  }
  static UnitMask mask(const KeyUnit& unit, const Range& queries) {
    const bool all = unit.first_key + kUnit - 1 <= queries.begin && queries.end <= unit.min_end;
    return {all ? nullptr : unit.end, static_cast<int32_t>(queries.begin), unit.first_key};
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

struct Inputs {
  explicit Inputs(const TreeAttentionInput& input)
      : in(input),
        shape(input),
        width((shape.head_dim + kUnit - 1) / kUnit * kUnit),
        units(shape, data<int32_t>(input.end_local)) {}

  // Rows of a unit of keys or values, of one group.
  const Element* key_rows(const at::Tensor& own, const at::Tensor& stack, const KeyUnit& unit,
                          int64_t group) const {
    return data<Element>(unit.on_stack ? stack : own) + unit.rows.begin * shape.k_stride() +
           group * shape.head_dim;
  }
  const Element* k(const KeyUnit& unit, int64_t group) const {
    return key_rows(in.k_TGH, in.k_stack_PGH, unit, group);
  }
  const Element* v(const KeyUnit& unit, int64_t group) const {
    return key_rows(in.v_TGH, in.v_stack_PGH, unit, group);
  }
  int64_t columns(int64_t column) const { return std::min(kUnit, shape.head_dim - column); }
  int64_t num_blocks() const { return num_units(shape.num_queries); }
  // Of one unit's or block's rows, padded.
  int64_t factor_elements() const { return kUnit * width; }

  const TreeAttentionInput& in;
  AttentionShape shape;
  int64_t width;  // head_dim, padded
  KeyUnits units;
};

// Rows as the right factor whose depth they are: a panel for each 32 columns.
inline void pack_rows(Element* dst, const Inputs& x, const Element* rows, int64_t stride, int64_t count) {
  for (int64_t column = 0; column < x.shape.head_dim; column += kUnit, dst += kUnitElements)
    pack_panel(dst, rows + column, stride, false, count, x.columns(column));
}

// The transpose of rows as a left factor: a block for each 32 columns.
inline void pack_columns(Element* dst, const Inputs& x, const Element* rows, int64_t stride, int64_t count) {
  for (int64_t column = 0; column < x.shape.head_dim; column += kUnit, dst += kUnitElements)
    pack_block(dst, rows + column, stride, true, x.columns(column), count);
}

// The pieces that a group's work is cut into, so that all pieces together are a multiple of the threads.
inline int64_t shares_of_a_group(int64_t num_groups, int64_t most) {
  const int64_t threads = at::get_num_threads();
  return std::clamp<int64_t>(threads / std::gcd(threads, num_groups), 1, most);
}

// Calls work(group, share) for all, each thread with a Session.
template <class Work>
void for_each_share(int64_t num_groups, int64_t num_shares, Work&& work) {
  at::parallel_for(0, num_groups * num_shares, 1, [&](int64_t begin, int64_t end) {
    const Session session;
    for (int64_t task = begin; task < end; ++task) work(task / num_shares, task % num_shares);
  });
}

}  // namespace bough::amx
