#include "data/prompts.h"

#include "base/error.h"
#include "base/file.h"

namespace bough {

namespace {

std::vector<int32_t> parse_ids(const Json& ids, const std::string& where, int64_t vocab_size) {
  if (!ids.is_array())
    throw UserError(str(where, "input_ids: expected a list of token ids, got ", ids.type_name()));
  std::vector<int32_t> tokens;
  tokens.reserve(ids.size());
  const int64_t end = vocab_size > 0 ? vocab_size : int64_t{INT32_MAX};
  for (size_t i = 0; i < ids.size(); ++i) {
    const Json& id = ids[i];
    const bool is_valid = id.is_number_unsigned() ? id.get<uint64_t>() < static_cast<uint64_t>(end) : false;
    if (!is_valid) {
      throw UserError(str(where, "input_ids, position ", i, ": expected a token id from 0 to ", end - 1,
                          ", got ", quoted(dump_line(id)),
                          vocab_size > 0 ? " (does the tokenizer belong to the model?)" : ""));
    }
    tokens.push_back(static_cast<int32_t>(id.get<uint64_t>()));
  }
  return tokens;
}

std::string parse_group(Json& line, const std::string& where, int64_t line_number) {
  for (const char* field : {"group", "id"}) {
    const auto found = line.find(field);
    if (found == line.end()) continue;
    if (!found->is_string() && !found->is_number_integer()) {
      throw UserError(str(where, field, ": expected a text or an integer, got ", found->type_name()));
    }
    std::string group = found->is_string() ? found->get<std::string>() : dump_line(*found);
    line.erase(found);
    return group;
  }
  return std::to_string(line_number);
}

Prompt parse_prompt(Json line, const std::string& where, int64_t line_number,
                    const PromptReadOptions& options) {
  if (!line.is_object()) {
    throw UserError(str(where, "expected an object such as {\"prompt\": \"...\"}, got ", line.type_name()));
  }
  const bool has_text = line.contains("prompt"), has_ids = line.contains("input_ids");
  if (has_text == has_ids) {
    throw UserError(str(where, "expected one of the fields prompt (text) and input_ids, got ",
                        has_text ? "both" : "neither"));
  }
  Prompt prompt;
  prompt.group = parse_group(line, where, line_number);
  if (has_ids) {
    prompt.input_ids = parse_ids(line["input_ids"], where, options.vocab_size);
    line.erase("input_ids");
  } else {
    const Json& text = line["prompt"];
    if (!text.is_string()) throw UserError(str(where, "prompt: expected a text, got ", text.type_name()));
    if (!options.encode) {
      throw UserError(
          str(where, "prompt: the model has no tokenizer.json to encode the text; give input_ids"));
    }
    prompt.input_ids = options.encode(text.get<std::string>());
    line.erase("prompt");
  }
  if (prompt.input_ids.empty()) {
    throw UserError(
        str(where, has_ids ? "input_ids" : "prompt", ": is empty; generation needs at least one token"));
  }
  prompt.extra = std::move(line);
  return prompt;
}

}  // namespace

std::vector<Prompt> read_prompts(const std::filesystem::path& path, const PromptReadOptions& options) {
  std::vector<Prompt> prompts;
  for_each_json_line(read_file(path), path.string(), [&](Json line, int64_t number) {
    prompts.push_back(parse_prompt(std::move(line), str(path.string(), ":", number, ": "), number, options));
  });
  if (prompts.empty()) {
    throw UserError(str(path.string(),
                        ": no prompts; expected one JSON object per line, {\"prompt\": \"...\"} or "
                        "{\"input_ids\": [...]}"));
  }
  return prompts;
}

}  // namespace bough
