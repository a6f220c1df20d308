#include "models/gguf_tokenizer.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "models/unicode_text.h"

namespace bough {
namespace {

constexpr const char* kTokensKey = "tokenizer.ggml.tokens";
constexpr const char* kTypesKey = "tokenizer.ggml.token_type";
constexpr const char* kScoresKey = "tokenizer.ggml.scores";
constexpr const char* kMergesKey = "tokenizer.ggml.merges";
constexpr const char* kModelKey = "tokenizer.ggml.model";
constexpr const char* kPreKey = "tokenizer.ggml.pre";
constexpr const char* kSpace = "\u2581";  // what SentencePiece writes for a space

// Values of tokenizer.ggml.token_type.
enum TokenType : int64_t { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

// The expressions below are those of the original tokenizer.json files.
#define CONTRACTIONS R"((?i:'s|'t|'re|'ve|'m|'ll|'d))"
#define SPACES R"(|\s*[\r\n]+|\s+(?!\S)|\s+)"
constexpr const char* kLlama3 =
    CONTRACTIONS R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)" SPACES;
constexpr const char* kQwen2 =
    CONTRACTIONS R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)" SPACES;
constexpr const char* kTekken =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
    R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*)" SPACES;
#undef CONTRACTIONS
#undef SPACES
constexpr const char* kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// How text becomes words before byte-level BPE.
struct PreTokenizer {
  const char* name;
  // What comes before ByteLevel: expressions whose matches stand alone, one after the other; "digits" is the
  // Digits pre-tokenizer, each digit alone.
  std::array<const char*, 5> splits;
  bool gpt2;           // ByteLevel cuts by the GPT-2 expression too
  bool nfc;            // the normalizer
  bool ignore_merges;  // a word that is a token becomes it, whatever the merges say
  bool add_bos;        // where the file does not say
};

constexpr const char* kDigits = "digits";
constexpr PreTokenizer kPreTokenizers[] = {
    {"gpt-2", {}, true, false, false, false},
    {"smollm", {kDigits}, true, false, false, false},
    {"starcoder", {kDigits}, true, false, false, false},
    {"refact", {kDigits}, true, false, false, false},
    {"qwen2", {kQwen2}, false, true, false, false},
    {"llama-bpe", {kLlama3}, false, false, true, true},
    {"llama-v3", {kLlama3}, false, false, true, true},
    {"llama3", {kLlama3}, false, false, true, true},
    {"tekken", {kTekken}, false, false, true, true},
    {"deepseek-coder",
     {"[\r\n]", R"(\s?\p{L}+)", R"(\s?\p{P}+)", "[一-龥ࠀ-一가-퟿]+", kDigits},
     false,
     false,
     false,
     false},
    // "default" is what llama.cpp does where a model's own is not known.
    {"default",
     {R"([\p{P}\$\+<=>\^~\|]+)", kGpt2, R"(\p{N}+)", "[0-9][0-9][0-9]"},
     false,
     false,
     false,
     false},
};

const PreTokenizer& find_pre_tokenizer(const GgufFile& file, const std::string& asked) {
  const std::string name = asked.empty() ? file.text_or(kPreKey, "") : asked;
  std::string names;
  for (const PreTokenizer& known : kPreTokenizers) {
    if (name == known.name) return known;
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  file.fail(str(asked.empty() ? str("metadata '", kPreKey, "'") : "--pre", ": got ",
                name.empty() ? "nothing" : quoted(name), "; expected one of ", names,
                ": how text is cut into words is not known otherwise. If the model's tokenizer is known to "
                "cut as one of these does, say which with --pre"));
}

Json split_step(const char* expression) {
  return {
      {"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}, {"invert", false}};
}

Json byte_level(bool use_regex) {
  return {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", use_regex}};
}

Json pre_tokenizer_json(const PreTokenizer& pre) {
  Json steps = Json::array();
  for (const char* split : pre.splits) {
    if (!split) continue;
    if (split == kDigits) steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
    else steps.push_back(split_step(split));
  }
  steps.push_back(byte_level(pre.gpt2));
  if (steps.size() == 1) return steps[0];
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

// What the file says of its tokens, checked.
struct Vocabulary {
  const GgufFile& file;
  const Json& tokens;
  std::vector<int64_t> types;
  // Tokens by spelling, without the fillers of rows that no token has.
  std::unordered_map<std::string, int64_t> ids;

  explicit Vocabulary(const GgufFile& source);
  const std::string& spelling(int64_t id) const { return tokens[id].get_ref<const std::string&>(); }
  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  // A special token's id, or null where the file names none.
  Json special(const char* name) const;
};

Vocabulary::Vocabulary(const GgufFile& source) : file(source), tokens(source.list(kTokensKey)) {
  types.assign(tokens.size(), kNormal);
  if (file.has(kTypesKey)) {
    const Json& given = file.list(kTypesKey);
    if (given.size() != tokens.size())
      file.damaged(str("metadata '", kTypesKey, "': got ", given.size(), " types; expected ", tokens.size(),
                       ", one a token"));
    for (size_t id = 0; id < given.size(); ++id) {
      if (!given[id].is_number_integer() || given[id] < kNormal || given[id] > kByte)
        file.damaged(str("metadata '", kTypesKey, "': got ", quoted(dump_line(given[id])), " for token ", id,
                         "; expected a number from 1 to 6"));
      types[id] = given[id].get<int64_t>();
    }
  }
  if (tokens.empty()) file.damaged(str("metadata '", kTokensKey, "': got no token; expected a vocabulary"));
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (!tokens[id].is_string())
      file.damaged(str("metadata '", kTokensKey, "': got ", quoted(dump_line(tokens[id])), " for token ", id,
                       "; expected a text"));
    const std::string& name = tokens[id].get_ref<const std::string&>();
    // llama.cpp's converter fills the embedding's rows beyond the vocabulary with [PAD151936] and the like.
    if (types[id] == kUnused && name == str("[PAD", id, "]")) continue;
    if (!ids.emplace(name, static_cast<int64_t>(id)).second)
      file.fail(str("metadata '", kTokensKey, "': got the token ", quoted(name), " twice (ids ", ids.at(name),
                    " and ", id, "); expected each once: this vocabulary has no tokenizer.json"));
  }
}

Json Vocabulary::special(const char* name) const {
  const std::string key = str("tokenizer.ggml.", name, "_token_id");
  if (!file.has(key)) return nullptr;
  const int64_t id = file.integer(key);
  if (id >= size() || !ids.contains(spelling(id)))
    file.fail(
        str("metadata ", quoted(key), ": got ", id, "; expected the id of one of the ", size(), " tokens"));
  return id;
}

// Tokens that are found in raw text before anything else: control tokens and <unk>, which are special, and
// those that the model's author defined, which are not.
Json added_tokens(const Vocabulary& vocabulary) {
  Json list = Json::array();
  for (int64_t id = 0; id < vocabulary.size(); ++id) {
    const int64_t type = vocabulary.types[id];
    if (type != kControl && type != kUnknown && type != kUserDefined) continue;
    if (vocabulary.spelling(id).empty())
      vocabulary.file.fail(str("metadata '", kTokensKey, "': got an empty text for the special token ", id,
                               "; expected its spelling"));
    list.push_back({{"id", id},
                    {"content", vocabulary.spelling(id)},
                    {"single_word", false},
                    {"lstrip", false},
                    {"rstrip", false},
                    {"normalized", false},
                    {"special", type != kUserDefined}});
  }
  return list;
}

Json vocabulary_json(const Vocabulary& vocabulary) {
  Json object = Json::object();
  for (const auto& [spelling, id] : vocabulary.ids) object[spelling] = id;
  return object;
}

// Reads the file's merges, "left right" each.
Json read_merges(const Vocabulary& vocabulary) {
  Json merges = Json::array();
  const Json& given = vocabulary.file.list(kMergesKey);
  for (size_t rank = 0; rank < given.size(); ++rank) {
    const std::string text = given[rank].is_string() ? given[rank].get<std::string>() : "";
    const size_t space = text.find(' ', 1);
    const std::string left = text.substr(0, space);
    const std::string right = space == std::string::npos ? "" : text.substr(space + 1);
    for (const std::string& part : {left, right, left + right})
      if (left.empty() || right.empty() || !vocabulary.ids.contains(part))
        vocabulary.file.fail(str("metadata '", kMergesKey, "': got ", quoted(dump_line(given[rank])),
                                 " for merge ", rank,
                                 "; expected two tokens with a space between that make a third"));
    merges.push_back(Json::array({left, right}));
  }
  return merges;
}

// Merges of a SentencePiece vocabulary: every way to make a token of two others, best scores first, as
// transformers' converter orders them: by the product's score, then (in the order of the vocabulary) by the
// scores of left and right. Products are normal and user-defined tokens: SentencePiece makes no control,
// unknown or byte token out of text.
Json merges_of_scores(const Vocabulary& vocabulary) {
  const GgufFile& file = vocabulary.file;
  const Json& given = file.list(kScoresKey);
  if (given.size() != vocabulary.tokens.size())
    file.damaged(str("metadata '", kScoresKey, "': got ", given.size(), " scores; expected ",
                     vocabulary.tokens.size(), ", one a token"));
  std::vector<double> scores;
  for (const Json& score : given) {
    if (!score.is_number() || score != score)
      file.damaged(str("metadata '", kScoresKey, "': got ", quoted(dump_line(score)), "; expected a number"));
    scores.push_back(score.get<double>());
  }
  struct Merge {
    int64_t left, right;
    double score;
  };
  std::vector<Merge> merges;
  for (int64_t id = 0; id < vocabulary.size(); ++id) {
    const int64_t type = vocabulary.types[id];
    const std::string& token = vocabulary.spelling(id);
    if ((type != kNormal && type != kUserDefined) || !vocabulary.ids.contains(token)) continue;
    const auto first = static_cast<std::ptrdiff_t>(merges.size());
    for (size_t cut = 1; cut < token.size(); ++cut) {
      if ((static_cast<unsigned char>(token[cut]) & 0xC0) == 0x80) continue;
      const auto left = vocabulary.ids.find(token.substr(0, cut));
      const auto right = vocabulary.ids.find(token.substr(cut));
      if (left != vocabulary.ids.end() && right != vocabulary.ids.end())
        merges.push_back({left->second, right->second, scores[id]});
    }
    std::stable_sort(merges.begin() + first, merges.end(), [&](const Merge& a, const Merge& b) {
      return std::pair(scores[a.left], scores[a.right]) > std::pair(scores[b.left], scores[b.right]);
    });
  }
  std::stable_sort(merges.begin(), merges.end(),
                   [](const Merge& a, const Merge& b) { return a.score > b.score; });
  Json list = Json::array();
  for (const Merge& merge : merges)
    list.push_back(Json::array({vocabulary.spelling(merge.left), vocabulary.spelling(merge.right)}));
  return list;
}

Json bpe(const Vocabulary& vocabulary, Json merges) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"fuse_unk", false},
          {"end_of_word_suffix", nullptr},
          {"byte_fallback", false},
          {"ignore_merges", false},
          {"vocab", vocabulary_json(vocabulary)},
          {"merges", std::move(merges)}};
}

// The parts of a tokenizer that depend on its kind of vocabulary.
struct Parts {
  Json normalizer, pre_tokenizer, decoder, model;
  bool add_bos = false;  // where the file does not say
  std::string description;
};

Parts byte_level_parts(const Vocabulary& vocabulary, const std::string& asked_pre) {
  const PreTokenizer& pre = find_pre_tokenizer(vocabulary.file, asked_pre);
  Parts parts;
  if (pre.nfc) parts.normalizer = {{"type", "NFC"}};
  parts.pre_tokenizer = pre_tokenizer_json(pre);
  parts.decoder = {
      {"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
  parts.model = bpe(vocabulary, read_merges(vocabulary));
  parts.model["ignore_merges"] = pre.ignore_merges;
  parts.add_bos = pre.add_bos;
  parts.description = str("gpt2/", pre.name);
  return parts;
}

Parts sentencepiece_parts(const Vocabulary& vocabulary) {
  const GgufFile& file = vocabulary.file;
  if (file.flag_or("tokenizer.ggml.remove_extra_whitespaces", false))
    file.fail(
        "metadata 'tokenizer.ggml.remove_extra_whitespaces': got true; expected false: a tokenizer that "
        "drops spaces is not supported");
  if (file.has("tokenizer.ggml.precompiled_charsmap"))
    file.fail(
        "metadata 'tokenizer.ggml.precompiled_charsmap': a tokenizer with a table of characters to "
        "replace is not supported; use the model's original directory");
  const bool prefix = file.flag_or("tokenizer.ggml.add_space_prefix", true);
  Parts parts;
  Json steps = Json::array();
  if (prefix) steps.push_back({{"type", "Prepend"}, {"prepend", kSpace}});
  steps.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kSpace}});
  parts.normalizer = {{"type", "Sequence"}, {"normalizers", steps}};
  Json undo = Json::array({{{"type", "Replace"}, {"pattern", {{"String", kSpace}}}, {"content", " "}},
                           {{"type", "ByteFallback"}},
                           {{"type", "Fuse"}}});
  if (prefix) undo.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  parts.decoder = {{"type", "Sequence"}, {"decoders", undo}};
  parts.model =
      bpe(vocabulary, file.has(kMergesKey) ? read_merges(vocabulary) : merges_of_scores(vocabulary));
  parts.model["byte_fallback"] = true;
  parts.model["fuse_unk"] = true;
  Json unknown = vocabulary.special("unknown");
  for (int64_t id = 0; unknown.is_null() && id < vocabulary.size(); ++id)
    if (vocabulary.types[id] == kUnknown) unknown = id;
  if (!unknown.is_null()) parts.model["unk_token"] = vocabulary.spelling(unknown.get<int64_t>());
  parts.add_bos = true;
  parts.description = "llama (SentencePiece)";
  return parts;
}

// Writes the tokens, one at each end, that the file wants around a text.
Json post_processor(const Vocabulary& vocabulary, bool add_bos, const Json& bos, const Json& eos) {
  const GgufFile& file = vocabulary.file;
  Json single = Json::array(), pair = Json::array(), special = Json::object();
  const auto add_token = [&](const char* name, const Json& id, int sequence) {
    if (id.is_null())
      file.fail(str("metadata 'tokenizer.ggml.", name, "_token_id': got nothing; expected the token that ",
                    "'tokenizer.ggml.add_", name, "_token' puts around a text"));
    const std::string& text = vocabulary.spelling(id.get<int64_t>());
    const Json part = {{"SpecialToken", {{"id", text}, {"type_id", sequence}}}};
    if (sequence == 0) single.push_back(part);
    pair.push_back(part);
    special[text] = {{"id", text}, {"ids", Json::array({id})}, {"tokens", Json::array({text})}};
  };
  const auto add_text = [&](const char* name, int sequence) {
    const Json part = {{"Sequence", {{"id", name}, {"type_id", sequence}}}};
    if (sequence == 0) single.push_back(part);
    pair.push_back(part);
  };
  const bool before = file.flag_or("tokenizer.ggml.add_bos_token", add_bos);
  const bool after = file.flag_or("tokenizer.ggml.add_eos_token", false);
  if (!before && !after) return nullptr;
  for (int sequence = 0; sequence < 2; ++sequence) {
    if (before) add_token("bos", bos, sequence);
    add_text(sequence == 0 ? "A" : "B", sequence);
    if (after) add_token("eos", eos, sequence);
  }
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", special}};
}

}  // namespace

GgufTokenizer read_gguf_tokenizer(const GgufFile& file, const std::string& pre) {
  const std::string model = file.text(kModelKey);
  if (model != "gpt2" && model != "llama")
    file.fail(str("metadata '", kModelKey, "': got a tokenizer of type ", quoted(model),
                  "; expected gpt2 (byte-level BPE) or llama (SentencePiece BPE): no other is supported"));
  if (model == "llama" && !pre.empty())
    file.fail("--pre: got a pre-tokenizer for a SentencePiece vocabulary, which has none; leave it out");
  const Vocabulary vocabulary(file);
  Parts parts = model == "gpt2" ? byte_level_parts(vocabulary, pre) : sentencepiece_parts(vocabulary);

  GgufTokenizer result;
  result.num_tokens = vocabulary.size();
  result.description = parts.description;
  result.bos = vocabulary.special("bos");
  result.eos = vocabulary.special("eos");
  result.pad = vocabulary.special("padding");
  for (const char* name : {"eos", "eot", "eom"}) {
    const Json id = vocabulary.special(name);
    if (!id.is_null() && std::find(result.stops.begin(), result.stops.end(), id) == result.stops.end())
      result.stops.push_back(id.get<int64_t>());
  }
  result.tokenizer = {{"version", "1.0"},
                      {"truncation", nullptr},
                      {"padding", nullptr},
                      {"added_tokens", added_tokens(vocabulary)},
                      {"normalizer", std::move(parts.normalizer)},
                      {"pre_tokenizer", std::move(parts.pre_tokenizer)},
                      {"post_processor", post_processor(vocabulary, parts.add_bos, result.bos, result.eos)},
                      {"decoder", std::move(parts.decoder)},
                      {"model", std::move(parts.model)}};

  const auto spelled = [&](const Json& id) {
    return id.is_null() ? Json() : Json(vocabulary.spelling(id.get<int64_t>()));
  };
  result.tokenizer_config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                             {"bos_token", spelled(result.bos)},
                             {"eos_token", spelled(result.eos)},
                             {"pad_token", spelled(result.pad)},
                             {"unk_token", spelled(vocabulary.special("unknown"))},
                             {"clean_up_tokenization_spaces", false}};
  if (file.has("tokenizer.chat_template"))
    result.tokenizer_config["chat_template"] = file.text("tokenizer.chat_template");
  return result;
}

}  // namespace bough
