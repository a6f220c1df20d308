#include "text/chat_template.h"

#include <mutex>

#include "base/error.h"
#include "base/file.h"
#include "text/chat_template_jinja.h"
#include "text/output_parser.h"
#include "text/special_tokens.h"

namespace bough {
namespace {

// Returns the template named `name` in `chat_template` of tokenizer_config.json. The value is a text (the
// default template) or a list of named templates.
std::optional<std::string> template_of(const Json& config, std::string_view name) {
  const Json value = config.value("chat_template", Json());
  if (value.is_string() && name == "default") return value;
  if (value.is_array())
    for (const Json& entry : value)
      if (entry.is_object() && entry.value("name", Json()) == name &&
          entry.value("template", Json()).is_string())
        return entry["template"];
  return std::nullopt;
}

}  // namespace

struct ChatTemplate::Program {
  Program(std::string_view source, std::string given_name, OrderedJson given_variables)
      : name(std::move(given_name)),
        text(source),
        statements(jinja::parse(source, name)),
        variables(std::move(given_variables)) {}

  std::string name, text;
  jinja::Block statements;
  OrderedJson variables;
};

struct ChatTemplate::Form {
  std::once_flag once;
  MessageForm form;
};

ChatTemplate::ChatTemplate(std::shared_ptr<const Program> program, std::shared_ptr<const Program> with_tools)
    : program_(std::move(program)), with_tools_(std::move(with_tools)), form_(std::make_shared<Form>()) {}

std::string ChatTemplate::tool_call_parser() const {
  return tool_call_parser_of((with_tools_ ? with_tools_ : program_)->text);
}

const MessageForm& ChatTemplate::message_form() const {
  std::call_once(form_->once, [this] { form_->form = find_message_form(*this); });
  return form_->form;
}

std::string_view chatml_template() {
  return "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
         "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% "
         "endif %}";
}

ChatTemplate::ChatTemplate() : ChatTemplate(from_text(chatml_template(), "ChatML")) {}

ChatTemplate ChatTemplate::from_text(std::string_view source, const std::string& name,
                                     OrderedJson variables) {
  return ChatTemplate(std::make_shared<const Program>(source, name, std::move(variables)), nullptr);
}

ChatTemplate ChatTemplate::from_directory(const std::filesystem::path& directory) {
  const std::filesystem::path config_file = directory / "tokenizer_config.json";
  const Json config = std::filesystem::exists(config_file) ? read_json(config_file) : Json::object();
  if (!config.is_object()) throw UserError(str(config_file.string(), ": expected a JSON object"));
  const OrderedJson variables = load_special_tokens(directory).named;
  // A template in a file of its own takes precedence over the template in tokenizer_config.json.
  const auto read = [&](const std::filesystem::path& file,
                        std::string_view name) -> std::shared_ptr<const Program> {
    if (std::filesystem::exists(directory / file))
      return std::make_shared<const Program>(read_file(directory / file), (directory / file).string(),
                                             variables);
    const auto source = template_of(config, name);
    if (!source) return nullptr;
    return std::make_shared<const Program>(*source, config_file.string(), variables);
  };
  auto program = read("chat_template.jinja", "default");
  auto with_tools = read("additional_chat_templates/tool_use.jinja", "tool_use");
  if (!program)
    throw UserError(
        str(directory.string(),
            ": no chat template: no chat_template.jinja, and in tokenizer_config.json no chat_template "
            "(a text, or a list with one named default); use plain prompts (`prompt` instead of "
            "`messages`)"));
  return ChatTemplate(std::move(program), std::move(with_tools));
}

std::string ChatTemplate::render(const Conversation& conversation) const {
  const bool use_tools = with_tools_ && !conversation.tools.is_null();
  const Program& program = use_tools ? *with_tools_ : *program_;
  OrderedJson variables = program.variables;
  for (const auto& [name, value] : conversation.variables.items()) variables[name] = value;
  variables["messages"] = conversation.messages;
  variables["tools"] = conversation.tools;
  variables["documents"] = conversation.documents;
  variables["add_generation_prompt"] = conversation.add_generation_prompt;
  jinja::Value values;
  try {
    values = jinja::Value::from_json(variables);
  } catch (const jinja::Error& error) {
    throw UserError(str(program.name, ": chat template: the conversation has ", error.what));
  }
  return jinja::render(program.statements, values, program.name,
                       conversation.now.value_or(std::time(nullptr)));
}

}  // namespace bough
