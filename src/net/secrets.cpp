#include "net/secrets.h"

#include <sys/random.h>

#include "base/error.h"

namespace bough {

std::string random_hex(size_t bytes) {
  std::string random(bytes, '\0'), text;
  BOUGH_CHECK(getrandom(random.data(), bytes, 0) == static_cast<ssize_t>(bytes),
              "the system gives no random bytes");
  for (const char each : random) {
    const auto byte = static_cast<unsigned char>(each);
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

bool same_key(const std::string& given, const std::string& key) {
  unsigned char difference = given.size() != key.size();
  for (size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned char>(given[i] ^ key[i % key.size()]);
  return difference == 0;
}

}  // namespace bough
