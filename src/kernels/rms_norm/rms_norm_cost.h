// The cost of RMSNorm, from shapes alone. No torch.
#pragma once

#include <cstdint>

namespace bough {

// Elements that forward reads and writes per row.
constexpr int64_t rms_norm_elements(int64_t width) {
  return 2 * width;
}

}  // namespace bough
