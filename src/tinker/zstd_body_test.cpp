#include "tinker/zstd_body.h"

#include <gtest/gtest.h>
#include <zstd.h>

#include "serve/api.h"

namespace bough {
namespace {

std::string compressed(const std::string& text) {
  std::string bytes(ZSTD_compressBound(text.size()), '\0');
  bytes.resize(ZSTD_compress(bytes.data(), bytes.size(), text.data(), text.size(), 3));
  return bytes;
}

int status_of(const std::string& body, int64_t most) {
  try {
    decompress_body(body, most);
    return 200;
  } catch (const ApiError& error) {
    return error.status;
  }
}

TEST(ZstdBody, IsDecompressedUpToItsLimit) {
  std::string text;
  for (int i = 0; i < 40'000; ++i) text += std::to_string(i * 7919 % 1000);
  const auto length = static_cast<int64_t>(text.size());
  EXPECT_EQ(decompress_body(compressed(text), length), text);
  EXPECT_EQ(decompress_body(compressed(text) + compressed("more"), length + 4), text + "more");
  EXPECT_EQ(decompress_body(compressed(""), 10), "");
  EXPECT_EQ(status_of(compressed(text), length - 1), 413);
  EXPECT_EQ(status_of(compressed(text) + compressed("more"), length + 3), 413);
}

TEST(ZstdBody, ABombEndsAtTheLimit) {
  const std::string bomb = compressed(std::string(200 << 20, 'x'));
  EXPECT_LT(bomb.size(), 40'000U);
  EXPECT_EQ(status_of(bomb, 1 << 20), 413);
}

TEST(ZstdBody, IsRefusedIfDamagedOrCutOff) {
  const std::string whole = compressed("a text that is long enough for a frame, a text that is long enough");
  for (size_t length = 0; length < whole.size(); ++length)
    EXPECT_EQ(status_of(whole.substr(0, length), 1000), 400);
  EXPECT_EQ(status_of("no zstd at all", 1000), 400);
  EXPECT_EQ(status_of(whole + "x", 1000), 400);
}

}  // namespace
}  // namespace bough
