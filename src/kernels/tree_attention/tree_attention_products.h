// Matrix products of bf16 attention units (tree_attention_softmax_bf16.h), several units per call, by AMX
// tiles or by AVX-512 dot products (bf16_products.h). The caller must have called bf16::begin_tiles().
// Factors are packed as in matrix_product_tiles.h.
//
// With AMX, values, and also keys if depth is 64, are loaded with a streaming hint, so that scores and sums
// stay in the L1 cache. Tile stores that miss this cache take as long as the products.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

namespace amx {
// Computes scores k·q of `count` units. k[count]: left factors [32 keys, depth]. q: right factor [depth, 32
// queries]. scores: for each unit [2][32 keys][16 queries], where index 0 has the first 16 queries and index
// 1 the last 16. Units are kScoreStride apart.
void multiply_keys(float* scores, const BFloat16Bits* const* k, int64_t count, const BFloat16Bits* q,
                   int64_t depth);
// Computes o[width][32 queries] = v·p, or += if `accumulate`. v[count]: left factors [width, 32 keys]. p:
// `count` units of probabilities as softmax_units() writes them.
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
