#include "cost/attention_work.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace bough {

namespace {

constexpr int64_t kUnit = 32;
constexpr int64_t kFusedTile = 128;
using Kind = DeviceProfile::Attention;

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t padded(int64_t rows) {
  return divide_up(rows, kUnit) * kUnit;
}

// Keys of the units that the queries before `end` see. Pieces begin anywhere in a unit, so that their queries see
// one unit more than those of a path.
double unit_keys(const AttentionPass& pass, int64_t end) {
  const auto path = static_cast<double>(padded(end));
  const double own =
      pass.pieces > 1 ? std::min(path, pass.own_keys + 1.5 * static_cast<double>(kUnit)) : path;
  return own + (pass.stack_keys > 0 ? static_cast<double>(padded(std::llround(pass.stack_keys))) : 0);
}

// A group's queries (forward) or keys (backward) are dealt out in turn to as many shares as make all groups' a multiple
// of the threads, while there are units for them.
double work_in_units(int64_t threads, const AttentionPass& pass) {
  double work = 0;
  for (int64_t begin = 0; begin < pass.queries; begin += kUnit)
    work += kUnit * unit_keys(pass, std::min(pass.queries, begin + kUnit));
  const int64_t groups = pass.num_kv_heads;
  const int64_t tasks = groups * attention_shares(threads, groups, divide_up(pass.queries, kUnit));
  return work * static_cast<double>(divide_up(tasks, threads) * threads) / static_cast<double>(tasks);
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

double attention_work(Kind kind, int64_t threads, const AttentionPass& pass) {
  if (pass.queries == 0) return 0;
  if (in_units(kind)) return work_in_units(threads, pass);
  const auto queries = static_cast<double>(pass.queries);
  if (kind == Kind::kReference) return queries * (pass.stack_keys + queries);
  const double straddling = kFusedTile * (1 - 1 / static_cast<double>(pass.pieces));
  return queries * (pass.stack_keys + pass.own_keys + kFusedTile / 2 + straddling);
}

}  // namespace bough
