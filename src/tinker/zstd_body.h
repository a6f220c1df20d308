// Request bodies with Content-Encoding: zstd.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace bough {

// The content of a zstd body. Throws ApiError 413 if it is longer than `most` bytes, before it takes more
// memory, and 400 if the body is damaged or cut off.
std::string decompress_body(std::string_view compressed, int64_t most);

}  // namespace bough
