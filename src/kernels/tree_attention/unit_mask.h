// Visibility in attention units. Plain types: files of intrinsics include it (common/isa.h).
#pragma once

#include <cstdint>

namespace bough {

constexpr int64_t kUnit = 32;  // queries, or keys, of a unit
constexpr int64_t kUnitElements = kUnit * kUnit;
constexpr int64_t kLanes = 16;

// Entry (query i, key j) of a unit is visible iff first_key + j <= first_query + i < end[j]. Keys are
// numbered like the queries; stack keys are negative. end is nullptr if all entries are visible.
struct UnitMask {
  const int32_t* end = nullptr;
  int32_t first_query = 0, first_key = 0;
};

}  // namespace bough
