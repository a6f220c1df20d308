#include "tree/attention_work.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace bough {

namespace {

constexpr int64_t kTile = 128;
constexpr int64_t kUnit = 32;
using Kind = DeviceProfile::Attention;

int64_t tile_of(Kind kind) {
  return kind == Kind::kAmxTiles ? kUnit : kTile;
}

int64_t padded(Kind kind, int64_t rows) {
  if (kind == Kind::kAmxTiles) return (rows + kUnit - 1) / kUnit * kUnit;
  const int64_t rest = rows % kTile;
  return rows - rest + (rest == 0 ? 0 : rest <= 32 ? 32 : rest <= 64 ? 64 : kTile);
}

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Keys of the tiles that the queries before `end` see. Pieces begin anywhere in a tile, so that their queries see
// one tile more than those of a path.
double tile_keys(Kind kind, const AttentionPass& pass, int64_t end) {
  const auto path = static_cast<double>(padded(kind, end));
  const double own =
      pass.pieces > 1 ? std::min(path, pass.own_keys + 1.5 * static_cast<double>(tile_of(kind))) : path;
  return own + (pass.stack_keys > 0 ? static_cast<double>(padded(kind, std::llround(pass.stack_keys))) : 0);
}

// A group's queries (forward) or keys (backward) are dealt out in turn to as many shares as make all groups' a multiple
// of the threads, while there are units for them.
double amx_units(int64_t threads, const AttentionPass& pass) {
  double work = 0;
  for (int64_t begin = 0; begin < pass.queries; begin += kUnit)
    work += kUnit * tile_keys(Kind::kAmxTiles, pass, std::min(pass.queries, begin + kUnit));
  const int64_t groups = pass.num_kv_heads;
  const int64_t shares = amx_attention_shares(threads, groups, divide_up(pass.queries, kUnit));
  const int64_t tasks = groups * shares;
  return work * static_cast<double>(divide_up(tasks, threads) * threads) / static_cast<double>(tasks);
}

// Tasks are tiles of queries times groups, tiles first, a contiguous share for each thread.
double forward_tiles(Kind kind, int64_t threads, const AttentionPass& pass) {
  const int64_t groups = pass.num_kv_heads;
  const int64_t tile = pass.queries * groups >= kTile * threads ? kTile : kTile / 4;
  const int64_t tasks = divide_up(pass.queries, tile) * groups;
  const int64_t share = divide_up(tasks, threads);
  double busiest = 0;
  for (int64_t begin = 0; begin < tasks; begin += share) {
    double work = 0;
    const int64_t end = std::min(tasks, begin + share);
    for (int64_t i = begin / groups; i * groups < end; ++i) {
      const int64_t last = std::min(pass.queries, (i + 1) * tile);
      const int64_t count = std::min(end, (i + 1) * groups) - std::max(begin, i * groups);
      work += static_cast<double>(count * padded(kind, last - i * tile)) * tile_keys(kind, pass, last);
    }
    busiest = std::max(busiest, work);
  }
  return busiest * static_cast<double>(threads) / static_cast<double>(groups);
}

// Tasks are shares of a group's keys, as many as there are threads for.
double backward_tiles(Kind kind, int64_t threads, const AttentionPass& pass) {
  double work = 0;
  for (int64_t begin = 0; begin < pass.queries; begin += kTile) {
    const int64_t end = std::min(pass.queries, begin + kTile);
    work += static_cast<double>(padded(kind, end - begin)) * tile_keys(kind, pass, end);
  }
  const auto keys = static_cast<int64_t>(pass.stack_keys) + pass.queries;
  const int64_t shares =
      std::clamp<int64_t>(divide_up(threads, pass.num_kv_heads), 1, divide_up(keys, kTile));
  const int64_t tasks = shares * pass.num_kv_heads;
  return work * static_cast<double>(divide_up(tasks, threads) * threads) / static_cast<double>(tasks);
}

}  // namespace

int64_t amx_attention_shares(int64_t threads, int64_t num_kv_heads, int64_t most) {
  return std::clamp<int64_t>(threads / std::gcd(threads, num_kv_heads), 1, std::max<int64_t>(1, most));
}

int64_t attention_rows(Kind kind, int64_t queries) {
  return kind == Kind::kTiles || kind == Kind::kAmxTiles ? padded(kind, queries) : queries;
}

double attention_work(Kind kind, int64_t threads, const AttentionPass& pass, bool backward) {
  if (pass.queries == 0) return 0;
  const auto queries = static_cast<double>(pass.queries);
  switch (kind) {
    case Kind::kAmxTiles: return amx_units(threads, pass);
    case Kind::kTiles:
      return backward ? backward_tiles(kind, threads, pass) : forward_tiles(kind, threads, pass);
    case Kind::kReference: return queries * (pass.stack_keys + queries);
    case Kind::kFused: break;
  }
  const double straddling = kTile * (1 - 1 / static_cast<double>(pass.pieces));
  return queries * (pass.stack_keys + pass.own_keys + kTile / 2 + straddling);
}

}  // namespace bough
