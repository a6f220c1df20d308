// Finds stop strings in a response that arrives token by token, across token borders.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace bough {

class StopMatcher {
 public:
  // `stops`, none of them empty, must outlive this object.
  explicit StopMatcher(const std::vector<std::string>* stops) : stops_(stops) {
    for (const std::string& stop : *stops) longest_ = std::max(longest_, stop.size());
  }

  // Appends a token's bytes. Returns true if they complete a stop string.
  bool push(std::string_view bytes) {
    const size_t old_size = tail_.size();
    tail_ += bytes;
    bool found = false;
    for (const std::string& stop : *stops_) {  // only matches that end inside `bytes`
      const size_t from = old_size + 1 > stop.size() ? old_size + 1 - stop.size() : 0;
      found = found || tail_.find(stop, from) != std::string::npos;
    }
    const size_t keep = longest_ > 0 ? longest_ - 1 : 0;
    if (tail_.size() > keep) tail_.erase(0, tail_.size() - keep);
    return found;
  }

 private:
  const std::vector<std::string>* stops_;
  size_t longest_ = 0;
  std::string tail_;  // the last bytes, one fewer than the longest stop string
};

}  // namespace bough
