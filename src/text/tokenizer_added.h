// Added tokens: pieces of text that become one token before any other rule applies, such as <|im_end|>.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace bough {

// One entry of `added_tokens` in tokenizer.json, or of another file that adds tokens (special_tokens.h).
struct AddedToken {
  std::string content;
  int32_t id = -1;
  bool special = false;      // skip_special_tokens leaves it out of decoded text
  bool normalized = false;   // the normalized content is searched for in the normalized text
  bool single_word = false;  // not matched next to a word character
  bool lstrip = false;       // includes the white space before it
  bool rstrip = false;       // includes the white space after it
  bool yields = false;       // if tokenizer.json has the token too, the flags of that file count
};

// Finds added tokens in a text: the leftmost match; if several begin there, the longest.
class AddedTokenFinder {
 public:
  // Searches for `pattern` instead of token.content. `pattern` must not be empty or added twice.
  void add(std::string pattern, const AddedToken& token);
  bool empty() const { return num_tokens_ == 0; }

  // Splits `text`, which must be valid UTF-8, at added tokens. From left to right, calls `found` with each
  // token and `between` with each text between tokens. The views are valid as long as `text`. Thread-safe.
  void split(std::string_view text, const std::function<void(std::string_view)>& between,
             const std::function<void(const AddedToken&)>& found) const;

 private:
  struct Node {
    std::unordered_map<char, std::unique_ptr<Node>> children;
    std::unique_ptr<AddedToken> token;
  };
  // Returns the longest token at text[position], or nullptr if there is none. Sets `length` to the bytes of
  // its pattern.
  const AddedToken* find_at(std::string_view text, size_t position, size_t& length) const;

  Node root_;
  bool begins_[256] = {};  // first bytes of the patterns, for a fast check of each position
  size_t num_tokens_ = 0;
};

}  // namespace bough
