// The formats of tool calls and reasoning that models are trained on, and the parsers of the text inside a
// call.
#include <algorithm>
#include <optional>

#include "base/ascii.h"
#include "base/error.h"
#include "text/argument_types.h"
#include "text/output_parser.h"
#include "text/python_literal.h"

namespace bough {
namespace {

using jinja::fail;
using Calls = std::vector<ToolCall>;

std::string_view stripped(std::string_view text) {
  return trimmed(text, kSpaces);
}

// Models also write objects as Python does: {'name': 'f', 'arguments': {'is': True}}.
OrderedJson read_json_text(std::string_view text) {
  text = stripped(text);
  try {
    return parse_ordered_json(text, "the call");
  } catch (const UserError& error) {
    try {
      if (text.starts_with('{') || text.starts_with('[')) return read_python_literal(text);
    } catch (const jinja::Error&) {  // the error in JSON says more
    }
    fail(error.what());
  }
}

std::string dumped(const OrderedJson& value) {
  return jinja::to_json(jinja::Value::from_json(value), {});
}

// Returns the arguments as JSON text. `given` is an object, or a text that contains an object.
std::string arguments_of(const OrderedJson& given) {
  if (given.is_string()) {
    const OrderedJson inner = read_json_text(given.get_ref<const std::string&>());
    if (inner.is_object()) return dumped(inner);
  }
  if (given.is_null()) return "{}";
  if (!given.is_object()) fail("the arguments are not a JSON object");
  return dumped(given);
}

ToolCall call_of(const OrderedJson& object) {
  if (!object.is_object()) fail("a call is not a JSON object");
  const auto name = object.find("name");
  if (name == object.end() || !name->is_string() || name->get_ref<const std::string&>().empty())
    fail("the call has no name");
  for (const char* key : {"arguments", "parameters"})
    if (const auto found = object.find(key); found != object.end())
      return {name->get<std::string>(), arguments_of(*found),
              object.contains("id") && object["id"].is_string() ? object["id"].get<std::string>() : "", "",
              ""};
  return {name->get<std::string>(), "{}", "", "", ""};
}

// Reads {"name": ..., "arguments": {...}} or a list of such objects.
Calls read_objects(std::string_view body, const OrderedJson&) {
  const OrderedJson value = read_json_text(body);
  Calls calls;
  if (value.is_array())
    for (const OrderedJson& each : value) calls.push_back(call_of(each));
  else calls.push_back(call_of(value));
  if (calls.empty()) fail("the list has no calls");
  return calls;
}

// Without a marker, JSON counts as a call only if it names its arguments. Otherwise a model could not answer
// in JSON.
Calls read_bare_object(std::string_view body, const OrderedJson& tools) {
  const OrderedJson value = read_json_text(body);
  if (!value.is_object() || (!value.contains("arguments") && !value.contains("parameters")))
    fail("not a call: it has neither arguments nor parameters");
  return {call_of(value)};
}

// Converts an argument that is written as plain text by its types. A string stays as it is. For another type
// the text is read as JSON or as a Python literal. If any type is allowed, `otherwise_json` says whether the
// text is read.
OrderedJson typed(const std::string& text, AllowedTypes types, bool otherwise_json) {
  const std::string_view word = stripped(text);
  if (types.any) {
    if (!otherwise_json) return text;
  } else if (types.string) {
    if (types.null && (word == "null" || word == "None")) return nullptr;
    return text;
  }
  try {
    return parse_ordered_json(word, "an argument");
  } catch (const UserError&) {
  }
  try {
    return read_python_literal(word);
  } catch (const jinja::Error&) {
    return text;
  }
}

// Returns the text between the next `begin` at or after `position` and the `end` after it. Moves `position`
// behind this `end`. Returns nullopt if no `begin` comes. Throws jinja::Error if `end` is missing.
std::optional<std::string_view> next_between(std::string_view text, size_t& position, std::string_view begin,
                                             std::string_view end) {
  const size_t from = text.find(begin, position);
  if (from == std::string_view::npos) return {};
  const size_t to = text.find(end, from + begin.size());
  if (to == std::string_view::npos) fail(quoted(begin), " is not closed");
  position = to + end.size();
  return text.substr(from + begin.size(), to - from - begin.size());
}

std::string without_outer_line_breaks(std::string_view text) {
  if (text.starts_with('\n')) text.remove_prefix(1);
  if (text.ends_with('\n')) text.remove_suffix(1);
  return std::string(text);
}

std::string call_name(std::string_view text) {
  const std::string name(stripped(text));
  if (name.empty()) fail("the call has no name");
  if (name.find_first_of("<>{}()[]\"\n ") != std::string::npos)
    fail("the name of the call is wrong: ", quoted(name, 40));
  return name;
}

// <function=name> <parameter=key> value </parameter> ... </function>
Calls read_function_tags(std::string_view body, const OrderedJson& tools) {
  Calls calls;
  size_t position = 0;
  while (const auto function = next_between(body, position, "<function=", "</function>")) {
    const size_t head = function->find('>');
    if (head == std::string_view::npos) fail("'<function=' is not closed");
    ToolCall call{call_name(function->substr(0, head)), "", "", "", ""};
    OrderedJson arguments = OrderedJson::object();
    size_t inner = head + 1;
    while (const auto parameter = next_between(*function, inner, "<parameter=", "</parameter>")) {
      const size_t split = parameter->find('>');
      if (split == std::string_view::npos) fail("'<parameter=' is not closed");
      const std::string key(stripped(parameter->substr(0, split)));
      arguments[key] = typed(without_outer_line_breaks(parameter->substr(split + 1)),
                             argument_types(tools, call.name, key), false);
    }
    call.arguments = dumped(arguments);
    calls.push_back(std::move(call));
  }
  if (calls.empty()) fail("it has no '<function='");
  return calls;
}

// <invoke name="name"> <parameter name="key">value</parameter> ... </invoke>
Calls read_invoke_tags(std::string_view body, const OrderedJson& tools) {
  const auto unquoted = [](std::string_view text) {
    text = stripped(text);
    if (text.size() > 1 && (text.front() == '"' || text.front() == '\'') && text.back() == text.front())
      text = text.substr(1, text.size() - 2);
    return std::string(text);
  };
  Calls calls;
  size_t position = 0;
  while (const auto invoke = next_between(body, position, "<invoke name=", "</invoke>")) {
    const size_t head = invoke->find('>');
    if (head == std::string_view::npos) fail("'<invoke' is not closed");
    ToolCall call{call_name(unquoted(invoke->substr(0, head))), "", "", "", ""};
    OrderedJson arguments = OrderedJson::object();
    size_t inner = head + 1;
    while (const auto parameter = next_between(*invoke, inner, "<parameter name=", "</parameter>")) {
      const size_t split = parameter->find('>');
      if (split == std::string_view::npos) fail("'<parameter' is not closed");
      const std::string key = unquoted(parameter->substr(0, split));
      arguments[key] = typed(without_outer_line_breaks(parameter->substr(split + 1)),
                             argument_types(tools, call.name, key), false);
    }
    call.arguments = dumped(arguments);
    calls.push_back(std::move(call));
  }
  if (calls.empty()) fail("it has no '<invoke'");
  return calls;
}

// name <arg_key>key</arg_key> <arg_value>value</arg_value> ...
Calls read_glm(std::string_view body, const OrderedJson& tools) {
  ToolCall call{call_name(body.substr(0, body.find("<arg_key>"))), "", "", "", ""};
  OrderedJson arguments = OrderedJson::object();
  size_t position = 0;
  while (const auto given = next_between(body, position, "<arg_key>", "</arg_key>")) {
    const std::string key(stripped(*given));
    const auto value = next_between(body, position, "<arg_value>", "</arg_value>");
    if (!value) fail("the argument ", quoted(key, 40), " has no value");
    arguments[key] = typed(std::string(*value), argument_types(tools, call.name, key), true);
  }
  call.arguments = dumped(arguments);
  return {call};
}

constexpr std::string_view kDeepSeekSeparator = "<｜tool▁sep｜>";

// Reads name, separator, arguments. DeepSeek V3 and R1 write a type before the name, and the arguments as a
// Markdown code block.
Calls read_deepseek(std::string_view body, const OrderedJson&) {
  const size_t split = body.find(kDeepSeekSeparator);
  if (split == std::string_view::npos) fail("it has no ", kDeepSeekSeparator);
  std::string_view name = body.substr(0, split);
  std::string_view arguments = stripped(body.substr(split + kDeepSeekSeparator.size()));
  if (const size_t code = arguments.find("```");
      code != std::string_view::npos && !arguments.starts_with('{')) {
    name = arguments.substr(0, code);
    arguments = arguments.substr(code + 3);
    if (arguments.starts_with("json")) arguments.remove_prefix(4);
    if (stripped(arguments).ends_with("```"))
      arguments = stripped(arguments).substr(0, stripped(arguments).size() - 3);
  }
  return {{call_name(name), arguments_of(read_json_text(arguments)), "", "", ""}};
}

// Reads functions.name:0, the arguments' marker, arguments.
Calls read_kimi(std::string_view body, const OrderedJson&) {
  constexpr std::string_view kMarker = "<|tool_call_argument_begin|>";
  const size_t split = body.find(kMarker);
  if (split == std::string_view::npos) fail("it has no ", kMarker);
  const std::string id(stripped(body.substr(0, split)));
  std::string_view name = id;
  if (const size_t colon = name.rfind(':'); colon != std::string_view::npos) name = name.substr(0, colon);
  if (const size_t dot = name.rfind('.'); dot != std::string_view::npos) name = name.substr(dot + 1);
  return {{call_name(name), arguments_of(read_json_text(body.substr(split + kMarker.size()))), id, "", ""}};
}

// Reads a list of objects, or name{...}, name[ARGS]{...}, name[CALL_ID]id[ARGS]{...}.
Calls read_mistral(std::string_view body, const OrderedJson& tools) {
  body = stripped(body);
  if (body.starts_with('[') || body.starts_with('{')) return read_objects(body, tools);
  const size_t begin = body.find('{');
  if (begin == std::string_view::npos) fail("it has no arguments");
  std::string_view head = body.substr(0, begin);
  if (stripped(head).ends_with("[ARGS]")) head = stripped(head).substr(0, stripped(head).size() - 6);
  std::string_view id;
  if (const size_t at = head.find("[CALL_ID]"); at != std::string_view::npos) {
    id = stripped(head.substr(at + 9));
    head = head.substr(0, at);
  }
  return {{call_name(head), arguments_of(read_json_text(body.substr(begin))), std::string(id), "", ""}};
}

// InternLM writes a token such as `<|plugin|>` in front of the JSON object.
Calls read_internlm(std::string_view body, const OrderedJson& tools) {
  const size_t begin = body.find('{');
  return read_objects(begin == std::string_view::npos ? body : body.substr(begin), tools);
}

Calls read_python(std::string_view body, const OrderedJson&) {
  Calls calls;
  for (const PythonCall& call : read_python_calls(stripped(body)))
    calls.push_back({call.name, dumped(call.arguments), "", "", ""});
  return calls;
}

Calls read_nothing(std::string_view, const OrderedJson&) {
  return {};
}

const std::vector<ToolFormat>& tool_formats() {
  using End = ToolFormat::End;
  static const std::vector<ToolFormat> formats = {
      {"hermes", {"<tool_call>"}, "</tool_call>", End::kMarker, read_objects},
      {"qwen3_coder", {"<tool_call>"}, "</tool_call>", End::kPlainMarker, read_function_tags},
      {"seed_oss", {"<seed:tool_call>"}, "</seed:tool_call>", End::kPlainMarker, read_function_tags},
      {"minimax_m2", {"<minimax:tool_call>"}, "</minimax:tool_call>", End::kPlainMarker, read_invoke_tags},
      {"glm45", {"<tool_call>"}, "</tool_call>", End::kPlainMarker, read_glm},
      {"llama3_json", {"<|python_tag|>"}, "", End::kBracket, read_bare_object, {}, "{", ";"},
      {"mistral", {"[TOOL_CALLS]"}, "", End::kBracket, read_mistral},
      {"phi4_mini_json", {"functools["}, "", End::kBracket, read_objects},
      {"granite", {"<|tool_call|>", "<tool_call>"}, "", End::kBracket, read_objects},
      {"deepseek_v3",
       {"<｜tool▁call▁begin｜>"},
       "<｜tool▁call▁end｜>",
       End::kPlainMarker,
       read_deepseek,
       {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"}},
      {"kimi_k2",
       {"<|tool_call_begin|>"},
       "<|tool_call_end|>",
       End::kPlainMarker,
       read_kimi,
       {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"}},
      {"internlm", {"<|action_start|>"}, "<|action_end|>", End::kMarker, read_internlm},
      {"jamba", {"<tool_calls>"}, "</tool_calls>", End::kMarker, read_objects},
      {"pythonic", {}, "", End::kBracket, read_python, {}, "["},
      {"llama4_pythonic", {"<|python_start|>"}, "", End::kBracket, read_python, {"<|python_end|>"}, "["},
      {"lfm2", {"<|tool_call_start|>"}, "<|tool_call_end|>", End::kPlainMarker, read_python},
      {"olmo3", {"<function_calls>"}, "</function_calls>", End::kPlainMarker, read_python},
      {"openai", {}, "", End::kPlainMarker, read_nothing, {}, {}, {}, true},
  };
  return formats;
}

const std::vector<ReasoningFormat>& reasoning_formats() {
  static const std::vector<ReasoningFormat> formats = {
      {"deepseek_r1", "<think>", "</think>", true},
      {"deepseek_v3", "<think>", "</think>"},
      {"qwen3", "<think>", "</think>"},
      {"glm45", "<think>", "</think>"},
      {"kimi", "◁think▷", "◁/think▷"},
      {"mistral", "[THINK]", "[/THINK]"},
      {"seed_oss", "<seed:think>", "</seed:think>"},
      {"granite", "Here is my thought process:", "Here is my response:"},
      {"openai_gptoss", "", ""},
  };
  return formats;
}

// Alternative names of a format: first those of vLLM, then those of SGLang and other programs.
struct Alias {
  std::string_view other, name;
};
constexpr Alias kToolAliases[] = {{"qwen25", "hermes"},
                                  {"qwen", "hermes"},
                                  {"granite4", "hermes"},
                                  {"qwen3_xml", "qwen3_coder"},
                                  {"glm47", "glm45"},
                                  {"glm", "glm45"},
                                  {"llama3", "llama3_json"},
                                  {"llama4_json", "llama3_json"},
                                  {"deepseekv3", "deepseek_v3"},
                                  {"deepseek_v31", "deepseek_v3"},
                                  {"deepseekv31", "deepseek_v3"},
                                  {"deepseek_r1", "deepseek_v3"},
                                  {"minimax-m2", "minimax_m2"},
                                  {"hunyuan_a13b", "jamba"},
                                  {"gpt-oss", "openai"},
                                  {"phi4_mini", "phi4_mini_json"}};
constexpr Alias kReasoningAliases[] = {{"deepseek-r1", "deepseek_r1"},
                                       {"qwen3-thinking", "deepseek_r1"},
                                       {"step3", "deepseek_r1"},
                                       {"deepseek-v3", "deepseek_v3"},
                                       {"kimi_k2", "qwen3"},
                                       {"minimax_m2", "deepseek_r1"},
                                       {"glm47", "glm45"},
                                       {"gpt-oss", "openai_gptoss"},
                                       {"olmo3", "qwen3"}};

template <class Format, class Aliases>
const Format* find_format(const std::vector<Format>& formats, const Aliases& aliases, std::string_view name) {
  for (const Alias& alias : aliases)
    if (alias.other == name) name = alias.name;
  for (const Format& format : formats)
    if (format.name == name) return &format;
  return nullptr;
}

template <class Format, class Aliases>
std::vector<std::string> names_of(const std::vector<Format>& formats, const Aliases& aliases) {
  std::vector<std::string> names;
  for (const Format& format : formats) names.emplace_back(format.name);
  for (const Alias& alias : aliases) names.emplace_back(alias.other);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

ToolCall harmony_call(const std::string& recipient, std::string_view body) {
  try {
    std::string_view name = recipient;
    if (name.starts_with("functions.")) name.remove_prefix(10);
    const OrderedJson arguments = stripped(body).empty() ? OrderedJson::object() : read_json_text(body);
    return {call_name(name), arguments_of(arguments), "", "", ""};
  } catch (const jinja::Error& error) {
    return {"", "", "", "", error.what};
  }
}

std::optional<std::string> written_calls(const std::string& tool_call_parser, const OrderedJson& calls) {
  const ToolFormat* format = find_tool_format(tool_call_parser);
  if (!format) return std::nullopt;
  const bool is_bare = format->read == read_bare_object, is_python = format->read == read_python;
  const bool one_by_one = format->read == read_internlm || format == &tool_formats().front();
  if (!one_by_one && !is_bare && !is_python && format->read != read_objects && format->read != read_mistral)
    return std::nullopt;
  const std::string begin(is_bare || format->begins.empty() ? "" : format->begins.front()), end(format->end);
  std::string text;
  for (const OrderedJson& call : calls) {
    const OrderedJson &name = call["function"]["name"], &arguments = call["function"]["arguments"];
    std::string written;
    if (is_python) {
      for (const auto& [key, value] : arguments.items())
        written += str(written.empty() ? "" : ", ", key, "=", jinja::to_repr(jinja::Value::from_json(value)));
      written = str(name.get<std::string>(), "(", written, ")");
    } else {
      written = dumped({{"name", name}, {"arguments", arguments}});
    }
    if (one_by_one) text += str(text.empty() ? "" : "\n", begin, "\n", written, "\n", end);
    else text += str(text.empty() ? "" : is_bare ? "; " : ", ", written);
  }
  if (one_by_one || is_bare) return text;
  return str(begin, begin.ends_with('[') ? "" : "[", text, "]", end);
}

std::string tool_call_parser_of(std::string_view chat_template) {
  struct Sign {
    const char* parser;
    std::vector<std::string_view> all;
  };
  // Formats that share a marker come after those with more markers.
  static const std::vector<Sign> signs = {{"openai", {"<|channel|>", "<|call|>"}},
                                          {"deepseek_v3", {"<｜tool▁call▁begin｜>"}},
                                          {"kimi_k2", {"<|tool_call_begin|>"}},
                                          {"minimax_m2", {"<minimax:tool_call>"}},
                                          {"seed_oss", {"<seed:tool_call>"}},
                                          {"lfm2", {"<|tool_call_start|>"}},
                                          {"lfm2", {"<|tool_list_start|>"}},
                                          {"internlm", {"<|action_start|>"}},
                                          {"phi4_mini_json", {"functools["}},
                                          {"mistral", {"[TOOL_CALLS]"}},
                                          {"olmo3", {"<function_calls>"}},
                                          {"llama4_pythonic", {"<|python_start|>"}},
                                          {"glm45", {"<tool_call>", "<arg_key>"}},
                                          {"qwen3_coder", {"<tool_call>", "<function="}},
                                          {"granite", {"<|tool_call|>"}},
                                          {"jamba", {"<tool_calls>"}},
                                          {"hermes", {"<tool_call>", "name"}},
                                          {"llama3_json", {"{\"name\": ", "\"parameters\": ", "<|eot_id|>"}}};
  for (const Sign& sign : signs)
    if (std::all_of(sign.all.begin(), sign.all.end(), [&](std::string_view marker) {
          return chat_template.find(marker) != std::string_view::npos;
        }))
      return sign.parser;
  return "";
}

const ToolFormat* find_tool_format(std::string_view name) {
  return find_format(tool_formats(), kToolAliases, name);
}
const ReasoningFormat* find_reasoning_format(std::string_view name) {
  return find_format(reasoning_formats(), kReasoningAliases, name);
}
std::vector<std::string> tool_call_parser_names() {
  return names_of(tool_formats(), kToolAliases);
}
std::vector<std::string> reasoning_parser_names() {
  return names_of(reasoning_formats(), kReasoningAliases);
}

}  // namespace bough
