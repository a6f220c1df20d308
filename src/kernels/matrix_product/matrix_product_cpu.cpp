// c = a·b. A panel is 32 columns of B. Each thread packs its panels, one group that fits the L2 cache at a
// time. Then the thread multiplies each block of rows of A by the whole group. A is read in place if its
// layout allows that:
//
//   for each group of panels of this thread:  pack them
//     for each block of rows of A:            (if it must be packed: all threads together packed it before)
//       for each panel of the group:          c block = or += a block · panel
//
// bf16 with a long depth (inner dimension): a few hundred rows are multiplied by one part of the depth at a
// time. Their fp32 sums stay in the L2 cache and are rounded once.
//
// A weight's gradient, c += aᵀ·b with a long depth, keeps its sums in the cache instead: add_turned below.
//
// Few rows times a transposed B (a decoding step times a weight) are computed as cᵀ = bᵀ·aᵀ, so that the
// weight is the factor that is read in place, once.
#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "base/cpu.h"
#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/common/scratch.h"
#include "kernels/common/simd.h"
#include "kernels/matrix_product/bf16_products.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/matrix_product/matrix_product_blocks.h"

namespace bough {

namespace {
constexpr int64_t kPackedTogether = 64 << 10;  // fewest elements for which a thread is started to pack

// Returns true if there are too few multiply-adds to start threads, or if there is only one thread.
bool is_for_one_thread(int64_t rows, int64_t n, int64_t k) {
  const double multiplies = static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k);
  return multiplies < 2 * kMultipliesPerThread || at::get_num_threads() == 1;
}

// Divides the panels among the threads, or the blocks of rows if there are fewer panels than threads.
template <class Tiles>
void run_rows(const Product<typename Tiles::Element>& p, int64_t row_begin, int64_t row_end) {
  using T = typename Tiles::Element;
  using Work = Worker<Tiles>;
  const int64_t blocks = ceil_div(row_end - row_begin, Tiles::kRows);
  std::optional<Workspace<T>> packed;
  const T* packed_a = nullptr;
  if (Tiles::must_pack(p.a, p.k)) {
    packed.emplace(blocks * Work::block_elements(p));
    packed_a = packed->get();
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      const int64_t last = std::min(row_end, row_begin + end * Tiles::kRows);
      Work(p, row_begin + begin * Tiles::kRows, last, nullptr)
          .pack_rows(packed->get() + begin * Work::block_elements(p));
    });
  }
  const int64_t panels = ceil_div(p.n, kPanelColumns);
  const auto run = [&](int64_t first_block, int64_t last_block, int64_t first_panel, int64_t last_panel) {
    const Workspace<T> space(Work::workspace_elements(p, last_panel - first_panel));
    const int64_t begin = row_begin + first_block * Tiles::kRows;
    const int64_t end = std::min(row_end, row_begin + last_block * Tiles::kRows);
    Tiles::begin();
    Work(p, begin, end, packed_a ? packed_a + first_block * Work::block_elements(p) : nullptr)
        .run(first_panel, last_panel, space.get());
    Tiles::end();
  };
  if (is_for_one_thread(row_end - row_begin, p.n, p.k)) run(0, blocks, 0, panels);
  else if (panels >= at::get_num_threads() && !p.c_transposed)
    at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) { run(0, blocks, begin, end); });
  else at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) { run(begin, end, 0, panels); });
}

// c += a·b with a transposed A, for a weight's gradient. The sums are far larger than the caches, and the
// depth (the tokens) is thousands. Each thread keeps kSumBytes of sums in its L2 cache and adds the whole
// depth to them, one part at a time. A thread packs a part of A just before use. All threads together pack B
// once.
template <class Tiles>
void add_turned(const Product<typename Tiles::Element>& p) {
  using T = typename Tiles::Element;
  using Work = Worker<Tiles>;
  const int64_t panels = ceil_div(p.n, kPanelColumns), blocks = ceil_div(p.m, Tiles::kRows);
  const Workspace<T> packed_b(panels * Work::panel_elements(p));
  T* const b = packed_b.get();
  at::parallel_for(0, panels, ceil_div(kPackedTogether, p.k * kPanelColumns),
                   [&](int64_t begin, int64_t end) {
                     Work(p, 0, p.m, nullptr).pack_panels(begin, end, b + begin * Work::panel_elements(p));
                   });
  const int64_t grain = is_for_one_thread(p.m, p.n, p.k) ? blocks : 1;
  at::parallel_for(0, blocks, grain, [&](int64_t begin_block, int64_t end_block) {
    // Groups are small, so that each read of B is used for many rows. A is packed again for each group.
    const int64_t chunk_blocks = std::min(end_block - begin_block, Tiles::kMostBlocks);
    const int64_t fit = Tiles::kSumBytes / (chunk_blocks * Tiles::kRows * kPanelColumns * 4);
    const int64_t group = ceil_div(panels, ceil_div(panels, std::clamp<int64_t>(fit, 1, panels)));
    const Workspace<T> packed_a(chunk_blocks * Tiles::kRows * Tiles::kTurnedDepth);
    T* const a = packed_a.get();
    Tiles::begin();
    for (int64_t chunk = begin_block; chunk < end_block; chunk += chunk_blocks) {
      const int64_t count = std::min(chunk_blocks, end_block - chunk);
      const int64_t row_begin = chunk * Tiles::kRows,
                    row_end = std::min(p.m, row_begin + count * Tiles::kRows);
      for (int64_t first = 0; first < panels; first += group)
        for (int64_t k = 0; k < p.k; k += Tiles::kTurnedDepth) {
          auto part = p;
          part.a = p.a.columns_from(k);
          part.k = std::min(Tiles::kTurnedDepth, p.k - k);
          Work work(part, row_begin, row_end, nullptr);
          work.pack_rows(a);
          const int64_t last = std::min(panels, first + group);
          for (int64_t i = 0; i < count; ++i)
            for (int64_t panel = first; panel < last; ++panel) {
              const int64_t row = row_begin + i * Tiles::kRows;
              work.block(row, panel, {a + i * Work::block_elements(part), 0, false}, true,
                         b + panel * Work::panel_elements(p) + k * kPanelColumns, {k, part.k, true, true},
                         nullptr,
                         panel + 1 < last ? work.upcoming(row, panel + 1)
                                          : work.upcoming(row + Tiles::kRows, first));
            }
        }
    }
    Tiles::end();
  });
}

template <class Tiles>
void multiply(const Product<typename Tiles::Element>& product) {
  const int64_t row_step =
      Tiles::must_pack(product.a, product.k) ? kPackedRows / Tiles::kRows * Tiles::kRows : product.m;
  constexpr bool sums_in_c = std::is_same_v<typename Tiles::Element, float>;
  const bool whole = !product.accumulate && (!sums_in_c || product.c_transposed);
  const int64_t depth_step = whole ? product.k : Tiles::kDepthPerPass;
  for (int64_t row = 0; row < product.m; row += row_step)
    for (int64_t depth = 0; depth < product.k; depth += depth_step) {
      auto part = product;
      part.a = product.a.columns_from(depth);
      part.b = product.b.rows_from(depth);
      part.k = std::min(depth_step, product.k - depth);
      if (depth > 0) part.accumulate = true;
      if (depth > 0) part.bias = nullptr;
      run_rows<Tiles>(part, row, std::min(product.m, row + row_step));
    }
}

// Returns x or a copy of x. The kernels need a stride of at least the row length. A view of a single row or
// column may have a smaller stride and is then copied.
at::Tensor with_unit_stride(const at::Tensor& x) {
  const bool rows = x.stride(1) == 1 && x.stride(0) >= x.size(1);
  const bool columns = x.stride(0) == 1 && x.stride(1) >= x.size(0);
  return rows || columns ? x : x.contiguous();
}

template <class T>
Factor<T> factor(const at::Tensor& x) {
  const bool rows = x.stride(1) == 1 && x.stride(0) >= x.size(1);
  return {data<T>(x), rows ? x.stride(0) : x.stride(1), !rows};
}

template <class Function>
void with_tiles(at::ScalarType type, Function&& function) {
  type == at::kFloat ? function.template operator()<Fp32Tiles>() : function.template operator()<Bf16Tiles>();
}

// Whether a is 1 to kMostRows bf16 rows, b a weight's transposed view, and the CPU has AVX512-BF16.
bool is_of_few_rows(const at::Tensor& a_RK, const at::Tensor& b_KO) {
  return a_RK.scalar_type() == at::kBFloat16 && has_avx512_bf16() && a_RK.size(0) > 0 &&
         a_RK.size(0) <= dots::FewRows::kMostRows && a_RK.stride(1) == 1 && b_KO.stride(0) == 1 &&
         b_KO.numel() > 0;
}

// Overwrites c. Each row of c is contiguous; rows may have any stride. The residual has c's strides and may
// be c itself.
void product_of_few_rows(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO,
                         const std::optional<at::Tensor>& bias_O,
                         const std::optional<at::Tensor>& residual_RO) {
  const int64_t k = a_RK.size(1), n = b_KO.size(1);
  const auto optional = [](const std::optional<at::Tensor>& x) {
    return x ? data<BFloat16Bits>(*x) : nullptr;
  };
  const dots::FewRows product{a_RK.size(0),
                              k,
                              data<BFloat16Bits>(a_RK),
                              data<BFloat16Bits>(b_KO),
                              a_RK.stride(0),
                              b_KO.stride(1),
                              mutable_data<BFloat16Bits>(c_RO),
                              c_RO.stride(0),
                              optional(bias_O),
                              optional(residual_RO)};
  constexpr int64_t kOutputs = 16;             // outputs per work item
  constexpr int64_t kWorthAThread = 64 << 10;  // weight elements per thread; reading them dominates
  at::parallel_for(0, ceil_div(n, kOutputs), std::max<int64_t>(1, kWorthAThread / (kOutputs * k)),
                   [&](int64_t begin, int64_t end) {
                     dots::multiply_few_rows(product, begin * kOutputs, std::min(n, end * kOutputs));
                   });
}

// Overwrites c. c and the residual are as in product_of_few_rows().
void product_by_tiles(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO,
                      const std::optional<at::Tensor>& bias_O, const std::optional<at::Tensor>& residual_RO) {
  const auto a = with_unit_stride(a_RK), b = with_unit_stride(b_KO);
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  with_tiles(a.scalar_type(), [&]<class Tiles>() {
    using T = typename Tiles::Element;
    Product<T> product{m, n, k, factor<T>(a), factor<T>(b), mutable_data<T>(c_RO), c_RO.stride(0)};
    if (bias_O) product.bias = data<T>(*bias_O);
    constexpr bool rounds = !std::is_same_v<T, float>;
    if (rounds && residual_RO) product.residual = data<T>(*residual_RO);
    if (m <= Tiles::kFewRows && product.b.transposed && !Tiles::must_pack(product.b.transpose(), k)) {
      std::swap(product.m, product.n);
      std::swap(product.a, product.b);
      product.a = product.a.transpose();
      product.b = product.b.transpose();
      product.c_transposed = true;
    }
    multiply<Tiles>(product);
    if (!rounds && residual_RO) c_RO.add_(*residual_RO);
  });
}

// Overwrites c (bf16). c and the residual are as in product_of_few_rows().
void product_of_fp32_copies(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO,
                            const std::optional<at::Tensor>& bias_O,
                            const std::optional<at::Tensor>& residual_RO) {
  const int64_t n = b_KO.size(1), columns = Fp32Copies::columns(b_KO.size(0));
  const int64_t blocks = ceil_div(n, columns);
  for (int64_t row = 0; row < a_RK.size(0); row += Fp32Copies::kRows) {
    const auto rows_of = [&](const at::Tensor& x) {
      return x.narrow(0, row, std::min(Fp32Copies::kRows, x.size(0) - row));
    };
    const auto a = rows_of(a_RK).to(at::kFloat);
    const auto run = [&](int64_t begin, int64_t end) {
      const at::AutoDispatchBelowAutograd guard;  // threads do not inherit it
      for (int64_t first = begin * columns; first < std::min(n, end * columns); first += columns) {
        const int64_t count = std::min(columns, n - first);
        const auto b = b_KO.narrow(1, first, count).to(at::kFloat);
        const auto sums = products_are_ours(at::kFloat) ? matrix_product_tiles(a, b) : at::mm(a, b);
        if (bias_O) sums.add_(bias_O->narrow(0, first, count));
        if (residual_RO) sums.add_(rows_of(*residual_RO).narrow(1, first, count));
        rows_of(c_RO).narrow(1, first, count).copy_(sums);
      }
    };
    if (blocks < at::get_num_threads()) run(0, blocks);  // the threads divide each product
    else at::parallel_for(0, blocks, 1, run);
  }
}

at::Tensor matrix_product_cpu(const at::Tensor& a_RK, const at::Tensor& b_KO,
                              const std::optional<at::Tensor>& bias_O,
                              const std::optional<at::Tensor>& residual_RO) {
  if (is_of_few_rows(a_RK, b_KO)) {
    auto c = at::empty({a_RK.size(0), b_KO.size(1)}, a_RK.options());
    product_of_few_rows(c, a_RK, b_KO, bias_O, residual_RO);
    return c;
  }
  if (copies_to_fp32(a_RK.scalar_type())) {
    auto c = at::empty({a_RK.size(0), b_KO.size(1)}, a_RK.options());
    product_of_fp32_copies(c, a_RK, b_KO, bias_O, residual_RO);
    return c;
  }
  return products_are_ours(a_RK.scalar_type()) ? matrix_product_tiles(a_RK, b_KO, bias_O, residual_RO)
                                               : matrix_product_reference(a_RK, b_KO, bias_O, residual_RO);
}

at::Tensor batch_invariant_product_cpu(const at::Tensor& a_RK, const at::Tensor& b_KO,
                                       const std::optional<at::Tensor>& bias_O,
                                       const std::optional<at::Tensor>& residual_RO) {
  BOUGH_CHECK(has_tiles(a_RK.scalar_type()), "batch_invariant_product: this CPU has no tile kernels for ",
              a_RK.scalar_type());
  return matrix_product_tiles(a_RK, b_KO, bias_O, residual_RO);
}

void add_matrix_product_cpu_(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO,
                             bool batch_invariant) {
  const bool rounds = c_RO.scalar_type() == at::kBFloat16;
  if (rounds && !batch_invariant && is_of_few_rows(a_RK, b_KO))
    product_of_few_rows(c_RO, a_RK, b_KO, std::nullopt, c_RO);
  else if (batch_invariant ? has_tiles(a_RK.scalar_type()) : products_are_ours(a_RK.scalar_type()))
    add_matrix_product_tiles_(c_RO, a_RK, b_KO);
  else if (!rounds && a_RK.scalar_type() != c_RO.scalar_type() && products_are_ours(c_RO.scalar_type()))
    add_matrix_product_tiles_(c_RO, a_RK.to(c_RO.scalar_type()), b_KO.to(c_RO.scalar_type()));
  else if (rounds && copies_to_fp32(a_RK.scalar_type()))
    product_of_fp32_copies(c_RO, a_RK, b_KO, std::nullopt, c_RO);
  else add_matrix_product_reference_(c_RO, a_RK, b_KO);
}
}  // namespace

bool has_tiles(at::ScalarType type) {
  return type == at::kFloat ? has_avx() : type == at::kBFloat16 && has_avx512_bf16();
}

bool add_adapter_product_(const at::Tensor& y_RO, const at::Tensor& x_RK, const Parameter& weight,
                          bool batch_invariant) {
  const at::Tensor &a_UK = weight.adapter[0].value, &b_SJ = weight.adapter[1].value;  // U: slices · rank
  const int64_t rows = x_RK.size(0), depth = x_RK.size(1), rank = b_SJ.size(1);
  const auto is_ours = batch_invariant ? has_tiles : products_are_ours;
  if (!x_RK.is_cpu() || x_RK.scalar_type() != at::kBFloat16 || y_RO.scalar_type() != at::kBFloat16 ||
      rows == 0 || rows > Bf16Tiles::kFewRows || x_RK.stride(1) != 1 || !is_ours(at::kBFloat16))
    return false;
  const int64_t inner = a_UK.size(0), outputs = b_SJ.size(0), block = Bf16Tiles::kRows;
  const bool by_dots = !batch_invariant && rows <= dots::FewRows::kMostRows;
  const auto scale = static_cast<float>(weight.adapter_scale);
  const Workspace<BFloat16Bits> space(rows * inner);
  BFloat16Bits* const u = space.get();
  // c = (or += if `adds`) left · weight[begin, end)ᵀ, in columns [begin, end) of c.
  struct Term {
    const BFloat16Bits* left;
    int64_t left_stride;
    const BFloat16Bits* weight;
    int64_t k;
    BFloat16Bits* c;
    int64_t c_stride;
    bool adds;
  };
  const auto run = [&](const Term& t, int64_t begin, int64_t end) {
    if (by_dots)
      return dots::multiply_few_rows(
          {rows, t.k, t.left, t.weight, t.left_stride, t.k, t.c, t.c_stride, nullptr, t.adds ? t.c : nullptr},
          begin, end);
    Product<BFloat16Bits> product{end - begin,
                                  rows,
                                  t.k,
                                  {t.weight + begin * t.k, t.k, false},
                                  {t.left, t.left_stride, true},
                                  t.c + begin,
                                  t.c_stride,
                                  /*c_transposed=*/true};
    if (t.adds) product.residual = t.c + begin;
    multiply<Bf16Tiles>(product);
  };
  const auto grain = [&](int64_t k) {  // in blocks; each multiplies at least 16 columns of xᵀ
    return ceil_div(static_cast<int64_t>(kMultipliesPerThread), std::max<int64_t>(rows, 16) * k * block);
  };
  const Term down{data<BFloat16Bits>(x_RK), x_RK.stride(0), data<BFloat16Bits>(a_UK), depth, u, inner, false};
  at::parallel_for(0, ceil_div(inner, block), grain(depth), [&](int64_t begin, int64_t end) {
    begin *= block;
    end = std::min(inner, end * block);
    run(down, begin, end);
    for (int64_t r = 0; r < rows && scale != 1; ++r)
      for (int64_t j = r * inner + begin; j < r * inner + end; ++j)
        simd::narrow(u[j], simd::widen(u[j]) * scale);
  });
  at::parallel_for(0, ceil_div(outputs, block), grain(rank), [&](int64_t begin, int64_t end) {
    begin *= block;
    end = std::min(outputs, end * block);
    int64_t first = 0;  // row of b of the slice
    for (size_t s = 0; s < weight.adapter_slices.size(); ++s) {
      const auto [column, last] = weight.adapter_slices[s];
      const int64_t count = last - column;
      const int64_t from = std::clamp<int64_t>(begin - first, 0, count),
                    to = std::clamp<int64_t>(end - first, 0, count);
      if (from < to)
        run({u + static_cast<int64_t>(s) * rank, inner, data<BFloat16Bits>(b_SJ) + first * rank, rank,
             mutable_data<BFloat16Bits>(y_RO) + column, y_RO.stride(0), true},
            from, to);
      first += count;
    }
  });
  return true;
}

// The bf16 functions choose between AMX and dot products at each call, once per block.
namespace bf16 {
void begin_tiles() {
  if (has_amx()) amx::begin_tiles();
}
void end_tiles() {
  if (has_amx()) amx::end_tiles();
}
void multiply_block(float* c, int64_t c_stride, bool accumulate, const BFloat16Bits* a, int64_t a_stride,
                    bool packed, const BFloat16Bits* panel, int64_t columns, int64_t depth,
                    const Upcoming& written, const Upcoming& read) {
  (has_amx() ? amx::multiply_block : dots::multiply_block)(c, c_stride, accumulate, a, a_stride, packed,
                                                           panel, columns, depth, written, read);
}
void add_products(float* c, int64_t c_stride, const BFloat16Bits* const* a, const BFloat16Bits* const* b,
                  int64_t count, int64_t rows) {
  (has_amx() ? amx::add_products : dots::add_products)(c, c_stride, a, b, count, rows);
}
}  // namespace bf16

// Without AVX512-BF16, libtorch's bf16 products take five times as long as fp32. Without AVX-512 they are
// plain loops, two hundred times slower.
bool copies_to_fp32(at::ScalarType type) {
  return type == at::kBFloat16 && !has_fast_bf16();
}

bool products_are_ours(at::ScalarType type) {
  // MKL (libtorch's fp32 products) runs at full rate on Intel CPUs and at half rate on others.
  static const bool fp32 = !cpu_features().intel;
  return has_tiles(type) && !copies_to_fp32(type) && (type != at::kFloat || fp32);
}

at::Tensor matrix_product_tiles(const at::Tensor& a_RK, const at::Tensor& b_KO,
                                const std::optional<at::Tensor>& bias_O,
                                const std::optional<at::Tensor>& residual_RO) {
  if (a_RK.numel() == 0 || b_KO.numel() == 0)
    return matrix_product_reference(a_RK, b_KO, bias_O, residual_RO);
  auto c = at::empty({a_RK.size(0), b_KO.size(1)}, a_RK.options());
  product_by_tiles(c, a_RK, b_KO, bias_O, residual_RO);
  return c;
}

void add_matrix_product_tiles_(const at::Tensor& c_RO, const at::Tensor& a_RK, const at::Tensor& b_KO) {
  if (a_RK.numel() == 0 || b_KO.numel() == 0) return;
  if (c_RO.scalar_type() == at::kBFloat16) return product_by_tiles(c_RO, a_RK, b_KO, std::nullopt, c_RO);
  const auto a = with_unit_stride(a_RK), b = with_unit_stride(b_KO);
  with_tiles(a.scalar_type(), [&]<class Tiles>() {
    using T = typename Tiles::Element;
    Product<T> product{a.size(0),     b.size(1),    a.size(1),
                       factor<T>(a),  factor<T>(b), mutable_data<float>(c_RO),
                       c_RO.stride(0)};
    product.accumulate = true;
    if constexpr (std::is_same_v<Tiles, Bf16Tiles>) {
      if (product.a.transposed) return add_turned<Tiles>(product);
    }
    multiply<Tiles>(product);
  });
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("matrix_product", TORCH_FN(bough::matrix_product_cpu));
  m.impl("batch_invariant_product", TORCH_FN(bough::batch_invariant_product_cpu));
  m.impl("add_matrix_product_", TORCH_FN(bough::add_matrix_product_cpu_));
}
