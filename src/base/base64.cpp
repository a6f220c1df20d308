#include "base/base64.h"

#include <array>
#include <cstdint>

namespace bough {

namespace {

constexpr uint8_t kNoDigit = 64;

constexpr std::array<uint8_t, 256> kDigitOf = [] {
  std::array<uint8_t, 256> digits{};
  digits.fill(kNoDigit);
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < kDigits.size(); ++i)
    digits[static_cast<unsigned char>(kDigits[i])] = static_cast<uint8_t>(i);
  return digits;
}();

}  // namespace

std::optional<std::string> base64_decode(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  size_t padding = 0;
  while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') ++padding;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  uint32_t group = 0;  // six bits a digit
  for (size_t i = 0; i < text.size(); ++i) {
    const bool is_padding = i >= text.size() - padding;
    const uint8_t digit = is_padding ? 0 : kDigitOf[static_cast<unsigned char>(text[i])];
    if (digit == kNoDigit) return std::nullopt;
    group = group << 6 | digit;
    if (i % 4 != 3) continue;
    for (const int shift : {16, 8, 0}) bytes.push_back(static_cast<char>(group >> shift & 0xff));
    group = 0;
  }
  bytes.resize(bytes.size() - padding);
  return bytes;
}

}  // namespace bough
