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

// Builds the value from the parser's events. Only the events show duplicate keys, nesting depth and integers
// of more than 64 bits.
class OrderedBuilder final : public nlohmann::json_sax<OrderedJson> {
 public:
  explicit OrderedBuilder(std::string source) : source_(std::move(source)) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t& text) override {
    if (text.find_first_of(".eE") == std::string::npos)
      refuse(str("a whole number exceeds 64 bits: ", quoted(text, 40)));
    return put(value);
  }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(OrderedJson::object()); }
  bool start_array(size_t) override { return open(OrderedJson::array()); }
  bool end_object() override { return stack_.pop_back(), true; }
  bool end_array() override { return stack_.pop_back(), true; }
  bool key(string_t& value) override {
    if (stack_.back()->contains(value))
      refuse(str("the key ", quoted(value, 40), " occurs twice in one object"));
    key_ = value;
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    refuse(str("not valid JSON: ", quoted(std::string_view(error.what()), 200)));
  }

  OrderedJson take() { return std::move(root_); }

 private:
  [[noreturn]] void refuse(const std::string& what) const { throw UserError(str(source_, ": ", what)); }
  bool put(OrderedJson value) {
    if (stack_.empty()) root_ = std::move(value), last_ = &root_;
    else if (stack_.back()->is_array())
      stack_.back()->push_back(std::move(value)), last_ = &stack_.back()->back();
    else last_ = &((*stack_.back())[key_] = std::move(value));
    return true;
  }
  bool open(OrderedJson value) {
    if (stack_.size() >= static_cast<size_t>(kMaxJsonDepth))
      refuse(str("nested deeper than ", kMaxJsonDepth, " levels"));
    put(std::move(value));
    stack_.push_back(last_);
    return true;
  }

  std::string source_;
  OrderedJson root_;
  OrderedJson* last_ = nullptr;
  std::vector<OrderedJson*> stack_;  // open containers; only the innermost grows, so the pointers stay valid
  std::string key_;
};

}  // namespace

OrderedJson parse_ordered_json(std::string_view text, const std::string& source) {
  OrderedBuilder builder(source);
  OrderedJson::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

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
  AssistantForm form;
};

ChatTemplate::ChatTemplate(std::shared_ptr<const Program> program, std::shared_ptr<const Program> with_tools)
    : program_(std::move(program)), with_tools_(std::move(with_tools)), form_(std::make_shared<Form>()) {}

std::string ChatTemplate::tool_call_parser() const {
  return tool_call_parser_of((with_tools_ ? with_tools_ : program_)->text);
}

const AssistantForm& ChatTemplate::assistant_form() const {
  std::call_once(form_->once, [this] { form_->form = find_assistant_form(*this); });
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

std::string ChatTemplate::render(std::span<const Message> messages, bool add_generation_prompt) const {
  Conversation conversation;
  for (const Message& message : messages)
    conversation.messages.push_back({{"role", message.role}, {"content", message.content}});
  conversation.add_generation_prompt = add_generation_prompt;
  return render(conversation);
}

}  // namespace bough
