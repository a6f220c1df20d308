#include "text/tokenizer_decoder.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "text/tokenizer_bpe.h"
#include "text/unicode_text.h"

namespace bough {
namespace {

constexpr std::string_view kReplacement = "\uFFFD";

// Returns the number of bytes of `text` before an incomplete UTF-8 character at its end. A character has at
// most four bytes, so an incomplete one begins in the last three.
size_t complete_bytes(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const size_t begin = text.size() - back;
    if ((static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) continue;
    return unicode::decode(text.substr(begin)).truncated ? begin : text.size();
  }
  return text.size();
}

// Returns the byte that "<0xNN>" stands for. As in `tokenizers`, NN may be '+' and one digit.
std::optional<char> byte_of(std::string_view text) {
  if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return std::nullopt;
  int value = 0;
  for (size_t i = text[3] == '+' ? 4 : 3; i < 5; ++i) {
    const char c = text[i];
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) return std::nullopt;
    value = value * 16 + digit;
  }
  return static_cast<char>(value);
}

std::string with_spaces(std::string_view text, std::string_view mark, std::string_view space) {
  std::string result;
  size_t done = 0;
  for (size_t at = text.find(mark); at != std::string_view::npos; at = text.find(mark, done)) {
    result += text.substr(done, at - done);
    result += space;
    done = at + mark.size();
  }
  result += text.substr(done);
  return result;
}

}  // namespace

TokenDecoder TokenDecoder::from_json(const Json& description, const std::string& where) {
  const std::string here = where + ": decoder";
  if (description.is_null())
    throw UserError(str(here,
                        ": missing; add the decoder that fits the pre_tokenizer, such as "
                        "{\"type\": \"ByteLevel\"}"));
  TokenDecoder result;
  result.add(description, here);
  const std::vector<Step>& steps = result.steps_;
  if (steps.empty()) throw UserError(str(here, ": a Sequence without a decoder"));
  // A leading Replace, or the character table of a leading ByteLevel, acts on each token alone. So these
  // steps are applied in advance, by prepare().
  if (steps[0].kind == Kind::kByteLevel) result.num_prepared_ = 1;
  else
    while (result.num_prepared_ < steps.size() && steps[result.num_prepared_].kind == Kind::kReplace)
      ++result.num_prepared_;
  return result;
}

void TokenDecoder::add(const Json& description, const std::string& where) {
  const std::string type = tokenizer_json::type_of(description, where);
  const std::string here = where + " " + type;
  if (type == "Sequence") {
    for (const Json& part : tokenizer_json::list_of(description, "decoders", here)) add(part, where);
    return;
  }
  Step step{};
  for (const Step& earlier : steps_)
    step.in_parts |= earlier.kind == Kind::kByteLevel || earlier.kind == Kind::kFuse;
  if (type == "ByteLevel") {
    step.kind = Kind::kByteLevel;
    step.wants_whole = true;
  } else if (type == "Metaspace") {
    const tokenizer_json::Metaspace metaspace = tokenizer_json::metaspace_of(description, here);
    step.kind = Kind::kMetaspace;
    step.text = metaspace.replacement;
    step.drops_first = metaspace.prepend != tokenizer_json::Metaspace::Prepend::kNever;
  } else if (type == "Replace") {
    step.kind = Kind::kReplace;
    step.regex = tokenizer_json::pattern_of(description, here);
    step.text = tokenizer_json::text_of(description, "content", here);
    if (step.regex->may_match_nothing())
      throw UserError(str(here, ": a pattern that may match the empty string is not supported"));
    step.wants_whole = true;
  } else if (type == "ByteFallback") {
    step.kind = Kind::kByteFallback;
    step.wants_whole = true;
  } else if (type == "Fuse") {
    step.kind = Kind::kFuse;
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    step.text = tokenizer_json::text_of(description, "content", here);
    const auto count = [&](const char* key) -> size_t {
      const Json value = description.value(key, Json(0));
      if (!value.is_number_unsigned())
        throw UserError(str(here, ": ", key, " must be a whole number, got ", tokenizer_json::shown(value)));
      return value;
    };
    step.start = count("start");
    if (count("stop") != 0)
      throw UserError(str(here, ": stop = ", count("stop"), " is not supported, expected 0"));
    if (step.text.empty() || unicode::decode(step.text).length != step.text.size())
      throw UserError(str(here, ": content must be one character, got ", bough::quoted(step.text)));
  } else {
    throw UserError(str(where, " ", bough::quoted(type),
                        " is not supported. Supported are ByteLevel, Metaspace, Replace, ByteFallback, Fuse, "
                        "Strip and a Sequence of these: use a model with such a tokenizer"));
  }
  steps_.push_back(std::move(step));
}

std::string TokenDecoder::replace(const Step& step, std::string_view text) {
  const std::string stand_ins = step.regex->wants_stand_ins() ? unicode::with_stand_ins(text) : "";
  std::string result;
  size_t done = 0;
  for (const unicode::Match& match : step.regex->find_all(stand_ins.empty() ? text : stand_ins)) {
    result += text.substr(done, match.begin - done);
    result += step.text;
    done = match.end;
  }
  result += text.substr(done);
  return result;
}

std::string TokenDecoder::prepare(std::string_view spelling) const {
  std::string text(spelling);
  for (size_t i = 0; i < num_prepared_; ++i)
    text = steps_[i].kind == Kind::kByteLevel ? byte_level_decode(text) : replace(steps_[i], text);
  return text;
}

std::string TokenDecoder::bytes_inside(std::string_view prepared) const {
  std::string text(prepared);
  for (size_t i = num_prepared_; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    switch (step.kind) {
      case Kind::kByteLevel:
        if (!step.in_parts) text = byte_level_decode(text);
        break;
      case Kind::kMetaspace: text = with_spaces(text, step.text, " "); break;
      case Kind::kReplace:
        if (!unicode::find_invalid(text)) text = replace(step, text);
        break;
      case Kind::kByteFallback:
        if (const auto byte = byte_of(text); byte && !step.in_parts) text = std::string(1, *byte);
        break;
      case Kind::kFuse: break;
      case Kind::kStrip:
        if (step.in_parts) break;  // applies only at the start of the whole text
        for (size_t left = step.start; left > 0 && text.starts_with(step.text); --left)
          text.erase(0, step.text.size());
        break;
    }
  }
  return text;
}

void TokenDecoder::Run::push(std::string_view prepared, std::string& out) {
  const std::vector<Step>& steps = decoder_->steps_;
  if (steps[0].kind == Kind::kByteLevel) {
    states_[0].held += prepared;
    give_characters(0, false, out);
  } else {
    take(decoder_->num_prepared_, prepared, true, out);
  }
}

void TokenDecoder::Run::finish(std::string& out) {
  for (size_t i = 0; i < states_.size(); ++i) end(i, out);
  states_.assign(states_.size(), State());
}

void TokenDecoder::Run::take(size_t i, std::string_view part, bool begins, std::string& out) {
  if (i == states_.size()) {
    out += part;
    return;
  }
  const Step& step = decoder_->steps_[i];
  State& state = states_[i];
  if (begins) state.first = !state.begun;
  switch (step.kind) {
    case Kind::kMetaspace:
      take(i + 1, with_spaces(part, step.text, step.drops_first && state.first ? "" : " "), begins, out);
      break;
    case Kind::kFuse: take(i + 1, part, !state.begun, out); break;
    case Kind::kStrip:
      if (begins) state.left = step.start;
      while (state.left > 0 && !part.empty()) {
        if (!part.starts_with(step.text)) state.left = 0;
        else --state.left, part.remove_prefix(step.text.size());
      }
      take(i + 1, part, begins, out);
      break;
    default:
      if (step.in_parts) state.held += part;
      else whole(i, part, out);
  }
  state.begun = true;
}

void TokenDecoder::Run::whole(size_t i, std::string_view text, std::string& out) {
  const Step& step = decoder_->steps_[i];
  State& state = states_[i];
  if (step.kind == Kind::kReplace) {
    take(i + 1, replace(step, text), true, out);
  } else if (step.kind == Kind::kByteLevel) {
    state.held += byte_level_decode(text);
    give_characters(i, false, out);
  } else if (const auto byte = byte_of(text)) {
    state.held += *byte;
  } else {
    give_byte_run(i, out);
    take(i + 1, text, true, out);
  }
}

void TokenDecoder::Run::end(size_t i, std::string& out) {
  const Step& step = decoder_->steps_[i];
  State& state = states_[i];
  if (!step.wants_whole) return;
  if (step.in_parts && state.begun) {
    const std::string text = std::exchange(state.held, "");
    whole(i, text, out);
  }
  if (step.kind == Kind::kByteLevel) give_characters(i, true, out);
  if (step.kind == Kind::kByteFallback) give_byte_run(i, out);
}

void TokenDecoder::Run::give_characters(size_t i, bool last, std::string& out) {
  State& state = states_[i];
  const size_t complete = last ? state.held.size() : complete_bytes(state.held);
  const std::string text = unicode::replace_invalid(std::string_view(state.held).substr(0, complete));
  state.held.erase(0, complete);
  if (text.empty()) return;
  take(i + 1, text, !std::exchange(state.given, true), out);
}

void TokenDecoder::Run::give_byte_run(size_t i, std::string& out) {
  const std::string bytes = std::exchange(states_[i].held, "");
  if (bytes.empty()) return;
  if (!unicode::find_invalid(bytes)) take(i + 1, bytes, true, out);
  else
    for (size_t n = 0; n < bytes.size(); ++n) take(i + 1, kReplacement, true, out);
}

}  // namespace bough
