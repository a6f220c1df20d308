#include "kernels/matrix_product/dot_products.h"
#include "kernels/tree_attention/tree_attention_products.h"
#include "kernels/tree_attention/tree_attention_softmax_bf16.h"

namespace bough::dots {

namespace {
using bf16::kScoreStride;
constexpr int64_t kHalf = kUnitElements / 2;  // scores of 16 queries

const char* bytes(const void* factor) {
  return static_cast<const char*>(factor);
}
}  // namespace

void multiply_keys(float* scores, const BFloat16Bits* const* k, int64_t count, const BFloat16Bits* q,
                   int64_t depth) {
  for (int64_t u = 0; u < count; ++u)
    dot_block({scores + u * kScoreStride, kLanes, kHalf, false}, {}, depth / kUnit,
              [&](int64_t i, const char*& a, const char*& b) {
                a = bytes(k[u] + i * kUnitElements);
                b = bytes(q + i * kUnitElements);
              });
}

void add_values(float* o, bool accumulate, const BFloat16Bits* const* v, const float* p, int64_t count,
                int64_t width) {
  const Layout every_second_line{kTileStride, 2 * kTileStride, kHalf * int64_t{sizeof(float)}};
  for (int64_t d = 0; d < width; d += kUnit)
    dot_block({o + d * kUnit, kUnit, kLanes, accumulate}, every_second_line, count,
              [&](int64_t i, const char*& a, const char*& b) {
                a = bytes(v[i] + d * kUnit);
                b = bytes(p + i * kScoreStride);
              });
}

}  // namespace bough::dots
