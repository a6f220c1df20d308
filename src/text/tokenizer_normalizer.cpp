#include "text/tokenizer_normalizer.h"

#include <algorithm>

#include "base/error.h"
#include "text/tokenizer_json.h"
#include "text/unicode_text.h"

namespace bough {

Normalizer Normalizer::from_json(const Json& description, const std::string& where) {
  Normalizer result;
  if (!description.is_null()) result.add(description, where + ": normalizer");
  return result;
}

void Normalizer::add(const Json& description, const std::string& where) {
  const std::string type = tokenizer_json::type_of(description, where);
  const std::string here = where + " " + type;
  Step step{};
  if (type == "Sequence") {
    for (const Json& part : tokenizer_json::list_of(description, "normalizers", here)) add(part, where);
    return;
  }
  if (type == "NFC") {
    step.kind = Kind::kNfc;
  } else if (type == "Prepend") {
    step.kind = Kind::kPrepend;
    step.content = tokenizer_json::text_of(description, "prepend", here);
    if (step.content.empty())
      throw UserError(str(here, ": the text to prepend is empty; remove this normalizer"));
  } else if (type == "Replace") {
    step.kind = Kind::kReplace;
    step.regex = tokenizer_json::pattern_of(description, here);
    step.content = tokenizer_json::text_of(description, "content", here);
    if (step.regex->may_match_nothing())
      throw UserError(str(here, ": a pattern that may match the empty string is not supported"));
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    step.left = tokenizer_json::flag(description, "strip_left", true, here);
    step.right = tokenizer_json::flag(description, "strip_right", true, here);
  } else {
    throw UserError(str(where, " ", bough::quoted(type),
                        " is not supported. Supported are NFC, Prepend, Replace, Strip and a Sequence of "
                        "these: use a model with such a tokenizer"));
  }
  steps_.push_back(std::move(step));
}

std::string Normalizer::normalize(std::string_view text, TextStart& start) const {
  std::string result(text);
  for (const Step& step : steps_) {
    if (result.empty()) break;
    switch (step.kind) {
      case Kind::kNfc: result = nfc(std::move(result), start); break;
      case Kind::kPrepend: result = prepend(step, std::move(result), start); break;
      case Kind::kReplace: result = replace(step, std::move(result), start); break;
      case Kind::kStrip: result = strip(step, std::move(result), start); break;
    }
  }
  start.bytes = std::min(start.bytes, result.size());
  return result;
}

// start.bytes of the result covers what NFC makes of the first start.bytes bytes of `text`, including later
// characters that NFC composed with the last of them.
std::string Normalizer::nfc(std::string text, TextStart& start) {
  std::string result = unicode::nfc(text);
  if (start.bytes > 0) {
    const std::string first = unicode::nfc(std::string_view(text).substr(0, start.bytes));
    size_t same = 0;
    while (same < first.size() && same < result.size() && first[same] == result[same]) ++same;
    while (same > 0 && same < result.size() && (static_cast<unsigned char>(result[same]) & 0xC0) == 0x80)
      --same;
    const bool composed = same < first.size() && same < result.size();
    start.bytes = same + (composed ? unicode::decode(std::string_view(result).substr(same)).length : 0);
  }
  return result;
}

std::string Normalizer::prepend(const Step& step, std::string text, TextStart& start) {
  if (start.continues) return text;
  if (start.bytes > 0) start.bytes += step.content.size();
  return step.content + text;
}

// A replacement takes the position of the match's last character.
std::string Normalizer::replace(const Step& step, std::string text, TextStart& start) {
  const std::string stand_ins = step.regex->wants_stand_ins() ? unicode::with_stand_ins(text) : "";
  const std::vector<unicode::Match> matches = step.regex->find_all(stand_ins.empty() ? text : stand_ins);
  if (matches.empty()) return text;
  std::string result;
  result.reserve(text.size() + matches.size() * step.content.size());
  size_t done = 0;
  size_t bytes = 0;  // start.bytes of the result
  const auto copy = [&](size_t end) {
    result.append(text, done, end - done);
    if (start.bytes > done) bytes += std::min(start.bytes, end) - done;
    done = end;
  };
  for (const unicode::Match& match : matches) {
    copy(match.begin);
    result += step.content;
    if (match.end <= start.bytes) bytes += step.content.size();
    done = match.end;
  }
  copy(text.size());
  start.bytes = bytes;
  return result;
}

std::string Normalizer::strip(const Step& step, std::string text, TextStart& start) {
  size_t begin = 0;
  size_t end = text.size();
  if (step.left) begin = unicode::skip_white_space(text, 0);
  if (step.right) end = unicode::skip_white_space_back(text, end);
  if (begin >= end) return "";
  start = {start.bytes > begin ? start.bytes - begin : 0, start.continues};
  return text.substr(begin, end - begin);
}

}  // namespace bough
