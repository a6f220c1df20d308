#include "text/message.h"

#include <optional>
#include <utility>

namespace bough {

namespace {

std::string shown(const OrderedJson* value) {
  if (!value) return "nothing";
  const std::string text = value->is_string() ? value->get<std::string>() : dump_ordered(*value);
  return value->is_null() ? "null" : str(value->type_name(), " ", quoted(text, 40));
}

const OrderedJson* find(const OrderedJson& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

[[noreturn]] void wrong(const std::string& field, const OrderedJson* value, const char* expected) {
  throw MessageError(field, str(": got ", shown(value), ", expected ", expected));
}

void check_text(const OrderedJson& object, const char* key, const std::string& field) {
  const OrderedJson* value = find(object, key);
  if (value && !value->is_string()) wrong(str(field, ".", key), value, "a text");
}

OrderedJson template_call(OrderedJson call, const std::string& field) {
  if (!call.is_object()) wrong(field, &call, "an object with function");
  if (!call.contains("function") && call.contains("name")) {  // the function without its frame
    OrderedJson function = {{"name", call["name"]}};
    if (call.contains("arguments")) function["arguments"] = call["arguments"];
    OrderedJson framed = OrderedJson::object();
    if (call.contains("id")) framed["id"] = call["id"];
    framed["type"] = "function";
    framed["function"] = std::move(function);
    call = std::move(framed);
  }
  const std::string place = field + ".function";
  const auto function = call.find("function");
  if (function == call.end()) throw MessageError(place, " is missing");
  if (!function->is_object()) wrong(place, &*function, "an object with name and arguments");
  const OrderedJson* name = find(*function, "name");
  if (!name || !name->is_string()) wrong(place + ".name", name, "a text");
  const OrderedJson* arguments = find(*function, "arguments");
  if (!arguments) (*function)["arguments"] = OrderedJson::object();
  else if (arguments->is_string())
    (*function)["arguments"] = parse_arguments(arguments->get<std::string>(), place + ".arguments");
  else if (!arguments->is_object()) wrong(place + ".arguments", arguments, "a JSON object, or one as a text");
  return call;
}

OrderedJson template_message(const OrderedJson& given, const std::string& field) {
  if (!given.is_object()) wrong(field, &given, "an object with role and content");
  OrderedJson message = OrderedJson::object();
  for (const auto& [key, value] : given.items())
    if (!value.is_null() || key == "content") message[key] = value;
  const OrderedJson* role = find(message, "role");
  if (!role) {
    std::string keys;
    for (const auto& [key, value] : given.items()) keys += (keys.empty() ? "" : ", ") + key;
    throw MessageError(field + ".role",
                       str(" is missing; the message has ", keys.empty() ? "nothing" : quoted(keys),
                           ", expected role and content"));
  }
  if (!role->is_string()) wrong(field + ".role", role, "a text");
  for (const char* key : {"audio", "function_call"})
    if (const OrderedJson* value = find(message, key))
      wrong(str(field, ".", key), value, "nothing: it is not supported");
  if (*role == "developer") message["role"] = "system";  // templates know only this role for instructions
  if (const OrderedJson* refusal = find(message, "refusal")) {
    if (!refusal->is_string()) wrong(field + ".refusal", refusal, "a text");
    if (!find(message, "content")) message["content"] = OrderedJson(*refusal);
    message.erase("refusal");
  }
  if (const OrderedJson* content = find(message, "content")) {
    message["content"] = text_of_content(*content, field + ".content");
  } else if (message["role"] != "assistant") {
    if (!message.contains("content")) throw MessageError(field + ".content", " is missing");
    wrong(field + ".content", &message["content"], "a text or a list of parts");
  }
  if (const OrderedJson* reasoning = find(message, "reasoning"); reasoning && reasoning->is_string())
    if (!message.contains("reasoning_content")) message["reasoning_content"] = OrderedJson(*reasoning);
  for (const char* key : {"reasoning_content", "reasoning", "name", "tool_call_id"})
    check_text(message, key, field);
  if (const OrderedJson* calls = find(message, "tool_calls")) {
    if (!calls->is_array()) wrong(field + ".tool_calls", calls, "a list of calls");
    OrderedJson list = OrderedJson::array();
    for (size_t i = 0; i < calls->size(); ++i)
      list.push_back(template_call((*calls)[i], str(field, ".tool_calls[", i, "]")));
    if (list.empty()) message.erase("tool_calls");
    else message["tool_calls"] = std::move(list);
  }
  return message;
}

}  // namespace

OrderedJson message_of(const std::string& role, const std::string& content) {
  return {{"role", role}, {"content", content}};
}

std::string text_of_content(const OrderedJson& content, const std::string& field, const char* separator) {
  if (content.is_null()) return "";
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) wrong(field, &content, "a text or a list of parts");
  std::string text;
  for (const OrderedJson& part : content) {
    if (!part.is_object() || !part.contains("type") || !part["type"].is_string())
      throw MessageError(field, ": expected parts with a type");
    const auto type = part["type"].get<std::string>();
    const char* key = type == "refusal" ? "refusal" : "text";
    if (type != "text" && type != "input_text" && type != "output_text" && type != "refusal")
      throw MessageError(field,
                         str(": parts of type ", quoted(type), " are not supported; expected type text"));
    if (!part.contains(key) || !part[key].is_string())
      throw MessageError(field, str(": a part of type ", type, " has no ", key));
    if (!text.empty()) text += separator;
    text += part[key].get_ref<const std::string&>();
  }
  return text;
}

OrderedJson parse_arguments(const std::string& arguments, const std::string& field) {
  if (arguments.empty()) return OrderedJson::object();
  OrderedJson value;
  try {
    value = parse_ordered_json(arguments, field);
  } catch (const UserError& error) {
    throw MessageError(field, std::string(error.what()).substr(field.size()));
  }
  if (!value.is_object()) throw MessageError(field, ": expected a JSON object as a text");
  return value;
}

OrderedJson template_messages(const OrderedJson& messages, const std::string& field) {
  OrderedJson out = OrderedJson::array();
  for (size_t i = 0; i < messages.size(); ++i)
    out.push_back(template_message(messages[i], str(field, "[", i, "]")));
  return out;
}

OrderedJson template_tools(const OrderedJson& tools, const std::string& field) {
  if (tools.is_null()) return {};
  if (tools.is_string()) return template_tools(parse_ordered_json(tools.get<std::string>(), field), field);
  if (!tools.is_array()) wrong(field, &tools, "a list of function schemas");
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string place = str(field, "[", i, "]");
    if (!tools[i].is_object()) wrong(place, &tools[i], "a function schema");
    const auto framed = tools[i].find("function");
    const OrderedJson& function = framed == tools[i].end() ? tools[i] : *framed;
    const OrderedJson* name = function.is_object() ? find(function, "name") : nullptr;
    if (!name || !name->is_string()) wrong(place + ".function.name", name, "a text");
  }
  return tools.empty() ? OrderedJson() : tools;
}

}  // namespace bough
