#include "kernels/tree_attention/tree_attention_cost.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace bough {

namespace {

constexpr int64_t kFusedTile = 128;
using Kind = DeviceKernels::Attention;

int64_t padded(int64_t rows) {
  return rounded_up(rows, kUnit);
}

// Returns the keys, in whole units, that a block of queries up to `end` sees. With several pieces, a piece
// may begin inside a unit, so its queries see one unit more than the queries of a single path.
double unit_keys(const AttentionPass& pass, int64_t end) {
  const auto path = static_cast<double>(padded(end));
  const double own =
      pass.pieces > 1 ? std::min(path, pass.own_keys + 1.5 * static_cast<double>(kUnit)) : path;
  return own + (pass.stack_keys > 0 ? static_cast<double>(padded(std::llround(pass.stack_keys))) : 0);
}

// Returns the (query, key) pairs in units, times the imbalance of the threads. The tasks of threads are
// shares of a key/value head's queries (forward) or keys (backward).
double work_in_units(int64_t threads, const AttentionPass& pass) {
  double work = 0;
  for (int64_t begin = 0; begin < pass.queries; begin += kUnit)
    work += kUnit * unit_keys(pass, std::min(pass.queries, begin + kUnit));
  const int64_t groups = pass.num_kv_heads;
  const int64_t tasks = groups * attention_shares(threads, groups, ceil_div(pass.queries, kUnit));
  return work * static_cast<double>(ceil_div(tasks, threads) * threads) / static_cast<double>(tasks);
}

bool in_units(Kind kind) {
  return kind == Kind::kTiles || kind == Kind::kBf16Tiles;
}

}  // namespace

int64_t attention_shares(int64_t threads, int64_t num_kv_heads, int64_t most) {
  return std::clamp<int64_t>(threads / std::gcd(threads, num_kv_heads), 1, std::max<int64_t>(1, most));
}

int64_t attention_rows(Kind kind, int64_t queries) {
  return in_units(kind) ? padded(queries) : queries;
}

double attention_work(const DeviceKernels& kernels, const AttentionPass& pass) {
  if (pass.queries == 0) return 0;
  if (in_units(kernels.attention)) return work_in_units(kernels.threads, pass);
  const auto queries = static_cast<double>(pass.queries);
  if (kernels.by_reference()) return queries * (pass.stack_keys + queries);
  const double straddling = kFusedTile * (1 - 1 / static_cast<double>(pass.pieces));
  return queries * (pass.stack_keys + pass.own_keys + kFusedTile / 2 + straddling);
}

namespace {

// Backward holds q and d_o in kQueryLayouts layouts, kQueryScalars scalars per query, and for each share one
// sum of d_q. Forward holds for each thread the repacked keys and values of one key/value head. All buffers
// have head_dim padded to whole units.
int64_t bytes_in_units(const DeviceKernels& kernels, const ElementSizes& sizes, const AttentionHeads& heads,
                       int64_t tokens, int64_t stack_rows) {
  const bool bf16 = kernels.has_bf16_tiles();
  const int64_t factor = bf16 ? sizes.element : sizes.accumulator;
  const int64_t width = padded(heads.head_dim), row = heads.num_heads * width;
  const int64_t units = ceil_div(stack_rows, kUnit) + ceil_div(tokens, kUnit);
  const int64_t batches = ceil_div(units, bf16 ? kBf16BackwardUnits : kFp32BackwardUnits);
  const int64_t shares = attention_shares(kernels.threads, heads.num_kv_heads, batches);
  const int64_t backward =
      padded(tokens) *
      (kQueryLayouts * row * factor + (shares * row + kQueryScalars * heads.num_heads) * sizes.accumulator);
  return std::max(backward, kernels.threads * units * kUnit * 2 * width * factor);
}

// The reference holds five score matrices at once, and keys and values copied for every query head.
int64_t reference_bytes(const ElementSizes& sizes, const AttentionHeads& heads, int64_t tokens,
                        int64_t stack_rows) {
  const int64_t query = heads.num_heads * heads.head_dim, key = heads.num_kv_heads * heads.head_dim;
  const int64_t keys = stack_rows + tokens;
  return (5 * heads.num_heads * tokens * keys + (2 * query + 4 * key) * keys + 3 * query * tokens) *
         sizes.accumulator;
}

// The memory of one run (tree_attention_segments.h): the gathered keys and values, their gradients per query
// head and then per key/value head, the gradients that are added to the stack, and the fp32 sums of d_q.
int64_t fused_bytes(const ElementSizes& sizes, const AttentionHeads& heads, int64_t tokens,
                    int64_t stack_rows) {
  const int64_t query = heads.num_heads * heads.head_dim, key = heads.num_kv_heads * heads.head_dim;
  const int64_t keys = stack_rows + tokens;
  return tokens * query * sizes.accumulator + keys * 2 * (query + 2 * key) * sizes.element +
         stack_rows * 2 * key * sizes.accumulator;
}

}  // namespace

int64_t tree_attention_bytes(const DeviceKernels& kernels, const ElementSizes& sizes,
                             const AttentionHeads& heads, int64_t tokens, int64_t stack_rows) {
  switch (kernels.attention) {
    case Kind::kTiles:
    case Kind::kBf16Tiles: return bytes_in_units(kernels, sizes, heads, tokens, stack_rows);
    case Kind::kReference:
    case Kind::kReferenceOnGpu: return reference_bytes(sizes, heads, tokens, stack_rows);
    case Kind::kFused: return fused_bytes(sizes, heads, tokens, stack_rows);
  }
  return 0;
}

}  // namespace bough
