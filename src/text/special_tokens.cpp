#include "text/special_tokens.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kNames[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                       "pad_token", "cls_token", "mask_token"};

// Defaults of transformers' classes for byte pair encoding, in the order of kNames. nullptr: none.
struct ClassDefaults {
  std::string_view name;
  const char* tokens[std::size(kNames)];
};
constexpr ClassDefaults kClasses[] = {
    {"CodeLlamaTokenizer", {"<s>", "</s>", "<unk>"}},
    {"CohereTokenizer",
     {"<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<UNK>", "<SEP>", "<PAD>", "<CLS>", "<MASK_TOKEN>"}},
    {"GPT2Tokenizer", {"<|endoftext|>", "<|endoftext|>", "<|endoftext|>"}},
    {"GPTNeoXTokenizer", {"<|endoftext|>", "<|endoftext|>", "<|endoftext|>", nullptr, "<|padding|>"}},
    {"GemmaTokenizer", {"<bos>", "<eos>", "<unk>", nullptr, "<pad>", nullptr, "<mask>"}},
    {"LlamaTokenizer", {"<s>", "</s>", "<unk>"}},
    {"Qwen2Tokenizer", {nullptr, "<|endoftext|>", "<|endoftext|>", nullptr, "<|endoftext|>"}},
    {"Qwen3_5Tokenizer", {nullptr, "<|endoftext|>", "<|endoftext|>", nullptr, "<|endoftext|>"}},
};

// How transformers' AutoTokenizer chooses the class for a model_type: the class that it registers, and
// whether files that name another class are known to be wrong. "": the generic class, which has no defaults.
struct RegisteredClass {
  std::string_view model_type, class_name;
  bool overrides_files = false;
};
constexpr RegisteredClass kRegistered[] = {{"qwen3", "Qwen2Tokenizer"},
                                           {"qwen3_moe", "Qwen2Tokenizer"},
                                           {"qwen2", "Qwen2Tokenizer", true},
                                           {"gemma2", "GemmaTokenizer"},
                                           {"gemma3_text", "GemmaTokenizer"},
                                           {"mistral", ""},
                                           {"mixtral", ""},
                                           {"phi3", ""},
                                           {"olmo2", ""},
                                           {"olmoe", "GPTNeoXTokenizer"}};

// Keeps the order of keys, in which transformers numbers new tokens. read_json checks the file.
// parse_ordered_json would refuse numbers of more than 64 bits, which these files have (model_max_length).
OrderedJson read_object(const fs::path& file) {
  if (!fs::exists(file)) return OrderedJson::object();
  if (!read_json(file).is_object()) throw UserError(str(file.string(), ": expected a JSON object"));
  return OrderedJson::parse(read_file(file));
}

std::string text_at(const OrderedJson& object, const char* key) {
  if (!object.is_object()) return "";
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

std::string_view without_fast(std::string_view name) {
  return name.ends_with("Fast") ? name.substr(0, name.size() - 4) : name;
}

std::string_view tokenizer_class(const fs::path& directory, const std::string& named_by_tokenizer) {
  const OrderedJson config = read_object(directory / "config.json");
  const std::string model_type = text_at(config, "model_type");
  const std::string named =
      named_by_tokenizer.empty() ? text_at(config, "tokenizer_class") : named_by_tokenizer;
  const RegisteredClass* registered = nullptr;
  for (const RegisteredClass& candidate : kRegistered)
    if (candidate.model_type == model_type) registered = &candidate;
  std::string_view chosen = without_fast(named);
  if (registered && (chosen.empty() || registered->class_name.empty() || registered->overrides_files))
    chosen = registered->class_name;
  for (const ClassDefaults& known : kClasses)
    if (known.name == chosen) return known.name;
  return "";
}

// A token is a text or an object with the flags of AddedToken. nullopt: null.
std::optional<AddedToken> read_token(const OrderedJson& value, bool special, const std::string& where) {
  if (value.is_null()) return std::nullopt;
  AddedToken token;
  if (value.is_string()) {
    token.content = value.get<std::string>();
    token.special = true;
    return token;
  }
  if (!value.is_object() || text_at(value, "content").empty())
    throw UserError(str(where, ": expected a token: a text, or an object with `content`; got ",
                        quoted(dump_line(Json(value)))));
  const auto flag = [&](const char* name, bool otherwise) {
    const auto found = value.find(name);
    if (found == value.end() || found->is_null()) return otherwise;
    if (!found->is_boolean())
      throw UserError(
          str(where, ": ", name, " must be true or false, got ", quoted(dump_line(Json(*found)))));
    return found->get<bool>();
  };
  token.content = text_at(value, "content");
  token.special = special || flag("special", false);
  token.normalized = flag("normalized", !token.special);
  token.single_word = flag("single_word", false);
  token.lstrip = flag("lstrip", false);
  token.rstrip = flag("rstrip", false);
  return token;
}

int32_t read_id(std::string_view text, const std::string& where) {
  int32_t id = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), id);
  if (error != std::errc() || end != text.data() + text.size() || id < 0)
    throw UserError(str(where, ": expected a token id, got ", quoted(text)));
  return id;
}

bool names_a_token(const std::string& key, const OrderedJson& value) {
  const bool standard = std::ranges::find(kNames, key) != std::end(kNames);
  return !standard && key.ends_with("_token") && (value.is_string() || !text_at(value, "content").empty());
}

// Collects what the files say. `values`: the keys of tokenizer_config.json and, if it is read, of
// special_tokens_map.json.
class SpecialTokenReader {
 public:
  explicit SpecialTokenReader(const fs::path& directory) : directory_(directory) {
    values_ = read_object(config_file());
    for (const auto& [key, value] : values_.items()) origin_[key] = config_file().string();
    use_old_list_name();
    if (values_.contains("added_tokens_decoder")) {
      read_decoder();
    } else {
      read_map();
      read_added_tokens_file();
    }
  }

  SpecialTokens read() {
    const std::string_view class_name = tokenizer_class(directory_, text_at(values_, "tokenizer_class"));
    for (size_t i = 0; i < std::size(kNames); ++i) {
      const std::string name(kNames[i]);
      if (values_.contains(name)) {
        add_named(name, values_[name], where(name));
        if (name == "eos_token") result_.eos = text_at(result_.named, "eos_token");
        continue;
      }
      for (const ClassDefaults& known : kClasses)
        if (known.name == class_name && known.tokens[i])
          add_named(name, known.tokens[i], str("the defaults of ", known.name));
    }
    for (const auto& [key, value] : values_.items())
      if (names_a_token(key, value)) add_named(key, value, where(key));
    for (const char* key : {"extra_special_tokens", "model_specific_special_tokens"})
      if (const auto found = values_.find(key); found != values_.end() && found->is_object())
        for (const auto& [name, value] : found->items()) add_named(name, value, where(key));
    use_old_list_name();
    if (const auto found = values_.find("extra_special_tokens"); found != values_.end() && found->is_array())
      for (const OrderedJson& value : *found)
        if (auto token = read_token(value, true, where("extra_special_tokens")))
          add(std::move(*token), where("extra_special_tokens"));
    // transformers adds the tokens of added_tokens_decoder again, and makes those special that have a name.
    // Without this key it adds those of tokenizer.json again.
    const bool has_decoder = values_.contains("added_tokens_decoder");
    for (SpecialTokens::Added& entry : result_.added)
      for (const auto& [name, text] : result_.named.items())
        if (text == entry.token.content && !(has_decoder && entry.token.yields)) entry.named = true;
    return std::move(result_);
  }

 private:
  fs::path config_file() const { return directory_ / "tokenizer_config.json"; }
  std::string where(const std::string& key) const { return str(origin_.at(key), ": ", key); }

  // extra_special_tokens was additional_special_tokens before transformers 5.
  void use_old_list_name() {
    if (!values_.contains("additional_special_tokens") || values_.contains("extra_special_tokens")) return;
    values_["extra_special_tokens"] = values_["additional_special_tokens"];
    origin_["extra_special_tokens"] = origin_["additional_special_tokens"];
  }

  void add_named(const std::string& name, const OrderedJson& value, const std::string& from) {
    auto token = read_token(value, true, from);
    if (!token) return;
    result_.named[name] = token->content;
    add(std::move(*token), from);
  }
  // A token that an earlier list has keeps that list's flags.
  void add(AddedToken token, const std::string& from) {
    if (token.content.empty() || !contents_.insert(token.content).second) return;
    token.yields = true;
    result_.added.push_back({std::move(token), from});
  }
  void add_listed(AddedToken token, int32_t id, const std::string& from) {
    token.id = id;
    if (contents_.insert(token.content).second) result_.added.push_back({std::move(token), from});
  }
  void sort_listed() {
    std::ranges::stable_sort(result_.added, {}, [](const auto& entry) { return entry.token.id; });
  }

  void read_decoder() {
    const OrderedJson& decoder = values_["added_tokens_decoder"];
    const std::string from = where("added_tokens_decoder");
    if (!decoder.is_object()) throw UserError(str(from, ": expected an object of ids and tokens"));
    for (const auto& [id, value] : decoder.items())
      if (auto token = read_token(value, false, str(from, ": ", id)))
        add_listed(std::move(*token), read_id(id, from), from);
    sort_listed();
  }

  void read_map() {
    const fs::path file = directory_ / "special_tokens_map.json";
    const OrderedJson map = read_object(file);
    for (const auto& [key, value] : map.items()) {
      OrderedJson merged = value;
      if (key == "extra_special_tokens" && value.is_array()) {
        merged = values_.contains(key) && values_[key].is_array() ? values_[key] : OrderedJson::array();
        for (const OrderedJson& token : value)
          if (std::ranges::find(merged, token) == merged.end()) merged.push_back(token);
      }
      values_[key] = merged;
      origin_[key] = file.string();
    }
  }

  // Its tokens are special if a key names them. The list of additional tokens counts under its new name only.
  void read_added_tokens_file() {
    const fs::path file = directory_ / "added_tokens.json";
    std::set<std::string> special;
    for (const std::string_view name : kNames)
      if (values_.contains(name))
        if (const auto token = read_token(values_[std::string(name)], true, where(std::string(name))))
          special.insert(token->content);
    if (values_.contains("extra_special_tokens") && values_["extra_special_tokens"].is_array())
      for (const OrderedJson& value : values_["extra_special_tokens"])
        if (const auto token = read_token(value, true, where("extra_special_tokens")))
          special.insert(token->content);
    const OrderedJson ids = read_object(file);
    for (const auto& [content, id] : ids.items()) {
      if (!id.is_number_integer())
        throw UserError(str(file.string(), ": ", quoted(content), ": expected a token id, got ",
                            quoted(dump_line(Json(id)))));
      AddedToken token;
      token.content = content;
      token.special = special.contains(content);
      token.normalized = !token.special;
      token.yields = true;
      add_listed(std::move(token), read_id(id.dump(), file.string()), file.string());
    }
    sort_listed();
  }

  fs::path directory_;
  OrderedJson values_;
  std::map<std::string, std::string> origin_;  // the file of each key
  std::set<std::string> contents_;
  SpecialTokens result_;
};

}  // namespace

SpecialTokens load_special_tokens(const fs::path& directory) {
  return SpecialTokenReader(directory).read();
}

}  // namespace bough
