// Visibility in attention units (tree_attention_units.h). Has only plain types, because files that use
// intrinsics include this header (common/isa.h).
#pragma once

#include <cstdint>

namespace bough {

constexpr int64_t kUnit = 32;  // a unit is 32 queries by 32 keys
constexpr int64_t kUnitElements = kUnit * kUnit;
constexpr int64_t kLanes = 16;

// The pair (query i, key j) of a unit is visible iff first_key + j <= first_query + i < end[j]. Queries and
// keys of the pass are numbered from 0; stack keys are negative. end is nullptr if all pairs are visible.
struct UnitMask {
  const int32_t* end = nullptr;
  int32_t first_query = 0, first_key = 0;
};

}  // namespace bough
