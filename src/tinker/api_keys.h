// The API keys of a training service. Each key belongs to a tenant, who sees and addresses only its own
// sessions, models and checkpoints. Immutable, so threads may share it.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bough {

class ApiKeys {
 public:
  // No key: only programs on this machine may send requests, all as one tenant.
  ApiKeys() = default;
  // Reads `file`, or if that is empty the environment variable BOUGH_API_KEY. Throws UserError if a key or a
  // name is malformed.
  static ApiKeys load(const std::string& file);
  // Each line is KEY or NAME KEY; lines that are empty or begin with '#' are skipped. Keys of one name are
  // keys of one tenant. The tenant of a key without a name is "". `where` is for messages.
  static ApiKeys parse(const std::string& text, const std::string& where);

  bool empty() const { return keys_.empty(); }
  // nullopt if the key is none of these. The time that a comparison takes tells nothing about the keys.
  std::optional<std::string> tenant(const std::string& key) const;

 private:
  std::vector<std::pair<std::string, std::string>> keys_;  // key, tenant
};

}  // namespace bough
