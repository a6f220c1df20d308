#include "text/tokenizer.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "text/pre_tokenizer.h"
#include "text/special_tokens.h"
#include "text/tokenizer_added.h"
#include "text/tokenizer_bpe.h"
#include "text/tokenizer_json.h"
#include "text/tokenizer_normalizer.h"
#include "text/unicode_text.h"

namespace bough {
namespace {

using tokenizer_json::shown;

// Tokens that the post_processor puts before and after the text.
struct Template {
  std::vector<int32_t> before, after;
};

// Reads the entry `single` of a TemplateProcessing: special tokens around exactly one Sequence A.
Template read_template(const Json& description, const std::string& where) {
  const std::string in = where + ": post_processor TemplateProcessing";
  Template result;
  bool seen_text = false;
  const Json single = description.value("single", Json());
  if (!single.is_array()) throw UserError(str(in, ": expected a list `single`, got ", shown(single)));
  for (const Json& part : single) {
    const bool is_text = part.is_object() && part.contains("Sequence");
    const bool is_token = part.is_object() && part.contains("SpecialToken");
    if (is_text && part["Sequence"].value("id", Json()) == "A" && !seen_text) {
      seen_text = true;
      continue;
    }
    const Json name = is_token ? part["SpecialToken"].value("id", Json()) : Json();
    const Json tokens = description.value("special_tokens", Json());
    if (!name.is_string() || !tokens.is_object() || !tokens.contains(name.get<std::string>()))
      throw UserError(
          str(in, ": unsupported part ", shown(part), ", expected one Sequence A and special tokens"));
    const Json ids = tokens[name.get<std::string>()].value("ids", Json());
    if (!ids.is_array() ||
        !std::all_of(ids.begin(), ids.end(), [](const Json& id) { return id.is_number_unsigned(); }))
      throw UserError(str(in, ": special token ", shown(name), ": expected a list of ids, got ", shown(ids)));
    for (const Json& id : ids) (seen_text ? result.after : result.before).push_back(id.get<int32_t>());
  }
  if (!seen_text) throw UserError(str(in, ": `single` has no Sequence A"));
  return result;
}

void read_post_processor(const Json& description, const std::string& where, Template& out) {
  if (description.is_null()) return;
  const std::string type = tokenizer_json::type_of(description, where + ": post_processor");
  if (type == "ByteLevel") return;  // changes offsets only
  if (type == "Sequence" && description.contains("processors") && description["processors"].is_array()) {
    for (const Json& part : description["processors"]) read_post_processor(part, where, out);
  } else if (type == "TemplateProcessing") {
    if (!out.before.empty() || !out.after.empty())
      throw UserError(str(where, ": post_processor: more than one TemplateProcessing is not supported"));
    out = read_template(description, where);
  } else {
    throw UserError(
        str(where, ": post_processor ", bough::quoted(type),
            " is not supported. Supported are ByteLevel, TemplateProcessing and a Sequence of these: use a "
            "model with such a tokenizer"));
  }
}

AddedToken read_added_token(const Json& entry, const std::string& where) {
  AddedToken token;
  if (!entry.is_object() || !entry.contains("content") || !entry["content"].is_string() ||
      !entry.contains("id") || !entry["id"].is_number_unsigned() || entry["id"].get<uint64_t>() >= INT32_MAX)
    throw UserError(
        str(where, ": added_tokens: expected an object with `content` and `id`, got ", shown(entry)));
  token.content = entry["content"];
  token.id = entry["id"];
  const auto flag = [&](const char* name) {
    return tokenizer_json::flag(entry, name, false, where + ": added_tokens: " + shown(entry));
  };
  token.special = flag("special");
  token.normalized = flag("normalized");
  token.single_word = flag("single_word");
  token.lstrip = flag("lstrip");
  token.rstrip = flag("rstrip");
  return token;
}

}  // namespace

struct Tokenizer::Data {
  explicit Data(BytePairEncoder encoder) : encoder(std::move(encoder)) {}

  // Tokens are stored by id, because decoding looks them up by id. Few ids have no token.
  struct Token {
    std::string prepared;  // input of the decoder
    std::string bytes;     // bytes inside a text
    bool special = false;
    bool exists = false;  // false for holes
  };

  std::vector<SpecialTokens::Added> merge_added_tokens(const Json& list,
                                                       const std::vector<SpecialTokens::Added>& others,
                                                       const std::string& where);
  void add_tokens(std::vector<SpecialTokens::Added> list);
  void set_token(int32_t id, std::string_view spelling, bool special);
  void encode_text(std::string_view text, bool continues, std::vector<int32_t>& ids) const;
  // Returns the token to decode. nullptr if no token has this id, or if skip_special leaves it out.
  const Token* decodable(int32_t id, bool skip_special) const {
    if (id < 0 || static_cast<size_t>(id) >= tokens.size()) return nullptr;
    const Token& token = tokens[static_cast<size_t>(id)];
    return token.exists && !(skip_special && token.special) ? &token : nullptr;
  }

  BytePairEncoder encoder;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  TokenDecoder decoder;
  Template around;
  AddedTokenFinder in_raw_text, in_normalized_text;
  std::unordered_map<std::string, int32_t> added_ids;
  std::unordered_set<std::string> special_contents;
  std::vector<Token> tokens;
};

void Tokenizer::Data::set_token(int32_t id, std::string_view spelling, bool special) {
  if (static_cast<size_t>(id) >= tokens.size()) tokens.resize(static_cast<size_t>(id) + 1);
  tokens[id] = {decoder.prepare(spelling), "", special, true};
  tokens[id].bytes = decoder.bytes_inside(tokens[id].prepared);
}

// The tokens of `list`, the added_tokens of tokenizer.json, and of `others`.
std::vector<SpecialTokens::Added> Tokenizer::Data::merge_added_tokens(
    const Json& list, const std::vector<SpecialTokens::Added>& others, const std::string& where) {
  std::vector<SpecialTokens::Added> merged;
  std::unordered_map<std::string, size_t> index;
  if (!list.is_null() && !list.is_array())
    throw UserError(str(where, ": added_tokens: expected a list, got ", shown(list)));
  for (const Json& entry : list) {
    const AddedToken token = read_added_token(entry, where);
    if (token.content.empty()) continue;
    if (!index.emplace(token.content, merged.size()).second)
      throw UserError(str(where, ": added_tokens: ", bough::quoted(token.content), " occurs twice"));
    if (token.special) special_contents.insert(token.content);
    merged.push_back({token, where + ": added_tokens"});
  }
  for (SpecialTokens::Added other : others) {
    const auto [found, is_new] = index.emplace(other.token.content, merged.size());
    if (!is_new) {
      const SpecialTokens::Added& known = merged[found->second];
      if (other.token.id >= 0 && other.token.id != known.token.id)
        throw UserError(str(other.where, ": ", bough::quoted(other.token.content), " has id ", other.token.id,
                            ", but ", known.token.id, " in ", known.where,
                            "; expected the files of one tokenizer: copy them again"));
      other.token.id = known.token.id;
      if (other.token.yields) {
        if (!other.named) continue;
        other.token = known.token;
      }
    }
    if (other.named) other.token.special = true;
    // Decoding leaves out a token if any file says that it is special.
    if (other.token.special) special_contents.insert(other.token.content);
    if (is_new) merged.push_back(std::move(other));
    else merged[found->second] = std::move(other);
  }
  return merged;
}

void Tokenizer::Data::add_tokens(std::vector<SpecialTokens::Added> list) {
  const auto& vocabulary = encoder.vocabulary();
  std::unordered_set<std::string> patterns[2];
  int64_t next_id = static_cast<int64_t>(vocabulary.size());
  std::vector<std::pair<AddedToken, std::string>> added;  // each token with the text that is searched for
  for (SpecialTokens::Added& entry : list) {
    AddedToken& token = entry.token;
    const std::string& where = entry.where;
    TextStart anywhere;
    const std::string pattern =
        token.normalized ? normalizer.normalize(token.content, anywhere) : token.content;
    if (pattern.empty())
      throw UserError(str(where, ": ", bough::quoted(token.content),
                          " is empty after normalization; set its `normalized` to false"));
    if (!patterns[token.normalized].insert(pattern).second)
      throw UserError(str(where, ": ", bough::quoted(token.content), " occurs twice"));
    const auto known = vocabulary.find(token.content);
    const int64_t id = known != vocabulary.end() ? known->second : next_id++;
    // `tokenizers` numbers added tokens itself. If the file has other numbers, ids would differ from those of
    // `tokenizers`.
    if (token.id >= 0 && token.id != id)
      throw UserError(str(where, ": ", bough::quoted(token.content), " has id ", token.id, ", expected ", id,
                          known != vocabulary.end() ? " from the vocabulary" : ", the next free id"));
    token.id = static_cast<int32_t>(id);
    added_ids.emplace(token.content, token.id);
    (token.normalized ? in_normalized_text : in_raw_text).add(pattern, token);
    added.emplace_back(token, pattern);
    if (token.id < static_cast<int64_t>(tokens.size()) && known == vocabulary.end() &&
        tokens[token.id].exists)
      throw UserError(str(where, ": the id ", token.id, " of ", bough::quoted(token.content),
                          " belongs to another token"));
  }
  // `tokenizers` outputs the normalized content (`pattern`) when it decodes, and looks that text up in the
  // set of special contents. A special token whose normalized content differs therefore counts as plain.
  for (const auto& [token, pattern] : added) set_token(token.id, pattern, special_contents.contains(pattern));
}

Tokenizer Tokenizer::make(std::string_view json_text, const std::string& name, const SpecialTokens& others) {
  const Json file = parse_json(json_text, name);
  if (!file.is_object() || !file.contains("model"))
    throw UserError(
        str(name, ": expected an object with `model`, the tokenizer.json of the tokenizers library"));
  PreTokenizer pre_tokenizer = PreTokenizer::from_json(file.value("pre_tokenizer", Json()), name);
  auto data =
      std::make_shared<Data>(BytePairEncoder::from_json(file["model"], pre_tokenizer.byte_level(), name));
  data->pre_tokenizer = std::move(pre_tokenizer);
  data->normalizer = Normalizer::from_json(file.value("normalizer", Json()), name);
  read_post_processor(file.value("post_processor", Json()), name, data->around);
  data->decoder = TokenDecoder::from_json(file.value("decoder", Json()), name);
  // A vocabulary with a few tokens and one huge id must not allocate a table of that size.
  const int64_t most_ids = 16 * static_cast<int64_t>(data->encoder.vocabulary().size()) + 65536;
  for (const auto& [spelling, id] : data->encoder.vocabulary()) {
    if (id >= most_ids)
      throw UserError(str(name, ": model: vocab: the id ", id, " of ", bough::quoted(spelling),
                          " is too large for this vocabulary"));
    data->set_token(id, spelling, false);
  }
  data->add_tokens(data->merge_added_tokens(file.value("added_tokens", Json()), others.added, name));
  for (const auto* ids : {&data->around.before, &data->around.after})
    for (const int32_t id : *ids)
      if (id < 0 || id >= static_cast<int64_t>(data->tokens.size()))
        throw UserError(str(name, ": post_processor: no token has the id ", id));
  return Tokenizer(std::move(data));
}

Tokenizer Tokenizer::from_json(std::string_view json_text, const std::string& name) {
  return make(json_text, name, {});
}

Tokenizer Tokenizer::load(const std::filesystem::path& file) {
  if (!std::filesystem::is_directory(file)) return from_json(read_file(file), file.string());
  const std::filesystem::path path = file / "tokenizer.json";
  return make(read_file(path), path.string(), load_special_tokens(file));
}

void Tokenizer::Data::encode_text(std::string_view text, bool continues, std::vector<int32_t>& ids) const {
  const auto added = [&](const AddedToken& token) { ids.push_back(token.id); };
  const auto word = [&](std::string_view word) { encoder.encode(word, ids); };
  in_raw_text.split(
      text,
      [&](std::string_view stretch) {
        const bool first = stretch.data() == text.data();
        TextStart start{first ? unicode::decode(stretch).length : 0, first && continues};
        const std::string normalized = normalizer.empty() ? "" : normalizer.normalize(stretch, start);
        const std::string_view whole = normalizer.empty() ? stretch : normalized;
        in_normalized_text.split(
            whole,
            [&](std::string_view part) {
              pre_tokenizer.split(part, start.at(static_cast<size_t>(part.data() - whole.data())), word);
            },
            added);
      },
      added);
}

std::vector<int32_t> Tokenizer::encode_after(std::string_view text, bool continues) const {
  if (const auto bad = unicode::find_invalid(text))
    throw UserError(
        str("text to encode: not valid UTF-8 at byte ", *bad, ": ", bough::quoted(text.substr(*bad, 16))));
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 8);
  data_->encode_text(text, continues, ids);
  return ids;
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  std::vector<int32_t> ids = encode_after(text, false);
  if (!add_special_tokens) return ids;
  ids.insert(ids.begin(), data_->around.before.begin(), data_->around.before.end());
  ids.insert(ids.end(), data_->around.after.begin(), data_->around.after.end());
  return ids;
}

std::vector<int32_t> Tokenizer::encode_continuation(std::string_view text) const {
  return encode_after(text, true);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  std::string text;
  TokenDecoder::Run run(data_->decoder);
  for (const int32_t id : ids)
    if (const Data::Token* token = data_->decodable(id, skip_special_tokens)) run.push(token->prepared, text);
  run.finish(text);
  return text;
}

int64_t Tokenizer::vocab_size() const {
  return static_cast<int64_t>(data_->tokens.size());
}

std::optional<int32_t> Tokenizer::token_to_id(std::string_view token) const {
  const std::string key(token);
  if (const auto added = data_->added_ids.find(key); added != data_->added_ids.end()) return added->second;
  const auto& vocabulary = data_->encoder.vocabulary();
  const auto known = vocabulary.find(key);
  return known == vocabulary.end() ? std::nullopt : std::optional(known->second);
}

const std::string& Tokenizer::id_to_bytes(int32_t id) const {
  static const std::string none;
  return id >= 0 && id < vocab_size() ? data_->tokens[id].bytes : none;
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && data_->tokens[id].special;
}

StreamDecoder::StreamDecoder(Tokenizer tokenizer, bool skip_special_tokens)
    : tokenizer_(std::move(tokenizer)),
      skip_special_tokens_(skip_special_tokens),
      run_(tokenizer_.data_->decoder) {}

std::string StreamDecoder::push(int32_t id) {
  std::string text;
  if (const auto* token = tokenizer_.data_->decodable(id, skip_special_tokens_))
    run_.push(token->prepared, text);
  return text;
}

std::string StreamDecoder::finish() {
  std::string text;
  run_.finish(text);
  return text;
}

}  // namespace bough
