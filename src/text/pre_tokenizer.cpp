#include "text/pre_tokenizer.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "text/tokenizer_bpe.h"
#include "text/unicode_text.h"

namespace bough {
namespace {

// OpenAI's GPT-2 pattern, which ByteLevel uses with use_regex.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// A character that the pre_tokenizer Digits takes as a number. Digits uses Unicode 17, regular expressions
// use Unicode 16.
constexpr std::string_view kDigit = R"([\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}])";

}  // namespace

PreTokenizer PreTokenizer::from_json(const Json& description, const std::string& where) {
  PreTokenizer result;
  if (!description.is_null()) result.add(description, where + ": pre_tokenizer");
  return result;
}

void PreTokenizer::add(const Json& description, const std::string& where) {
  const std::string type = tokenizer_json::type_of(description, where);
  const std::string here = where + " " + type;
  if (type == "Sequence") {
    for (const Json& part : tokenizer_json::list_of(description, "pretokenizers", here)) add(part, where);
    return;
  }
  if (byte_level_) {
    steps_.push_back({Kind::kByteCharacters, {}, {}, false, {}});
    byte_level_ = false;
  }
  if (type == "ByteLevel") {
    byte_level_ = true;
    if (tokenizer_json::flag(description, "add_prefix_space", true, here))
      steps_.push_back({Kind::kPrefixSpace, {}, {}, false, {}});
    if (tokenizer_json::flag(description, "use_regex", true, here))
      add_cut(unicode::Regex::compile(kGpt2Pattern, here), Behavior::kIsolated);
  } else if (type == "Metaspace") {
    const tokenizer_json::Metaspace metaspace = tokenizer_json::metaspace_of(description, here);
    steps_.push_back({Kind::kMetaspace, {}, {}, false, metaspace});
    if (metaspace.split) add_cut(unicode::Regex::literal(metaspace.replacement), Behavior::kMergedWithNext);
  } else if (type == "Digits") {
    const bool each = tokenizer_json::flag(description, "individual_digits", false, here);
    add_cut(unicode::Regex::trusted(each ? std::string(kDigit) : str(kDigit, '+')), Behavior::kIsolated);
  } else if (type == "WhitespaceSplit") {
    add_cut(unicode::Regex::trusted(R"(\s)"), Behavior::kRemoved);
  } else if (type == "Split") {
    add_split(description, here);
  } else {
    throw UserError(str(where, " ", bough::quoted(type),
                        " is not supported. Supported are ByteLevel, Metaspace, Split, Digits, "
                        "WhitespaceSplit and a Sequence of these: use a model with such a tokenizer"));
  }
}

void PreTokenizer::add_cut(unicode::Regex regex, Behavior behavior, bool invert) {
  steps_.push_back({Kind::kCut, std::move(regex), behavior, invert, {}});
}

void PreTokenizer::add_split(const Json& description, const std::string& where) {
  constexpr std::array kBehaviors = {"Isolated", "Removed", "Contiguous", "MergedWithPrevious",
                                     "MergedWithNext"};
  const Json behavior = description.value("behavior", Json());
  size_t index = 0;
  while (index < kBehaviors.size() && behavior != kBehaviors[index]) ++index;
  if (index == kBehaviors.size())
    throw UserError(str(where, ": unknown behavior ", tokenizer_json::shown(behavior)));
  add_cut(tokenizer_json::pattern_of(description, where), static_cast<Behavior>(index),
          tokenizer_json::flag(description, "invert", false, where));
}

// A text and the pieces into which it has been cut so far.
class PreTokenizer::Cutting {
 public:
  Cutting(std::string_view text, const TextStart& start)
      : text_(text), start_(start), pieces_{{0, text.size()}} {}

  void run(const Step& step) {
    switch (step.kind) {
      case Kind::kCut: cut(step); break;
      case Kind::kPrefixSpace:
        rewrite(" ", Prepend::kAlways, [](std::string_view part) { return std::string(part); });
        break;
      case Kind::kMetaspace: metaspace(step.metaspace); break;
      case Kind::kByteCharacters:
        rewrite("", Prepend::kNever, [](std::string_view part) {
          std::string characters;
          for (const char byte : part)
            characters += byte_level_characters()[static_cast<unsigned char>(byte)];
          return characters;
        });
        break;
    }
  }

  void give(const std::function<void(std::string_view)>& word) const {
    for (const Piece& piece : pieces_) word(text_.substr(piece.begin, piece.end - piece.begin));
  }

 private:
  using Prepend = tokenizer_json::Metaspace::Prepend;

  // Returns the text in which regular expressions search: a copy with stand-ins (unicode_text.h), made once
  // for all steps.
  std::string_view subject(const Step& step) {
    if (!step.regex->wants_stand_ins()) return text_;
    if (!has_stand_ins_) stand_ins_ = unicode::with_stand_ins(text_);
    has_stand_ins_ = true;
    return stand_ins_.empty() ? text_ : std::string_view(stand_ins_);
  }

  void cut(const Step& step) {
    const std::string_view searched = subject(step);
    std::vector<Piece> finer;
    for (const Piece& piece : pieces_) cut_piece(step, searched, piece, finer);
    pieces_ = std::move(finer);
  }

  static void cut_piece(const Step& step, std::string_view subject, Piece piece, std::vector<Piece>& out);

  void metaspace(const tokenizer_json::Metaspace& metaspace) {
    rewrite(metaspace.replacement, metaspace.prepend, [&](std::string_view part) {
      std::string marked;
      for (const char c : part)
        if (c == ' ') marked += metaspace.replacement;
        else marked += c;
      return marked;
    });
  }

  // Replaces each piece by the result of `map`. If `prepend` asks for it, `prefix` is put in front of a piece
  // that does not already begin with `prefix`. `map` must work on each character separately.
  template <class Map>
  void rewrite(std::string_view prefix, Prepend prepend, const Map& map) {
    std::string rewritten;
    rewritten.reserve(text_.size() + text_.size() / 2 + prefix.size());
    TextStart start{0, start_.continues};
    for (Piece& piece : pieces_) {
      const std::string_view part = text_.substr(piece.begin, piece.end - piece.begin);
      const TextStart here = start_.at(piece.begin);
      const size_t begin = rewritten.size();
      const std::string mapped = map(part);
      const bool wanted = prepend == Prepend::kAlways || (prepend == Prepend::kFirst && here.bytes > 0);
      if (wanted && !here.continues && !mapped.starts_with(prefix)) {
        rewritten += prefix;
        if (here.bytes > 0) start.bytes += prefix.size();
      }
      rewritten += mapped;
      if (here.bytes > 0) start.bytes += map(part.substr(0, here.bytes)).size();
      if (piece.begin > 0 && begin == 0) start.continues = false;
      piece = {begin, rewritten.size()};
    }
    owned_.swap(rewritten);
    text_ = owned_;
    has_stand_ins_ = false;
    start_ = start;
  }

  std::string_view text_;  // owned by the caller, or owned_
  std::string owned_;
  std::string stand_ins_;  // empty if the text needs none
  bool has_stand_ins_ = false;
  TextStart start_;
  std::vector<Piece> pieces_;
};

// Cuts `piece` into matches and the texts between them. `invert` exchanges the roles of the two. `behavior`
// says which of these parts are removed, and which are joined.
void PreTokenizer::Cutting::cut_piece(const Step& step, std::string_view subject, Piece piece,
                                      std::vector<Piece>& out) {
  struct Part {
    Piece piece;
    bool match;
  };
  std::vector<Part> parts;
  size_t previous = piece.begin;
  for (const unicode::Match& match :
       step.regex->find_all(subject.substr(piece.begin, piece.end - piece.begin))) {
    const Piece found{piece.begin + match.begin, piece.begin + match.end};
    if (previous != found.begin) parts.push_back({{previous, found.begin}, step.invert});
    parts.push_back({found, !step.invert});
    previous = found.end;
  }
  if (previous != piece.end) parts.push_back({{previous, piece.end}, step.invert});

  // Returns whether part i joins the part before it.
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

void PreTokenizer::split(std::string_view text, const TextStart& start,
                         const std::function<void(std::string_view)>& word) const {
  if (text.empty()) return;
  Cutting cutting(text, start);
  for (const Step& step : steps_) cutting.run(step);
  cutting.give(word);
}

}  // namespace bough
