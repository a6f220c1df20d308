// Matrix products of bf16 attention units (tree_attention_softmax_bf16.h), several units per call, by AMX
// tiles or by AVX-512 dot products (bf16_products.h). Tiles must be enabled (bf16::begin_tiles). Operands are
// packed as in matrix_product_tiles.h.
//
// AMX loads left operands with a streaming hint (keys only if depth is 64), so that scores and sums stay in
// the L1 cache. Tile stores that miss this cache cost as much as the products.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

namespace amx {
// Computes scores k·q of `count` units. k[count]: left operands [32 keys, depth]. q: right operand [depth, 32
// queries]. scores: [count][2][32 keys][16 queries], each half of the queries separate, units kScoreStride
// apart.
void multiply_keys(float* scores, const BFloat16Bits* const* k, int64_t count, const BFloat16Bits* q,
                   int64_t depth);
// Computes o[width][32 queries] = v·p, or += if `accumulate`. v[count]: left operands [width, 32 keys]. p:
// `count` units as softmax_units leaves them.
void add_values(float* o, bool accumulate, const BFloat16Bits* const* v, const float* p, int64_t count,
                int64_t width);
}  // namespace amx

namespace dots {
void multiply_keys(float* scores, const BFloat16Bits* const* k, int64_t count, const BFloat16Bits* q,
                   int64_t depth);
void add_values(float* o, bool accumulate, const BFloat16Bits* const* v, const float* p, int64_t count,
                int64_t width);
}  // namespace dots

}  // namespace bough
