#include "serve/access.h"

#include <sys/random.h>

#include "serve/api.h"

namespace bough {

std::string given_key(const HttpRequest& request) {
  std::string given = request.header("authorization");
  if (given.size() > 7 && (given.starts_with("Bearer ") || given.starts_with("bearer ")))
    return given.substr(7);
  return request.header("x-api-key");
}

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

void check_local(const HttpRequest& request) {
  if (!is_for_this_machine(request))
    throw ApiError(403,
                   "without a key this server answers only programs on its own machine (headers Host and "
                   "Origin); start it with a key: BOUGH_API_KEY or api_key_file");
}

}  // namespace bough
