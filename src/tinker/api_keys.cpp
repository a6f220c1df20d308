#include "tinker/api_keys.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "net/secrets.h"

namespace bough {

namespace {

constexpr size_t kLongestTenant = 64;

bool is_tenant(const std::string& name) {
  return name.size() <= kLongestTenant && std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
         });
}

}  // namespace

ApiKeys ApiKeys::load(const std::string& file) {
  if (!file.empty()) return parse(read_file(file), "api_key_file " + file);
  const char* const given = std::getenv("BOUGH_API_KEY");
  return given && *given ? parse(given, "BOUGH_API_KEY") : ApiKeys();
}

ApiKeys ApiKeys::parse(const std::string& text, const std::string& where) {
  ApiKeys keys;
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::string place = str(where, ", line ", ++number, ": ");
    std::istringstream words(line);
    std::vector<std::string> parts;
    for (std::string word; words >> word;) parts.push_back(word);
    if (parts.empty() || parts.front().front() == '#') continue;
    if (parts.size() > 2)
      throw UserError(str(place, "got ", parts.size(), " words, expected KEY or NAME KEY"));
    const std::string key = parts.back(), tenant = parts.size() == 2 ? parts.front() : "";
    if (!key.starts_with("tml-"))
      throw UserError(place + "the key must begin with tml-: Tinker's SDK refuses others");
    if (!is_tenant(tenant))
      throw UserError(str(place, "got the name ", quoted(tenant, 80),
                          ", expected letters, digits, '-', '_' and '.', at most ", kLongestTenant));
    for (const auto& [known, owner] : keys.keys_) {
      if (known == key) throw UserError(place + "the key is there twice; make another one");
      if (owner.empty() && tenant.empty())
        throw UserError(place + "a second key without a name; write NAME KEY, with a name for each tenant");
    }
    keys.keys_.emplace_back(key, tenant);
  }
  if (keys.empty()) throw UserError(where + " has no key; write one a line, as KEY or NAME KEY");
  return keys;
}

std::optional<std::string> ApiKeys::tenant(const std::string& key) const {
  std::optional<std::string> found;
  for (const auto& [known, tenant] : keys_)
    if (same_key(key, known)) found = tenant;
  return found;
}

}  // namespace bough
