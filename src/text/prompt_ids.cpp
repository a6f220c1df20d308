#include "text/prompt_ids.h"

#include <algorithm>
#include <mutex>

#include "base/error.h"
#include "base/log.h"

namespace bough {

namespace {

// The number of special tokens that the tokenizer's template puts in front of a text.
size_t num_leading(const Tokenizer& tokenizer) {
  const std::vector<int32_t> without = tokenizer.encode("a"), with = tokenizer.encode("a", true);
  const auto found = std::search(with.begin(), with.end(), without.begin(), without.end());
  return static_cast<size_t>(found - with.begin());
}

}  // namespace

std::vector<int32_t> encode_plain_prompt(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids = tokenizer.encode(text, true);
  const auto count = static_cast<std::ptrdiff_t>(num_leading(tokenizer));
  if (count == 0 || std::ssize(ids) < 2 * count ||
      !std::equal(ids.begin(), ids.begin() + count, ids.begin() + count))
    return ids;
  static std::once_flag once;
  std::call_once(once, [&] {
    log_warning(str(
        "a prompt begins with ", quoted(tokenizer.decode({ids.data(), static_cast<size_t>(count)}, false)),
        ", which the tokenizer also puts in front of every plain prompt; such prompts get it once"));
  });
  ids.erase(ids.begin(), ids.begin() + count);
  return ids;
}

}  // namespace bough
