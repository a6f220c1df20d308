// Who multiplies attention's tiles on a CPU, and in which form operands are kept.
//
//   left factor   [m, k]: rows, m a multiple of 32
//   right factor  [k, n]: the engine's own form
//   product       fp32 [m, n], row-major
//
// Every tile is padded with zeros, to padded_rows() rows and padded_width() columns.
#pragma once

#include <ATen/native/CPUBlas.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "kernels/common/dispatch.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/tree_attention/tree_attention_isa.h"

namespace bough {

// Rows of `width` elements of a tensor.
template <class T>
struct Rows {
  const T* data;
  int64_t count, width, stride;
};

struct ProductShape {
  int64_t m, n, k;
};

// fp32 tiles by ATen's brgemm (oneDNN); bf16 is widened when a tile is loaded. brgemm compiles a kernel for each shape
// it meets, hence three sizes of tiles.
struct Fp32Engine {
  using Tile = float;
  static constexpr bool kTilesAreScores = true;  // probabilities overwrite their scores
  struct Session {
    Session() {}  // not trivial: a variable of it is not unused
  };

  static int64_t padded_rows(int64_t rows) { return rows <= 32 ? 32 : rows <= 64 ? 64 : 128; }
  static int64_t padded_width(int64_t width) { return width; }

  template <class T>
  static void load_left(float* dst, const Rows<T>& src, int64_t rows) {
    BOUGH_ISA_CALL(load_tile, dst, src.data, src.count, rows, src.width, src.stride);
  }
  template <class T>
  static void load_right(float* dst, const Rows<T>& src, int64_t rows) {
    load_left(dst, src, rows);
  }
  template <class T>
  static void load_right_transposed(float* dst, const Rows<T>& src, int64_t rows) {
    BOUGH_ISA_CALL(load_tile_transposed, dst, src.data, src.count, rows, src.width, src.stride);
  }

  static void multiply(float* c, const float* left, const float* right, ProductShape s, bool accumulate) {
    at::native::cpublas::brgemm(s.m, s.n, s.k, s.k, s.n, s.n, accumulate, left, right, c, /*is_vnni=*/false);
  }
  // c += leftᵀ · right; left: [k, m].
  static void multiply_turned(float* c, const float* left, float* scratch, const float* right,
                              ProductShape s) {
    BOUGH_ISA_CALL(transpose_tile, scratch, left, s.k, s.m);
    multiply(c, scratch, right, s, true);
  }

  // brgemm refuses CPUs without AVX-512; there the reference computes.
  static bool available() {
    static const bool has = [] {
      float a[1024] = {}, b[1024] = {}, c[1024] = {};
      try {
        multiply(c, a, b, {32, 32, 32}, false);
        return best_isa() == Isa::kAvx512;
      } catch (const c10::Error&) {
        return false;
      }
    }();
    return has;
  }
};

// bf16 tiles by AMX: operands are not widened, probabilities and their gradients are rounded to bf16.
struct AmxEngine {
  using Tile = BFloat16Bits;
  static constexpr bool kTilesAreScores = false;
  struct Session {
    Session() { amx::begin_tiles(); }
    ~Session() { amx::end_tiles(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  static int64_t padded_rows(int64_t rows) { return (rows + 31) / 32 * 32; }
  static int64_t padded_width(int64_t width) { return padded_rows(width); }

  static void load_left(Tile* dst, const Rows<Tile>& src, int64_t rows) {
    amx::copy_rows(dst, padded_width(src.width), src.data, src.stride, src.count, src.width, rows);
  }
  static void load_right(Tile* dst, const Rows<Tile>& src, int64_t rows) {
    for (int64_t column = 0; column < src.width; column += kPanelColumns, dst += rows * kPanelColumns)
      amx::pack_panel(dst, src.data + column, src.stride, false, src.count,
                      std::min(kPanelColumns, src.width - column));
  }
  static void load_right_transposed(Tile* dst, const Rows<Tile>& src, int64_t rows) {
    for (int64_t row = 0; row < rows; row += kPanelColumns, dst += padded_width(src.width) * kPanelColumns)
      amx::pack_panel(dst, src.data + row * src.stride, src.stride, true, src.width,
                      std::min(kPanelColumns, src.count - row));
  }

  static void multiply(float* c, const Tile* left, const Tile* right, ProductShape s, bool accumulate) {
    for (int64_t m = 0; m < s.m; m += amx::kBlockRows)
      for (int64_t n = 0; n < s.n; n += kPanelColumns)
        amx::multiply_block(c + m * s.n + n, s.n, accumulate, left + m * s.k, s.k, false, right + n * s.k,
                            s.k);
  }
  static void multiply_turned(float* c, const Tile* left, Tile* scratch, const Tile* right, ProductShape s) {
    for (int64_t m = 0; m < s.m; m += amx::kBlockRows) {
      amx::pack_block(scratch, left + m, s.m, true, amx::kBlockRows, s.k);
      for (int64_t n = 0; n < s.n; n += kPanelColumns)
        amx::multiply_block(c + m * s.n + n, s.n, true, scratch, 0, true, right + n * s.k, s.k);
    }
  }

  static bool available() { return has_tiles(at::kBFloat16); }
};

// Calls function.template operator()<Engine, T>() with the engine of an element type, or returns false.
template <class Function>
bool with_engine(at::ScalarType type, Function&& function) {
  if (type == at::kBFloat16 && AmxEngine::available())
    function.template operator()<AmxEngine, BFloat16Bits>();
  else if (type == at::kFloat && Fp32Engine::available()) function.template operator()<Fp32Engine, float>();
  else if (type == at::kBFloat16 && Fp32Engine::available())
    function.template operator()<Fp32Engine, BFloat16Bits>();
  else return false;
  return true;
}

}  // namespace bough
