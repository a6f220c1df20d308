// The cost of the embedding, from shapes alone. No torch.
#pragma once

#include <cstdint>

namespace bough {

// Elements that forward reads and writes per token.
constexpr int64_t embedding_elements(int64_t width) {
  return 2 * width;
}

}  // namespace bough
