#include "text/tokenizer_added.h"

#include <algorithm>

#include "base/error.h"
#include "text/unicode_regex.h"
#include "text/unicode_text.h"

namespace bough {
namespace {

// \w of Unicode Technical Standard 18. PCRE2's own \w is narrower (it lacks marks).
bool is_word_character(std::string_view character) {
  static const unicode::Regex regex =
      unicode::Regex::trusted(R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}])");
  const std::string replaced = unicode::with_stand_ins(character);
  return !regex.find_all(replaced.empty() ? character : std::string_view(replaced)).empty();
}

bool stands_alone(std::string_view text, size_t begin, size_t end) {
  if (begin > 0) {
    const size_t before = unicode::character_before(text, begin);
    if (is_word_character(text.substr(before, begin - before))) return false;
  }
  return end == text.size() || !is_word_character(text.substr(end, unicode::decode(text.substr(end)).length));
}

}  // namespace

void AddedTokenFinder::add(std::string pattern, const AddedToken& token) {
  BOUGH_CHECK(!pattern.empty(), "added token ", token.id, " has an empty pattern");
  Node* node = &root_;
  for (const char c : pattern) {
    std::unique_ptr<Node>& child = node->children[c];
    if (!child) child = std::make_unique<Node>();
    node = child.get();
  }
  BOUGH_CHECK(!node->token, "two added tokens have the pattern ", quoted(pattern));
  node->token = std::make_unique<AddedToken>(token);
  begins_[static_cast<unsigned char>(pattern[0])] = true;
  ++num_tokens_;
}

const AddedToken* AddedTokenFinder::find_at(std::string_view text, size_t position, size_t& length) const {
  const AddedToken* longest = nullptr;
  const Node* node = &root_;
  for (size_t i = position; i < text.size(); ++i) {
    const auto child = node->children.find(text[i]);
    if (child == node->children.end()) break;
    node = child->second.get();
    if (node->token) {
      longest = node->token.get();
      length = i + 1 - position;
    }
  }
  return longest;
}

void AddedTokenFinder::split(std::string_view text, const std::function<void(std::string_view)>& between,
                             const std::function<void(const AddedToken&)>& found) const {
  size_t done = 0;  // the text before this position was passed to a callback
  size_t position = empty() ? text.size() : 0;
  while (position < text.size()) {
    size_t length = 0;
    const AddedToken* token =
        begins_[static_cast<unsigned char>(text[position])] ? find_at(text, position, length) : nullptr;
    if (!token) {
      ++position;
      continue;
    }
    // As in `tokenizers`, a match hides overlapping matches even if a flag discards or widens the match. The
    // search continues at the end of the pattern, so white space that `rstrip` added to a match is searched
    // again.
    size_t begin = position;
    size_t end = position += length;
    if (token->single_word && !stands_alone(text, begin, end)) continue;
    if (token->lstrip) begin = std::max(unicode::skip_white_space_back(text, begin), done);
    if (token->rstrip) end = unicode::skip_white_space(text, end);
    if (done < begin) between(text.substr(done, begin - done));
    found(*token);
    done = end;
  }
  if (done < text.size()) between(text.substr(done));
}

}  // namespace bough
