#include "models/chat_template.h"

#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "models/chat_template_jinja.h"

namespace bough {
namespace {

constexpr std::string_view kStart = "<|im_start|>";
constexpr std::string_view kEnd = "<|im_end|>\n";
constexpr std::string_view kGenerationPrompt = "<|im_start|>assistant\n";

std::string chatml(std::span<const Message> messages, bool add_generation_prompt) {
  std::string text;
  for (const Message& message : messages) text += str(kStart, message.role, "\n", message.content, kEnd);
  if (add_generation_prompt) text += kGenerationPrompt;
  return text;
}

// Returns the text between the first `prefix` and the last `suffix`, or nothing if they are not there.
std::optional<std::string> between(std::string_view text, std::string_view prefix, std::string_view suffix) {
  if (text.size() < prefix.size() + suffix.size() || !text.starts_with(prefix) || !text.ends_with(suffix))
    return std::nullopt;
  return std::string(text.substr(prefix.size(), text.size() - prefix.size() - suffix.size()));
}

// Returns the content of a lone system message, or nothing if `text` is not one.
std::optional<std::string> system_message(std::string_view text) {
  const auto content = between(text, str(kStart, "system\n"), kEnd);
  return content && content->find("<|im_") == std::string::npos ? content : std::nullopt;
}

// Special tokens that a template may name, as transformers passes them.
Json special_tokens(const Json& config) {
  Json variables = Json::object();
  for (const char* name :
       {"bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"}) {
    const Json token = config.value(name, Json());
    if (token.is_string()) variables[name] = token;
    else if (token.is_object() && token.contains("content")) variables[name] = token["content"];
  }
  return variables;
}

// Reads the `chat_template` of tokenizer_config.json: a text, or a list of named ones.
std::string template_of(const Json& config, const std::string& where) {
  const Json value = config.value("chat_template", Json());
  if (value.is_string()) return value;
  if (value.is_array())
    for (const Json& entry : value)
      if (entry.is_object() && entry.value("name", Json()) == "default" &&
          entry.value("template", Json()).is_string())
        return entry["template"];
  throw UserError(
      str(where,
          ": no chat template (chat_template, a text, or a list with one named default); use plain "
          "prompts (`prompt` instead of `messages`)"));
}

}  // namespace

struct ChatTemplate::Program {
  std::vector<jinja::Statement> statements;
  Json variables;
};

std::string_view chatml_template() {
  return "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
         "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% "
         "endif %}";
}

ChatTemplate::ChatTemplate() : ChatTemplate(chatml_template(), Json::object(), "ChatML") {}

ChatTemplate::ChatTemplate(std::string_view source, Json variables, std::string name)
    : name_(std::move(name)) {
  program_ = std::make_shared<const Program>(Program{jinja::parse(source, name_), std::move(variables)});
  check_is_chatml();
}

ChatTemplate ChatTemplate::from_text(std::string_view source, const std::string& name) {
  return ChatTemplate(source, Json::object(), name);
}

ChatTemplate ChatTemplate::from_directory(const std::filesystem::path& directory) {
  const std::filesystem::path config_file = directory / "tokenizer_config.json";
  const std::filesystem::path jinja_file = directory / "chat_template.jinja";
  const bool has_jinja = std::filesystem::exists(jinja_file);
  if (!has_jinja && !std::filesystem::exists(config_file))
    throw UserError(str(directory.string(),
                        ": no chat template (neither chat_template.jinja nor tokenizer_config.json); "
                        "use plain prompts (`prompt` instead of `messages`)"));
  const Json config = std::filesystem::exists(config_file) ? read_json(config_file) : Json::object();
  if (!config.is_object()) throw UserError(str(config_file.string(), ": expected a JSON object"));
  if (has_jinja) return ChatTemplate(read_file(jinja_file), special_tokens(config), jinja_file.string());
  return ChatTemplate(template_of(config, config_file.string()), special_tokens(config),
                      config_file.string());
}

// Probes are conversations of every shape that is used: with and without a system message, one and several
// turns, to be answered and complete. A template that passes may still treat other contents specially
// (<think>), as its model expects.
void ChatTemplate::check_is_chatml() try {
  const Message system{"system", "Sys."}, user{"user", "One."}, assistant{"assistant", "Two."},
      again{"user", "Three."};
  const auto expect = [&](std::span<const Message> messages, bool prompt, bool has_default) {
    const std::string wanted = str(begin_, has_default ? default_block_ : "", chatml(messages, prompt));
    const std::string got = run(messages, prompt);
    if (got == wanted) return;
    // Qwen3 puts an empty <think> block into an answer that ends the conversation.
    if (messages.back().role == "assistant" && !prompt) {
      const std::string before =
          wanted.substr(0, wanted.size() - messages.back().content.size() - kEnd.size());
      const auto inserted = between(got, before, messages.back().content + std::string(kEnd));
      if (inserted == "<think>\n\n</think>\n\n") return;
    }
    throw UserError(str(name_, ": the chat template is not ChatML: a probe conversation gives ",
                        bough::quoted(got, 60), ", expected ", bough::quoted(wanted, 60),
                        ". Only ChatML is supported; use plain prompts (`prompt` instead of `messages`)"));
  };
  const std::string lone = run(std::vector{user}, true);
  const Json bos = program_->variables.value("bos_token", Json());
  if (bos.is_string() && lone.starts_with(bos.get_ref<const std::string&>())) begin_ = bos;
  const auto front = between(lone, begin_, chatml(std::vector{user}, true));
  if (const auto content = system_message(front.value_or(""))) {
    default_system_ = *content;
    default_block_ = *front;
  }
  expect(std::vector{user}, true, true);
  expect(std::vector{user}, false, true);
  expect(std::vector{system, user}, true, false);
  expect(std::vector{user, assistant}, false, true);
  expect(std::vector{user, assistant, again}, true, true);
  expect(std::vector{system, user, assistant, again}, true, false);
  expect(std::vector{system, user, assistant, again, assistant, again}, true, false);
  expect(std::vector{system, user, assistant, again, assistant}, false, false);
} catch (const UserError& error) {
  const std::string_view message = error.what();
  if (message.find("ChatML") != std::string_view::npos) throw;
  throw UserError(str(message,
                      ": a template that Bough cannot run. Only ChatML is supported; use plain prompts "
                      "(`prompt` instead of `messages`)"));
}

std::string ChatTemplate::run(std::span<const Message> messages, bool add_generation_prompt) const {
  Json list = Json::array();
  for (const Message& message : messages)
    list.push_back({{"role", message.role}, {"content", message.content}});
  Json variables = program_->variables;
  variables["messages"] = std::move(list);
  variables["add_generation_prompt"] = add_generation_prompt;
  variables["tools"] = nullptr;
  variables["documents"] = nullptr;
  return jinja::render(program_->statements, variables, name_);
}

std::string ChatTemplate::render(std::span<const Message> messages, bool add_generation_prompt) const {
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string& role = messages[i].role;
    if (role != "system" && role != "user" && role != "assistant")
      throw UserError(str("message ", i, " of a conversation: the role is ", bough::quoted(role),
                          ", expected system, user or assistant"));
  }
  return run(messages, add_generation_prompt);
}

}  // namespace bough
