#pragma once

#include <string>

namespace bough {

// A message of a conversation; `role` is system, user, assistant or tool.
struct Message {
  std::string role;
  std::string content;

  bool operator==(const Message&) const = default;
};

}  // namespace bough
