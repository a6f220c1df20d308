// Adapters for the block functions of each element type (matrix_product_tiles.h), and the loop of one thread
// over its blocks of rows of A and panels of 32 columns of B. Only matrix_product_cpu.cpp includes this.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "kernels/matrix_product/matrix_product_cost.h"
#include "kernels/matrix_product/matrix_product_tiles.h"

namespace bough {

constexpr int64_t kPackedDepth = 128;  // depth to pack before the next panel or block

template <class T>
struct Factor {
  const T* data;
  int64_t stride;
  bool transposed;  // element [i][j] at data[j * stride + i], else at data[i * stride + j]

  Factor rows_from(int64_t i) const { return {data + (transposed ? i : i * stride), stride, transposed}; }
  Factor columns_from(int64_t j) const { return {data + (transposed ? j * stride : j), stride, transposed}; }
  Factor transpose() const { return {data, stride, !transposed}; }
};

template <class T>
struct Product {
  int64_t m, n, k;
  Factor<T> a, b;
  void* c;  // elements are T, or float if `accumulate`
  int64_t c_stride;
  bool c_transposed = false;  // c is [n, m] in memory
  bool accumulate = false;
  const T* bias = nullptr;      // [n], or [m] if c is transposed
  const T* residual = nullptr;  // layout of c; bf16 only, added to the sums before rounding
};

struct Fp32Tiles : Fp32Blocking {
  static constexpr int64_t kFewRows = 128;  // see Bf16Tiles
  static void begin() {}
  static void end() {}
  static void pack_panel(float* panel, const Factor<float>& b, int64_t depth, int64_t columns) {
    BOUGH_AVX_CALL(pack_panel, panel, b.data, b.stride, b.transposed, depth, columns);
  }
  static bool must_pack(const Factor<float>& a, int64_t) { return a.transposed; }
  static void pack_block(float* block, const Factor<float>& a, int64_t rows, int64_t depth) {
    BOUGH_AVX_CALL(pack_transposed_block, block, a.data, a.stride, rows, depth);
  }
  static void multiply(float* c, int64_t stride, bool accumulate, const Factor<float>& a, bool packed,
                       const float* panel, int64_t rows, int64_t columns, int64_t depth,
                       const Upcoming& written, const Upcoming& read) {
    for (int64_t i = 0; written.rows && i < kRows; ++i)
      for (int64_t line = 0; line < written.lines; ++line)
        __builtin_prefetch(static_cast<const char*>(written.rows) + i * written.stride + line * 64, 1);
    BOUGH_AVX_CALL(multiply_block, c, stride, accumulate, a.data, packed ? kRows : a.stride, packed, panel,
                   kPanelColumns, rows, columns, depth, read);
  }
  static void store(float* c, int64_t stride, const float* block, int64_t rows, int64_t columns,
                    const float*) {
    for (int64_t i = 0; i < rows; ++i)
      std::copy(block + i * kPanelColumns, block + i * kPanelColumns + columns, c + i * stride);
  }
  static void store_turned(float* c, int64_t stride, const float* block, int64_t rows, int64_t columns,
                           const float*) {
    BOUGH_AVX_CALL(store_block_turned, c, stride, block, rows, columns);
  }
};

struct Bf16Tiles : Bf16Blocking {
  // If A has at most this many rows and B is a transposed view of a weight, cᵀ = bᵀ·aᵀ is computed: to
  // transpose the sums costs less than to pack the weight as B.
  static constexpr int64_t kFewRows = 256;
  static void begin() { bf16::begin_tiles(); }
  static void end() { bf16::end_tiles(); }
  static void pack_panel(Element* panel, const Factor<Element>& b, int64_t depth, int64_t columns) {
    bf16::pack_panel(panel, b.data, b.stride, b.transposed, depth, columns);
  }
  static bool must_pack(const Factor<Element>& a, int64_t depth) {
    return a.transposed || depth % kDepth != 0;
  }
  static void pack_block(Element* block, const Factor<Element>& a, int64_t rows, int64_t depth) {
    bf16::pack_block(block, a.data, a.stride, a.transposed, rows, depth);
  }
  static void multiply(float* c, int64_t stride, bool accumulate, const Factor<Element>& a, bool packed,
                       const Element* panel, int64_t, int64_t columns, int64_t depth, const Upcoming& written,
                       const Upcoming& read) {
    bf16::multiply_block(c, stride, accumulate, a.data, a.stride, packed, panel, columns, depth, written,
                         read);
  }
  static void store(Element* c, int64_t stride, const float* block, int64_t rows, int64_t columns,
                    const Element* residual) {
    bf16::store_block(c, stride, block, rows, columns, residual);
  }
  static void store_turned(Element* c, int64_t stride, const float* block, int64_t rows, int64_t columns,
                           const Element* residual) {
    bf16::store_block_turned(c, stride, block, rows, columns, residual);
  }
};

inline float widen(float value) {
  return value;
}
inline float widen(BFloat16Bits value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

// Computes rows [row_begin, row_end) of c. packed_a: the same rows of A as packed blocks; nullptr if A is
// read in place.
template <class Tiles>
class Worker {
 public:
  using T = typename Tiles::Element;
  using Space = BlockWorkspace<Tiles>;
  Worker(const Product<T>& product, int64_t row_begin, int64_t row_end, const T* packed_a)
      : p_(product), row_begin_(row_begin), row_end_(row_end), packed_a_(packed_a) {}

  // The range of the inner dimension (depth) that one call of block() multiplies.
  struct Part {
    int64_t begin, depth;
    bool first, last;
  };

  // Computes the columns of panels [first, last). `workspace` has workspace_elements(last - first) elements.
  void run(int64_t first, int64_t last, T* workspace) {
    const int64_t group = Space::panel_group(p_.k, last - first);
    T* edge = workspace + group * panel_elements(p_);
    T* near_rows = edge + (Tiles::kPadsRows ? block_elements(p_) : 0);
    auto* sums = reinterpret_cast<float*>(near_rows + Space::near_elements(p_.k));
    const int64_t edge_row = row_end_ - (row_end_ - row_begin_) % Tiles::kRows;
    if (!packed_a_ && Tiles::kPadsRows && edge_row < row_end_) {
      Tiles::pack_block(edge, p_.a.rows_from(edge_row), row_end_ - edge_row, p_.k);
      packed_edge_ = edge;
    }
    const int64_t step = Space::part_of_depth(p_.k);
    const int64_t chunk_rows =
        step < p_.k ? Space::chunk_blocks(group) * Tiles::kRows : row_end_ - row_begin_;
    for (int64_t begin = first; begin < last; begin += group) {
      const int64_t end = std::min(last, begin + group);
      pack_panels(begin, end, workspace);
      for (int64_t chunk = row_begin_; chunk < row_end_; chunk += chunk_rows) {
        const int64_t chunk_end = std::min(row_end_, chunk + chunk_rows);
        for (int64_t k = 0; k < p_.k; k += step) {
          const Part part{k, std::min(step, p_.k - k), k == 0, k + step >= p_.k};
          for (int64_t row = chunk; row < chunk_end; row += Tiles::kRows) {
            const Rows a = rows_at(row, part, near_rows);
            const auto next = row + Tiles::kRows < chunk_end ? std::pair(row + Tiles::kRows, k)
                              : part.last                    ? std::pair(chunk_end, int64_t{0})
                                                             : std::pair(chunk, k + step);
            for (int64_t panel = begin; panel < end; ++panel) {
              const int64_t i = (row - chunk) / Tiles::kRows * group + panel - begin;
              block(row, panel, a.factor, a.packed,
                    workspace + (panel - begin) * panel_elements(p_) + k * kPanelColumns, part,
                    step < p_.k ? sums + i * Tiles::kRows * kPanelColumns : nullptr,
                    p_.c_transposed || !part.last ? Upcoming{}
                    : panel + 1 < end             ? upcoming(row, panel + 1)
                                                  : upcoming(row + Tiles::kRows, begin),
                    upcoming_rows(next.first, next.second, panel - begin, end - begin));
            }
          }
        }
      }
    }
  }

  // If B is not transposed, packs kPackedDepth rows of B for all panels, then the next rows. All panels thus
  // read the same rows and memory pages of B shortly after each other.
  void pack_panels(int64_t begin, int64_t end, T* panels) const {
    const int64_t step = p_.b.transposed ? p_.k : kPackedDepth;
    for (int64_t k = 0; k < p_.k; k += step)
      for (int64_t panel = begin; panel < end; ++panel)
        Tiles::pack_panel(panels + (panel - begin) * panel_elements(p_) + k * kPanelColumns,
                          p_.b.rows_from(k).columns_from(panel * kPanelColumns), std::min(step, p_.k - k),
                          columns_of(panel));
  }

  // Packs all rows of A as blocks. A transposed A is packed kPackedDepth at a time, as in pack_panels.
  void pack_rows(T* blocks) const {
    const int64_t step = p_.a.transposed ? kPackedDepth : p_.k;
    for (int64_t k = 0; k < p_.k; k += step)
      for (int64_t row = row_begin_; row < row_end_; row += Tiles::kRows)
        Tiles::pack_block(blocks + (row - row_begin_) / Tiles::kRows * block_elements(p_) + k * Tiles::kRows,
                          p_.a.rows_from(row).columns_from(k), std::min(Tiles::kRows, row_end_ - row),
                          std::min(step, p_.k - k));
  }

  static int64_t panel_elements(const Product<T>& p) { return Space::panel_elements(p.k); }
  static int64_t block_elements(const Product<T>& p) { return Space::block_elements(p.k); }
  // Number of elements of one thread's workspace.
  static int64_t workspace_elements(const Product<T>& p, int64_t panels) {
    return Space::elements(p.k, panels);
  }

  // Adds one part of the depth of one block of c to `sums`, and after the last part stores `sums` to c. If
  // fp32 sums can be kept in c itself, adds to c instead. `sums` is nullptr if the part is the whole depth.
  // Prefetches `written` for writing and `read` for reading.
  void block(int64_t row, int64_t panel, const Factor<T>& a, bool packed, const T* b, const Part& part,
             float* sums, const Upcoming& written, const Upcoming& read = {}) {
    const int64_t rows = std::min(Tiles::kRows, row_end_ - row);
    const int64_t column = panel * kPanelColumns, columns = columns_of(panel);
    const bool whole = !Tiles::kPadsRows || (rows == Tiles::kRows && columns == kPanelColumns);
    if constexpr (std::is_same_v<T, float>) {
      if (!p_.c_transposed && !p_.bias) {
        float* c = static_cast<float*>(p_.c) + row * p_.c_stride + column;
        Tiles::multiply(c, p_.c_stride, p_.accumulate, a, packed, b, rows, columns, part.depth, written,
                        read);
        return;
      }
    }
    if (p_.accumulate && whole) {
      float* c = static_cast<float*>(p_.c) + row * p_.c_stride + column;
      Tiles::multiply(c, p_.c_stride, true, a, packed, b, rows, columns, part.depth, written, read);
      return;
    }
    alignas(64) std::array<float, Tiles::kRows * kPanelColumns> own;
    if (!sums) sums = own.data();
    const bool starts = part.first && (p_.accumulate || p_.bias);
    if (starts) load(sums, row, rows, column, columns);
    Tiles::multiply(sums, kPanelColumns, starts || !part.first, a, packed, b, rows, columns, part.depth,
                    written, read);
    if (part.last) store(sums, row, rows, column, columns);
  }

  // Returns where the next block of c will be written, to prefetch it: c is larger than the caches, and a
  // write waits for its cache line.
  Upcoming upcoming(int64_t row, int64_t panel) const {
    if (row >= row_end_) return {};
    const int64_t element = p_.accumulate ? sizeof(float) : sizeof(T);
    const int64_t offset = row * p_.c_stride + panel * kPanelColumns;
    return {static_cast<const char*>(p_.c) + offset * element, p_.c_stride * element,
            kPanelColumns * element / 64};
  }

 private:
  struct Rows {
    Factor<T> factor;
    bool packed;
  };

  // Returns a block of rows of A, in place or packed. If the row stride is a multiple of 2 KiB, the rows map
  // to few sets of the L1 cache, so that they would not stay there. Such rows are copied to `near_rows`.
  Rows rows_at(int64_t row, const Part& part, T* near_rows) const {
    if (packed_a_)
      return {{packed_a_ + (row - row_begin_) / Tiles::kRows * block_elements(p_) + part.begin * Tiles::kRows,
               0, false},
              true};
    if (packed_edge_ && row + Tiles::kRows > row_end_)
      return {{packed_edge_ + part.begin * Tiles::kRows, 0, false}, true};
    const auto rows = p_.a.rows_from(row).columns_from(part.begin);
    constexpr int64_t kFewSets = 2048 / static_cast<int64_t>(sizeof(T));
    if (!Space::is_in_parts(p_.k) || p_.a.stride % kFewSets != 0) return {rows, false};
    Tiles::pack_block(near_rows, rows, Tiles::kRows, part.depth);
    return {{near_rows, 0, false}, true};
  }

  // Divides the cache lines of a block of rows of A, from depth k on, into `parts`, and returns number `part`
  // of these to prefetch. Empty if the block is not read in place.
  Upcoming upcoming_rows(int64_t row, int64_t k, int64_t part, int64_t parts) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    if (packed_a_ || row + Tiles::kRows > row_end_) return {};
    const int64_t lines = ceil_div(std::min(Space::part_of_depth(p_.k), p_.k - k), kLine);
    const int64_t begin = part * lines / parts;
    return {p_.a.data + row * p_.a.stride + k + begin * kLine, p_.a.stride * static_cast<int64_t>(sizeof(T)),
            (part + 1) * lines / parts - begin};
  }

  int64_t columns_of(int64_t panel) const { return std::min(kPanelColumns, p_.n - panel * kPanelColumns); }

  void load(float* sums, int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    std::fill(sums, sums + Tiles::kRows * kPanelColumns, 0.0f);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j)
        sums[i * kPanelColumns + j] =
            p_.accumulate ? static_cast<const float*>(p_.c)[(row + i) * p_.c_stride + column + j]
                          : widen(p_.bias[p_.c_transposed ? row + i : column + j]);
  }

  void store(const float* sums, int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    if (p_.accumulate) {
      for (int64_t i = 0; i < rows; ++i)
        std::copy(sums + i * kPanelColumns, sums + i * kPanelColumns + columns,
                  static_cast<float*>(p_.c) + (row + i) * p_.c_stride + column);
      return;
    }
    const int64_t at = p_.c_transposed ? column * p_.c_stride + row : row * p_.c_stride + column;
    const auto store = p_.c_transposed ? Tiles::store_turned : Tiles::store;
    store(static_cast<T*>(p_.c) + at, p_.c_stride, sums, rows, columns,
          p_.residual ? p_.residual + at : nullptr);
  }

  const Product<T>& p_;
  int64_t row_begin_, row_end_;
  const T* packed_a_;
  const T* packed_edge_ = nullptr;  // the last rows, packed, if they are fewer than a block; else nullptr
};

}  // namespace bough
