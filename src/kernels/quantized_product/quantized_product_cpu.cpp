// Rows of x are packed once, in panels of 32 rows. Each thread computes blocks of rows of the weight. It
// widens one part of a block's depth (inner dimension) to a buffer, which the kernels of
// matrix_product_tiles.h read, and multiplies this part by every panel. The fp32 sums stay in the cache with
// the buffer:
//
//   for each group of panels that fits the L2 cache:
//     for each block of this thread's rows of the weight:
//       for each part of the depth:   widen it;  for each panel: sums = or += block · panel
//       scale the sums, transpose and store them
//
// Blocks are those of matrix_product_tiles.h. CPUs that cannot run these kernels (has_tiles()) compute dot
// products of vectors in fp32.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/common/op.h"
#include "kernels/common/scratch.h"
#include "kernels/common/simd.h"
#include "kernels/matrix_product/bf16_products.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/quantized_product/quantized_product.h"
#include "kernels/quantized_product/quantized_product_tiles.h"

namespace bough {

namespace {
int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

template <class T>
struct Int8Product {
  int64_t rows, inputs, outputs;
  const T* x;
  const int8_t* weight;
  const float* scale;
  const T* bias;      // nullptr if there is none
  const T* residual;  // nullptr if there is none
  T* y;
};

constexpr int64_t kPanelBytes = 1 << 20;  // bytes of the panels that all blocks use before the next panels
constexpr int64_t kGrainMultiplies = 256 << 10;

struct Bf16Int8 {
  using Element = BFloat16Bits;
  static constexpr int64_t kRows = bf16::kBlockRows, kDepth = bf16::kDepth, kPart = 512;
  static void begin() { bf16::begin_tiles(); }
  static void end() { bf16::end_tiles(); }
  static void pack(Element* panel, const Element* x, int64_t stride, int64_t depth, int64_t rows) {
    bf16::pack_panel(panel, x, stride, /*transposed=*/true, depth, rows);
  }
  static void widen(Element* block, const int8_t* weights, int64_t stride, int64_t rows, int64_t depth,
                    bool rows_follow) {
    bf16::widen_block(block, weights, stride, rows, depth, rows_follow);
  }
  // Multiplies a block of the weight by the only panel. Without AMX, returns false and computes nothing.
  static bool multiply_one(float* sums, const Int8Product<Element>& p, int64_t output, int64_t outputs,
                           const Element* panel, int64_t rows, bool rows_follow, Element* scratch) {
    static_assert(kRows * kPart >= amx::kRingElements);
    if (!has_amx()) return false;
    amx::multiply_widened(sums, p.weight + output * p.inputs, p.inputs, outputs, p.inputs, panel, rows,
                          rows_follow, scratch);
    return true;
  }
  static void multiply(float* sums, bool accumulate, const Element* block, const Element* panel, int64_t rows,
                       int64_t depth) {
    bf16::multiply_block(sums, kPanelColumns, accumulate, block, 0, /*packed=*/true, panel, rows, depth);
  }
  static void store(const Int8Product<Element>& p, float* sums, int64_t output, int64_t outputs, int64_t row,
                    int64_t rows) {
    bf16::scale_sums(sums, p.scale + output, p.bias ? p.bias + output : nullptr, outputs);
    const int64_t at = row * p.outputs + output;
    bf16::store_block_turned(p.y + at, p.outputs, sums, outputs, rows,
                             p.residual ? p.residual + at : nullptr);
  }
};

struct Fp32Int8 {
  using Element = float;
  static constexpr int64_t kRows = kBlockRows, kDepth = 1, kPart = 256;
  static void begin() {}
  static void end() {}
  static void pack(Element* panel, const Element* x, int64_t stride, int64_t depth, int64_t rows) {
    BOUGH_AVX_CALL(pack_panel, panel, x, stride, /*transposed=*/true, depth, rows);
  }
  static void widen(Element* block, const int8_t* weights, int64_t stride, int64_t rows, int64_t depth,
                    bool rows_follow) {
    BOUGH_AVX_CALL(widen_block, block, weights, stride, rows, depth, rows_follow);
  }
  static bool multiply_one(float*, const Int8Product<Element>&, int64_t, int64_t, const Element*, int64_t,
                           bool, Element*) {
    return false;
  }
  static void multiply(float* sums, bool accumulate, const Element* block, const Element* panel, int64_t rows,
                       int64_t depth) {
    BOUGH_AVX_CALL(multiply_block, sums, kPanelColumns, accumulate, block, depth, /*turned=*/false, panel,
                   kPanelColumns, kRows, rows, depth, {});
  }
  static void store(const Int8Product<Element>& p, float* sums, int64_t output, int64_t outputs, int64_t row,
                    int64_t rows) {
    for (int64_t j = 0; j < rows; ++j) {
      const int64_t at = (row + j) * p.outputs + output;
      for (int64_t i = 0; i < outputs; ++i) {
        float value = sums[i * kPanelColumns + j] * p.scale[output + i];
        if (p.bias) value += p.bias[output + i];
        if (p.residual) value += p.residual[at + i];
        p.y[at + i] = value;
      }
    }
  }
};

int64_t grain_of(const auto& p, int64_t rows_per_item) {
  return std::max<int64_t>(1, kGrainMultiplies / std::max<int64_t>(1, p.rows * p.inputs * rows_per_item));
}

template <class Tiles>
void multiply_tiles(const Int8Product<typename Tiles::Element>& p) {
  using T = typename Tiles::Element;
  const int64_t panel_elements = ceil_div(p.inputs, Tiles::kDepth) * Tiles::kDepth * kPanelColumns;
  const int64_t panels = ceil_div(p.rows, kPanelColumns), blocks = ceil_div(p.outputs, Tiles::kRows);
  const int64_t group =
      std::clamp<int64_t>(kPanelBytes / (panel_elements * static_cast<int64_t>(sizeof(T))), 1, panels);
  const Workspace<T> packed(panels * panel_elements);
  at::parallel_for(
      0, panels, std::max<int64_t>(1, (64 << 10) / panel_elements), [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel)
          Tiles::pack(packed.get() + panel * panel_elements, p.x + panel * kPanelColumns * p.inputs, p.inputs,
                      p.inputs, std::min(kPanelColumns, p.rows - panel * kPanelColumns));
      });
  constexpr int64_t kSums = Tiles::kRows * kPanelColumns;
  at::parallel_for(0, blocks, grain_of(p, Tiles::kRows), [&](int64_t begin, int64_t end) {
    const Workspace<T> widened(Tiles::kRows * Tiles::kPart);
    const Workspace<float> sums(group * kSums);
    Tiles::begin();
    for (int64_t first = 0; first < panels; first += group) {
      const int64_t last = std::min(panels, first + group);
      for (int64_t b = begin; b < end; ++b) {
        const int64_t output = b * Tiles::kRows, outputs = std::min(Tiles::kRows, p.outputs - output);
        const bool done =
            last - first == 1 &&
            Tiles::multiply_one(sums.get(), p, output, outputs, packed.get() + first * panel_elements,
                                p.rows - first * kPanelColumns, b + 1 < end, widened.get());
        for (int64_t k = 0; !done && k < p.inputs; k += Tiles::kPart) {
          const int64_t depth = std::min(Tiles::kPart, p.inputs - k);
          Tiles::widen(widened.get(), p.weight + output * p.inputs + k, p.inputs, outputs, depth,
                       b + 1 < end);
          for (int64_t panel = first; panel < last; ++panel)
            Tiles::multiply(sums.get() + (panel - first) * kSums, k > 0, widened.get(),
                            packed.get() + panel * panel_elements + k * kPanelColumns,
                            std::min(kPanelColumns, p.rows - panel * kPanelColumns), depth);
        }
        for (int64_t panel = first; panel < last; ++panel)
          Tiles::store(p, sums.get() + (panel - first) * kSums, output, outputs, panel * kPanelColumns,
                       std::min(kPanelColumns, p.rows - panel * kPanelColumns));
      }
    }
    Tiles::end();
  });
}

// The portable code widens one part of four rows of the weight, then multiplies it by each row of x in turn.
constexpr int64_t kDotRows = 4, kDotPart = 1024;

// sums[row][i] += x[row] · weight[i] over `depth` elements, for i < count <= 4. `widened`: scratch of
// kDotRows * kDotPart elements.
BOUGH_INLINE void add_dots_of(float* sums, const float* x, int64_t x_stride, int64_t rows,
                              const int8_t* weight, int64_t stride, int64_t count, int64_t depth,
                              float* widened) {
  for (int64_t i = 0; i < kDotRows; ++i)
    for (int64_t k = 0; k < depth; ++k)
      widened[i * kDotPart + k] = i < count ? static_cast<float>(weight[i * stride + k]) : 0.0f;
  const int64_t whole = depth / simd::kLanes * simd::kLanes;
  for (int64_t row = 0; row < rows; ++row) {
    const float* x_row = x + row * x_stride;
    simd::Float16 sum[kDotRows] = {};
    for (int64_t k = 0; k < whole; k += simd::kLanes) {
      simd::Float16 x_k;
      simd::load(x_k, x_row + k);
      for (int64_t i = 0; i < kDotRows; ++i) {
        simd::Float16 w;
        simd::load(w, widened + i * kDotPart + k);
        sum[i] += x_k * w;
      }
    }
    for (int64_t i = 0; i < kDotRows; ++i) {
      float total = simd::sum_of(sum[i]);
      for (int64_t k = whole; k < depth; ++k) total += x_row[k] * widened[i * kDotPart + k];
      sums[row * kDotRows + i] += total;
    }
  }
}
BOUGH_ON_BEST_ISA(add_dots,
                  (float* sums, const float* x, int64_t x_stride, int64_t rows, const int8_t* weight,
                   int64_t stride, int64_t count, int64_t depth, float* widened),
                  (sums, x, x_stride, rows, weight, stride, count, depth, widened), add_dots_of)

template <class T>
void multiply_portable(const Int8Product<T>& p, const float* x) {
  at::parallel_for(0, ceil_div(p.outputs, kDotRows), grain_of(p, kDotRows), [&](int64_t begin, int64_t end) {
    const Workspace<float> sums(p.rows * kDotRows), widened(kDotRows * kDotPart);
    for (int64_t output = begin * kDotRows; output < std::min(p.outputs, end * kDotRows);
         output += kDotRows) {
      const int64_t count = std::min(kDotRows, p.outputs - output);
      std::fill_n(sums.get(), p.rows * kDotRows, 0.0f);
      for (int64_t k = 0; k < p.inputs; k += kDotPart)
        add_dots(sums.get(), x + k, p.inputs, p.rows, p.weight + output * p.inputs + k, p.inputs, count,
                 std::min(kDotPart, p.inputs - k), widened.get());
      for (int64_t row = 0; row < p.rows; ++row)
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at = row * p.outputs + output + i;
          float value = sums.get()[row * kDotRows + i] * p.scale[output + i];
          if (p.bias) value += simd::widen(p.bias[output + i]);
          if (p.residual) value += simd::widen(p.residual[at]);
          simd::narrow(p.y[at], value);
        }
    }
  });
}

// Returns the bits of |w|. As integers, they have the same order as |w|, with NaN above infinity.
BOUGH_INLINE int32_t magnitude_bits(float w) {
  int32_t bits;
  std::memcpy(&bits, &w, sizeof bits);
  return bits & 0x7FFFFFFF;
}

// Quantizes `rows` rows of `width` elements. Writes each row's scale and integers.
template <class T>
BOUGH_INLINE void quantize_rows_of(int8_t* quantized, float* scale, const T* weight, int64_t rows,
                                   int64_t width) {
  typedef int8_t Bytes16 __attribute__((vector_size(16)));
  const int64_t whole = width / simd::kLanes * simd::kLanes;
  for (int64_t r = 0; r < rows; ++r, quantized += width, weight += width) {
    simd::Int16 most_of = {};
    for (int64_t k = 0; k < whole; k += simd::kLanes) {
      simd::Float16 w;
      simd::load(w, weight + k);
      simd::Int16 bits;
      std::memcpy(&bits, &w, sizeof bits);
      bits &= 0x7FFFFFFF;
      const simd::Int16 is_larger = (most_of - bits) >> 31;
      most_of = (most_of & ~is_larger) | (bits & is_larger);
    }
    int32_t most = 0;
    for (int64_t i = 0; i < simd::kLanes; ++i) most = std::max<int32_t>(most, most_of[i]);
    for (int64_t k = whole; k < width; ++k) most = std::max(most, magnitude_bits(simd::widen(weight[k])));
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    const float steps = 127 / largest;
    scale[r] = std::isfinite(largest) ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
    if (!std::isfinite(largest) || !std::isfinite(steps)) {
      std::memset(quantized, 0, static_cast<size_t>(width));
      continue;
    }
    for (int64_t k = 0; k < whole; k += simd::kLanes) {
      simd::Float16 w;
      simd::load(w, weight + k);
      // Adding 1.5 * 2^23 rounds w * steps to an integer, ties to even, and leaves it in the low bits.
      const simd::Float16 shifted = w * steps + 12582912.0f;
      simd::Int16 bits;
      std::memcpy(&bits, &shifted, sizeof bits);
      bits -= 0x4B400000;
      const Bytes16 bytes = __builtin_convertvector(bits, Bytes16);
      std::memcpy(quantized + k, &bytes, sizeof bytes);
    }
    for (int64_t k = whole; k < width; ++k)
      quantized[k] = static_cast<int8_t>(std::nearbyint(simd::widen(weight[k]) * steps));
  }
}

#define BOUGH_QUANTIZE_ROWS(T)                                                                        \
  BOUGH_ON_BEST_ISA(quantize_rows,                                                                    \
                    (int8_t * quantized, float* scale, const T* weight, int64_t rows, int64_t width), \
                    (quantized, scale, weight, rows, width), quantize_rows_of<T>)
BOUGH_QUANTIZE_ROWS(float)
BOUGH_QUANTIZE_ROWS(BFloat16Bits)

using OptionalTensor = std::optional<at::Tensor>;

template <class T>
Int8Product<T> product_of(const at::Tensor& x_RK, const at::Tensor& weight_OK, const at::Tensor& scale_O,
                          const OptionalTensor& bias_O, const OptionalTensor& residual_RO,
                          const at::Tensor& y_RO) {
  return {x_RK.size(0),
          x_RK.size(1),
          weight_OK.size(0),
          data<T>(x_RK),
          data<int8_t>(weight_OK),
          data<float>(scale_O),
          bias_O ? data<T>(*bias_O) : nullptr,
          residual_RO ? data<T>(*residual_RO) : nullptr,
          mutable_data<T>(y_RO)};
}

at::Tensor quantized_product_cpu(const at::Tensor& x_RK, const at::Tensor& weight_OK,
                                 const at::Tensor& scale_O, const OptionalTensor& bias_O,
                                 const OptionalTensor& residual_RO) {
  const auto type = x_RK.scalar_type();
  if ((type != at::kFloat && type != at::kBFloat16) || x_RK.numel() == 0 || weight_OK.numel() == 0)
    return quantized_product_reference(x_RK, weight_OK, scale_O, bias_O, residual_RO);
  auto y_RO = at::empty({x_RK.size(0), weight_OK.size(0)}, x_RK.options());
  const auto run = [&]<class T>(auto&& multiply) {
    multiply(product_of<T>(x_RK, weight_OK, scale_O, bias_O, residual_RO, y_RO));
  };
  if (type == at::kFloat) {
    if (has_tiles(type)) run.template operator()<float>(multiply_tiles<Fp32Int8>);
    else run.template operator()<float>([](const auto& p) { multiply_portable(p, p.x); });
  } else {
    if (has_tiles(type)) run.template operator()<BFloat16Bits>(multiply_tiles<Bf16Int8>);
    else {
      const auto x = x_RK.to(at::kFloat);
      run.template operator()<BFloat16Bits>([&](const auto& p) { multiply_portable(p, data<float>(x)); });
    }
  }
  return y_RO;
}

void quantize_rows_cpu_(const at::Tensor& quantized_OK, const at::Tensor& scale_O,
                        const at::Tensor& weight_OK) {
  const auto type = weight_OK.scalar_type();
  if ((type != at::kFloat && type != at::kBFloat16) || weight_OK.numel() == 0)
    return quantize_rows_reference_(quantized_OK, scale_O, weight_OK);
  const int64_t width = weight_OK.size(1);
  const auto run = [&]<class T>() {
    at::parallel_for(0, weight_OK.size(0), grain(width), [&](int64_t begin, int64_t end) {
      quantize_rows(mutable_data<int8_t>(quantized_OK) + begin * width, mutable_data<float>(scale_O) + begin,
                    data<T>(weight_OK) + begin * width, end - begin, width);
    });
  };
  type == at::kFloat ? run.template operator()<float>() : run.template operator()<BFloat16Bits>();
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("quantize_rows_", TORCH_FN(bough::quantize_rows_cpu_));
  m.impl("quantized_product", TORCH_FN(bough::quantized_product_cpu));
}
