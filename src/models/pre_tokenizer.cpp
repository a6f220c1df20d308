#include "models/pre_tokenizer.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/json.h"
#include "models/unicode_text.h"

namespace bough {
namespace {

// What ByteLevel with use_regex stands for: OpenAI's GPT-2 pattern.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

std::string type_of(const Json& description, const std::string& where) {
  if (!description.is_object() || !description.contains("type") || !description["type"].is_string())
    throw UserError(str(where, ": pre_tokenizer: expected an object with a type, got ",
                        bough::quoted(dump_line(description))));
  return description["type"];
}

bool flag(const Json& description, const char* key, bool otherwise, const std::string& where) {
  if (!description.contains(key)) return otherwise;
  if (!description[key].is_boolean())
    throw UserError(str(where, ": pre_tokenizer: ", key, " must be true or false"));
  return description[key];
}

}  // namespace

PreTokenizer PreTokenizer::from_json(const Json& description, const std::string& where) {
  PreTokenizer result;
  if (!description.is_null()) result.add(description, where);
  if (!result.byte_level_)
    throw UserError(str(where,
                        ": pre_tokenizer: expected ByteLevel, alone or last in a Sequence, found none: only "
                        "byte-level tokenizers are supported"));
  return result;
}

void PreTokenizer::add(const Json& description, const std::string& where) {
  const std::string type = type_of(description, where);
  if (type == "Sequence") {
    if (!description.contains("pretokenizers") || !description["pretokenizers"].is_array())
      throw UserError(str(where, ": pre_tokenizer: a Sequence needs a list `pretokenizers`"));
    for (const Json& part : description["pretokenizers"]) add(part, where);
    return;
  }
  if (byte_level_)
    throw UserError(
        str(where, ": pre_tokenizer: ", bough::quoted(type), " after ByteLevel is not supported"));
  if (type == "ByteLevel") {
    byte_level_ = true;
    add_prefix_space_ = flag(description, "add_prefix_space", true, where);
    if (flag(description, "use_regex", true, where))
      byte_level_steps_.push_back(
          {unicode::Regex::compile(kGpt2Pattern, "ByteLevel"), Behavior::kIsolated, false});
  } else if (type == "Digits") {
    const bool each = flag(description, "individual_digits", false, where);
    steps_.push_back(
        {unicode::Regex::compile(each ? R"(\p{N})" : R"(\p{N}+)", "Digits"), Behavior::kIsolated, false});
  } else if (type == "Split") {
    add_split(description, where);
  } else {
    throw UserError(str(where, ": pre_tokenizer ", bough::quoted(type),
                        " is not supported. Supported are ByteLevel, Split, Digits and Sequence"));
  }
}

void PreTokenizer::add_split(const Json& description, const std::string& where) {
  constexpr std::array kBehaviors = {"Isolated", "Removed", "Contiguous", "MergedWithPrevious",
                                     "MergedWithNext"};
  const std::string in_split = where + ": pre_tokenizer Split";
  const Json behavior = description.value("behavior", Json());
  size_t index = 0;
  while (index < kBehaviors.size() && behavior != kBehaviors[index]) ++index;
  if (index == kBehaviors.size())
    throw UserError(str(in_split, ": unknown behavior ",
                        bough::quoted(behavior.is_string() ? behavior.get<std::string>() : "")));
  const Json pattern = description.value("pattern", Json());
  const auto text_of = [&](const char* kind) -> std::string {
    if (!pattern.is_object() || !pattern.contains(kind) || !pattern[kind].is_string()) return "";
    return pattern[kind];
  };
  const std::string regex = text_of("Regex");
  const std::string literal = text_of("String");
  if (regex.empty() == literal.empty())
    throw UserError(str(in_split, ": the pattern must be one Regex or one String, and not empty"));
  steps_.push_back(
      {regex.empty() ? unicode::Regex::literal(literal) : unicode::Regex::compile(regex, in_split),
       static_cast<Behavior>(index), flag(description, "invert", false, where)});
}

// Cuts `piece` of `text` (of `subject`, where stand-ins matter) into matches and what lies between, as
// `invert` and `behavior` want them.
void PreTokenizer::apply(const Step& step, std::string_view text, std::string_view subject, Piece piece,
                         std::vector<Piece>& out) {
  const std::string_view searched =
      (step.regex.is_literal() ? text : subject).substr(piece.begin, piece.end - piece.begin);
  struct Part {
    Piece piece;
    bool match;
  };
  std::vector<Part> parts;
  size_t previous = piece.begin;
  for (const unicode::Match& match : step.regex.find_all(searched)) {
    const Piece found{piece.begin + match.begin, piece.begin + match.end};
    if (previous != found.begin) parts.push_back({{previous, found.begin}, step.invert});
    parts.push_back({found, !step.invert});
    previous = found.end;
  }
  if (previous != piece.end) parts.push_back({{previous, piece.end}, step.invert});

  // Whether part i joins the part before it.
  const auto joins = [&](size_t i) {
    const bool match = parts[i].match;
    const bool before = parts[i - 1].match;
    switch (step.behavior) {
      case Behavior::kContiguous: return match == before;
      case Behavior::kMergedWithPrevious: return match && !before;
      case Behavior::kMergedWithNext: return before && !match;
      default: return false;
    }
  };
  const size_t first = out.size();
  for (size_t i = 0; i < parts.size(); ++i) {
    if (step.behavior == Behavior::kRemoved && parts[i].match) continue;
    if (i > 0 && out.size() > first && joins(i)) out.back().end = parts[i].piece.end;
    else out.push_back(parts[i].piece);
  }
  const auto empty = [](const Piece& p) { return p.begin == p.end; };
  out.erase(std::remove_if(out.begin() + static_cast<std::ptrdiff_t>(first), out.end(), empty), out.end());
}

void PreTokenizer::split(std::string_view text, const std::function<void(std::string_view)>& word) const {
  if (text.empty()) return;
  const std::string replaced = unicode::with_stand_ins(text);
  const std::string_view subject = replaced.empty() ? text : std::string_view(replaced);

  const auto cut = [](const std::vector<Step>& steps, std::string_view text, std::string_view subject) {
    std::vector<Piece> pieces{{0, text.size()}};
    for (const Step& step : steps) {
      std::vector<Piece> finer;
      for (const Piece& piece : pieces) apply(step, text, subject, piece, finer);
      pieces = std::move(finer);
    }
    return pieces;
  };
  for (const Piece& piece : cut(steps_, text, subject)) {
    std::string_view part = text.substr(piece.begin, piece.end - piece.begin);
    std::string_view part_subject = subject.substr(piece.begin, piece.end - piece.begin);
    std::string prefixed, prefixed_subject;
    if (add_prefix_space_ && part.front() != ' ') {
      part = prefixed = str(' ', part);
      part_subject = prefixed_subject = str(' ', part_subject);
    }
    for (const Piece& p : cut(byte_level_steps_, part, part_subject))
      word(part.substr(p.begin, p.end - p.begin));
  }
}

}  // namespace bough
