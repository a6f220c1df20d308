#include "tinker/zstd_body.h"

#include <zstd.h>

#include <algorithm>
#include <memory>

#include "base/error.h"
#include "serve/api.h"

namespace bough {

std::string decompress_body(std::string_view compressed, int64_t most) {
  struct FreeStream {
    void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
  };
  const std::unique_ptr<ZSTD_DStream, FreeStream> stream(ZSTD_createDStream());
  BOUGH_CHECK(stream != nullptr, "ZSTD_createDStream failed");
  const auto longest = static_cast<size_t>(most) + 1;  // one byte more shows that the body is too long
  std::string content;
  ZSTD_inBuffer in{compressed.data(), compressed.size(), 0};
  size_t left = 1, filled = 0;
  while (in.pos < in.size || left > 0) {
    content.resize(std::min(longest, std::max({2 * filled, 4 * compressed.size(), size_t{64} << 10})));
    ZSTD_outBuffer out{content.data(), content.size(), filled};
    const size_t read = in.pos;
    left = ZSTD_decompressStream(stream.get(), &out, &in);
    if (ZSTD_isError(left)) throw ApiError(400, str("the zstd body is damaged: ", ZSTD_getErrorName(left)));
    if (out.pos > static_cast<size_t>(most))
      throw ApiError(413, str("the body is longer than ", most, " bytes when decompressed (http.max_body)"));
    if (left > 0 && in.pos == in.size && read == in.pos && out.pos == filled)
      throw ApiError(400, str("the zstd body is cut off after ", in.size, " bytes"));
    filled = out.pos;
  }
  content.resize(filled);
  return content;
}

}  // namespace bough
