#include "text/unicode_regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.h"
#include "text/unicode_text.h"

namespace bough::unicode {
namespace {

struct MatchData {
  pcre2_match_data* data;
  explicit MatchData(const pcre2_code* code) : data(pcre2_match_data_create_from_pattern(code, nullptr)) {
    if (!data) throw std::bad_alloc();
  }
  ~MatchData() { pcre2_match_data_free(data); }
  MatchData(const MatchData&) = delete;
  MatchData& operator=(const MatchData&) = delete;
};

// PCRE2 stops a match after a number of steps, because an untrusted pattern may take exponential time. The
// default of ten million is too low: on a run of millions of spaces, a tokenizer's pattern needs a few steps
// per byte. Therefore the largest possible limit is set.
struct MatchContext {
  pcre2_match_context* context;
  MatchContext() : context(pcre2_match_context_create(nullptr)) {
    if (!context) throw std::bad_alloc();
    pcre2_set_match_limit(context, UINT32_MAX);
  }
  ~MatchContext() { pcre2_match_context_free(context); }
  MatchContext(const MatchContext&) = delete;
  MatchContext& operator=(const MatchContext&) = delete;
};

std::string message_of(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

}  // namespace

Regex::Regex(std::string_view pattern, uint32_t options, const std::string& where) {
  int error = 0;
  PCRE2_SIZE position = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), options,
                                   &error, &position, nullptr);
  if (!code)
    throw UserError(str(where, ": the regular expression ", quoted(pattern), " is invalid at byte ", position,
                        ": ", message_of(error)));
  code_ = std::shared_ptr<const void>(code, [code](const void*) { pcre2_code_free(code); });
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // if JIT fails, matching is slower but the same
}

Regex Regex::compile(std::string_view pattern, const std::string& where) {
  if (const auto bad = find_invalid(pattern))
    throw UserError(str(where, ": the regular expression is not UTF-8 at byte ", *bad));
  check_portable(pattern, where);
  return Regex(pattern, PCRE2_UTF | PCRE2_UCP | PCRE2_NO_UTF_CHECK, where);
}

Regex Regex::trusted(std::string_view pattern) {
  return Regex(pattern, PCRE2_UTF | PCRE2_UCP, "a built-in pattern");
}

Regex Regex::literal(std::string_view text) {
  BOUGH_CHECK(!text.empty(), "a literal pattern must not be empty");
  Regex regex;
  regex.literal_ = text;
  return regex;
}

bool Regex::may_match_nothing() const {
  if (!code_) return false;
  uint32_t result = 0;
  pcre2_pattern_info(static_cast<const pcre2_code*>(code_.get()), PCRE2_INFO_MATCHEMPTY, &result);
  return result != 0;
}

std::vector<Match> Regex::find_all(std::string_view subject) const {
  if (!literal_.empty()) {
    std::vector<Match> found;
    for (size_t at = subject.find(literal_); at != std::string_view::npos;
         at = subject.find(literal_, found.back().end))
      found.push_back({at, at + literal_.size()});
    return found;
  }
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  const MatchData match(code);
  const MatchContext context;
  std::vector<Match> found;
  std::optional<size_t> last_end;
  size_t from = 0;
  while (from <= subject.size()) {
    const auto search = [&](uint32_t options) {
      return pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(subject.data()), subject.size(), from,
                         PCRE2_NO_UTF_CHECK | options, match.data, context.context);
    };
    int result = search(0);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = search(PCRE2_NO_JIT);  // the interpreter uses the heap
    if (result == PCRE2_ERROR_NOMATCH) break;
    if (result < 0)
      throw UserError(str("a regular expression of the tokenizer failed at byte ", from, " of a text of ",
                          subject.size(), " bytes: ", message_of(result)));
    const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(match.data);
    const Match next{offsets[0], offsets[1]};
    if (next.begin == next.end && last_end == next.end) {
      if (from == subject.size()) break;
      from += decode(subject.substr(from)).length;
      continue;
    }
    found.push_back(next);
    last_end = from = next.end;
  }
  return found;
}

}  // namespace bough::unicode
