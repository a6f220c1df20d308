#include "text/stop_tokens.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/error.h"
#include "base/json.h"
#include "text/chat_template.h"
#include "text/message.h"
#include "text/special_tokens.h"

namespace bough {
namespace {

int32_t read_stop_token(const Json& value, const std::string& file) {
  if (!value.is_number_integer() || value < 0 || value > std::numeric_limits<int32_t>::max())
    throw UserError(str(file, ", key 'eos_token_id': got ", quoted(dump_line(value)),
                        "; expected a token id or a list of them"));
  return value.get<int32_t>();
}

// eos_token_id of the first file that has it.
std::vector<int32_t> read_eos_token_ids(const std::filesystem::path& directory) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::filesystem::path file = directory / name;
    if (!std::filesystem::exists(file)) continue;
    const Json json = read_json(file);
    if (!json.is_object())
      throw UserError(str(file.string(), ": got ", quoted(dump_line(json)), "; expected an object"));
    const Json ids = json.value("eos_token_id", Json());
    if (ids.is_null()) continue;
    std::vector<int32_t> tokens;
    for (const Json& id : ids.is_array() ? ids : Json::array({ids}))
      tokens.push_back(read_stop_token(id, file.string()));
    return tokens;
  }
  return {};
}

// The token that ends the assistant's turn. nullopt if there is no template, if the template writes no
// special token after the content (GLM's turns end when the next one begins), or if it refuses a plain
// conversation.
std::optional<int32_t> end_of_turn(const std::filesystem::path& directory, const Tokenizer& tokenizer) {
  std::optional<std::string> text;
  try {
    Conversation chat;
    chat.messages = {message_of("user", "Hi."), message_of("assistant", "")};
    text = text_after_content(ChatTemplate::from_directory(directory), chat);
  } catch (const UserError&) {
  }
  if (!text) return std::nullopt;
  const std::vector<int32_t> tail = tokenizer.encode_continuation(*text);
  const auto found = std::ranges::find_if(tail, [&](int32_t id) { return tokenizer.is_special(id); });
  return found == tail.end() ? std::nullopt : std::optional(*found);
}

}  // namespace

std::vector<int32_t> load_stop_tokens(const std::filesystem::path& directory,
                                      const std::optional<Tokenizer>& tokenizer) {
  std::vector<int32_t> tokens;
  const auto add = [&](std::optional<int32_t> token) {
    if (token && std::ranges::find(tokens, *token) == tokens.end()) tokens.push_back(*token);
  };
  for (const int32_t token : read_eos_token_ids(directory)) add(token);
  if (!tokenizer) return tokens;
  // A token without a row in the embedding is never generated.
  const std::filesystem::path config = directory / "config.json";
  const Json vocab_size =
      std::filesystem::exists(config) ? read_json(config).value("vocab_size", Json()) : Json();
  const auto add_if_generated = [&](std::optional<int32_t> token) {
    if (token && (!vocab_size.is_number() || *token < vocab_size)) add(token);
  };
  add_if_generated(tokenizer->token_to_id(load_special_tokens(directory).eos));
  add_if_generated(end_of_turn(directory, *tokenizer));
  return tokens;
}

}  // namespace bough
