#pragma once

#include <cstdint>

namespace bough {

// Bytes a second of reading so many bytes again and again with all threads, measured now: of memory, or of the cache
// they fit in.
double read_rate(int64_t bytes);

}  // namespace bough
