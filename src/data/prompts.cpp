#include "data/prompts.h"

#include "base/error.h"
#include "base/file.h"
#include "text/message.h"

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

// The prompt or conversation of a line, which is taken out of it.
Problem take_problem(OrderedJson& line, const std::string& where) {
  Problem problem;
  const char* const key = line.contains("prompt") ? "prompt" : "messages";
  const OrderedJson given = line[key];
  // In some files `prompt` is a list of messages.
  const bool is_text = key == std::string_view("prompt") && !given.is_array();
  try {
    if (const auto tools = line.find("tools"); tools != line.end()) problem.tools = template_tools(*tools);
    if (!is_text && given.is_array()) problem.messages = template_messages(given, key);
  } catch (const UserError& error) {
    throw UserError(where + error.what());
  }
  line.erase("tools");
  if (is_text) {
    if (!given.is_string()) throw UserError(str(where, "prompt: expected a text, got ", given.type_name()));
    problem.prompt = given.get<std::string>();
    line.erase("prompt");
    if (problem.prompt.empty()) throw UserError(str(where, "prompt: is empty; expected a text"));
    if (!problem.tools.is_null())
      throw UserError(
          str(where,
              "tools: a plain prompt shows no tools to the model; write the line with messages, so "
              "that the chat template shows them, or leave the tools out"));
    return problem;
  }
  if (problem.messages.empty())
    throw UserError(str(where, key, ": expected a list of messages, got ", quoted(dump_ordered(given), 40)));
  if (problem.messages.back()["role"] == "assistant")
    throw UserError(str(where, key,
                        ": expected a message for the assistant to answer at the end, got one of ",
                        "the assistant"));
  line.erase(key);
  return problem;
}

Prompt parse_prompt(OrderedJson line, const std::string& where, int64_t line_number,
                    const PromptReadOptions& options) {
  if (!line.is_object()) {
    throw UserError(str(where, "expected an object such as {\"prompt\": \"...\"}, got ", line.type_name()));
  }
  const bool has_text = line.contains("prompt"), has_ids = line.contains("input_ids");
  const bool has_messages = !has_text && !has_ids && line.contains("messages");
  if (has_text == has_ids && !has_messages) {
    throw UserError(str(where, "expected one of the fields prompt (text), messages and input_ids, got ",
                        has_text ? "both prompt and input_ids" : "neither"));
  }
  const std::string given = has_ids ? "input_ids" : has_text ? "prompt" : "messages";
  Prompt prompt;
  if (given != "input_ids") {
    if (!options.encode)
      throw UserError(str(where, given, ": the model has no tokenizer.json to encode it; give input_ids"));
    const Problem problem = take_problem(line, where);
    try {
      prompt.input_ids = options.encode(problem);
    } catch (const UserError& error) {
      throw UserError(where + error.what());
    }
  }
  prompt.extra = Json(line);
  prompt.group = parse_group(prompt.extra, where, line_number);
  if (given == "input_ids") {
    prompt.input_ids = parse_ids(prompt.extra["input_ids"], where, options.vocab_size);
    prompt.extra.erase("input_ids");
  }
  if (prompt.input_ids.empty())
    throw UserError(str(where, given, ": is empty; generation needs at least one token"));
  if (options.max_length > 0 && std::ssize(prompt.input_ids) >= options.max_length)
    throw UserError(str(where, given, ": got ", prompt.input_ids.size(),
                        " tokens, but the model's context is ", options.max_length,
                        options.max_length_reason.empty() ? "" : str(" by ", options.max_length_reason),
                        ", and a response needs at least one; shorten it"));
  return prompt;
}

}  // namespace

std::vector<Prompt> read_prompts(const std::filesystem::path& path, const PromptReadOptions& options) {
  std::vector<Prompt> prompts;
  for_each_line(read_file(path), [&](std::string_view line, int64_t number) {
    prompts.push_back(parse_prompt(parse_ordered_json(line, path.string(), number),
                                   str(path.string(), ":", number, ": "), number, options));
  });
  if (prompts.empty()) {
    throw UserError(str(path.string(),
                        ": no prompts; expected one JSON object per line, {\"prompt\": \"...\"}, "
                        "{\"messages\": [...]} or {\"input_ids\": [...]}"));
  }
  return prompts;
}

}  // namespace bough
