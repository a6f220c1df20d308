// Added tokens: pieces of text that become one token before any other rule, such as <|im_end|>.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace bough {

// One entry of `added_tokens` in tokenizer.json.
struct AddedToken {
  std::string content;
  int32_t id = -1;
  bool special = false;      // left out of decoded text when asked
  bool normalized = false;   // looked for after normalization, by its normalized content
  bool single_word = false;  // not between word characters
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and after it
};

// Finds tokens in a text: leftmost first, of those that begin there the longest.
class AddedTokenFinder {
 public:
  // `pattern`, not the content, is searched for; it must not be empty or repeat.
  void add(std::string pattern, const AddedToken& token);
  bool empty() const { return num_tokens_ == 0; }

  // Calls `between` with the stretches of `text` without a token and `found` with each token, from left to
  // right. Views live as long as `text`, which must be valid UTF-8. Thread-safe.
  void split(std::string_view text, const std::function<void(std::string_view)>& between,
             const std::function<void(const AddedToken&)>& found) const;

 private:
  struct Node {
    std::unordered_map<char, std::unique_ptr<Node>> children;
    std::unique_ptr<AddedToken> token;
  };
  // The longest token at text[position], and how long its pattern is.
  const AddedToken* find_at(std::string_view text, size_t position, size_t& length) const;

  Node root_;
  bool begins_[256] = {};  // first bytes of the patterns: most positions are passed over by this alone
  size_t num_tokens_ = 0;
};

}  // namespace bough
