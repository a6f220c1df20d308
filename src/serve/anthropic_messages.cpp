// POST /v1/messages and /v1/messages/count_tokens: Anthropic's API.
#include <algorithm>

#include "serve/api.h"

namespace bough {

namespace {

const char* stop_reason(const ChoiceDelta& choice, bool has_calls) {
  if (choice.end->stop) return "stop_sequence";
  if (choice.end->reason == FinishReason::kLength) return "max_tokens";
  return has_calls ? "tool_use" : "end_turn";
}

Json input_of(const ToolCall& call) {
  return parse_json(call.arguments, "arguments");
}

class MessageAnswer final : public Answer {
 public:
  MessageAnswer(const ServedModel&, ServedRequest request)
      : Answer(new_id("msg_")), request_(std::move(request)) {}

  Json whole(const std::vector<ChoiceDelta>& choices) override {
    const ChoiceDelta& choice = choices.front();
    Json message = frame();
    if (!choice.parts.reasoning.empty())
      message["content"].push_back(
          {{"type", "thinking"}, {"thinking", choice.parts.reasoning}, {"signature", ""}});
    if (!choice.parts.content.empty())
      message["content"].push_back({{"type", "text"}, {"text", choice.parts.content}});
    for (const ToolCall& call : choice.parts.calls)
      message["content"].push_back(
          {{"type", "tool_use"}, {"id", call_id(call)}, {"name", call.name}, {"input", input_of(call)}});
    message["stop_reason"] = stop_reason(choice, !choice.parts.calls.empty());
    message["stop_sequence"] = stop_sequence(choice);
    message["usage"] = usage(count_tokens(choices));
    return message;
  }

  std::string begin() override {
    Json message = frame();
    message["usage"] = usage(0);
    return sse("message_start", {{"type", "message_start"}, {"message", std::move(message)}});
  }

  // Content blocks are sent one after the other: each is stopped before the next one starts.
  std::string add(size_t, const ChoiceDelta& choice) override {
    const OutputParts& parts = choice.parts;
    std::string text;
    if (!parts.reasoning.empty()) {
      text += open("thinking", {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
      text += delta({{"type", "thinking_delta"}, {"thinking", parts.reasoning}});
    }
    if (!parts.content.empty()) {
      text += open("text", {{"type", "text"}, {"text", ""}});
      text += delta({{"type", "text_delta"}, {"text", parts.content}});
    }
    for (const ToolCall& call : parts.calls) {
      has_calls_ = true;
      text += close();
      text +=
          open("tool_use",
               {{"type", "tool_use"}, {"id", call_id(call)}, {"name", call.name}, {"input", Json::object()}});
      text += delta({{"type", "input_json_delta"}, {"partial_json", call.arguments}});
      text += close();
    }
    return text;
  }

  std::string end(const std::vector<ChoiceDelta>& choices) override {
    const ChoiceDelta& choice = choices.front();
    const Json delta(
        {{"stop_reason", stop_reason(choice, has_calls_)}, {"stop_sequence", stop_sequence(choice)}});
    return close() +
           sse("message_delta",
               {{"type", "message_delta"}, {"delta", delta}, {"usage", usage(count_tokens(choices))}}) +
           sse("message_stop", {{"type", "message_stop"}});
  }

  std::string fail(const ApiError& error) override { return sse("error", anthropic_error(error)); }

 private:
  std::string call_id(const ToolCall& call) const { return id_of(call, request_.tool_call_parser, "toolu_"); }
  static Json stop_sequence(const ChoiceDelta& choice) {
    return choice.end->stop ? Json(*choice.end->stop) : Json();
  }
  Json usage(int64_t output_tokens) const {
    return {{"input_tokens", request_.prompt_tokens()}, {"output_tokens", output_tokens}};
  }
  Json frame() const {
    return {{"id", id()},
            {"type", "message"},
            {"role", "assistant"},
            {"model", request_.model},
            {"content", Json::array()},
            {"stop_reason", nullptr},
            {"stop_sequence", nullptr}};
  }
  std::string open(const std::string& type, Json block) {
    if (open_ == type) return "";
    std::string text = close();
    open_ = type;
    return text + sse("content_block_start", {{"type", "content_block_start"},
                                              {"index", num_blocks_},
                                              {"content_block", std::move(block)}});
  }
  std::string close() {
    if (open_.empty()) return "";
    open_.clear();
    return sse("content_block_stop", {{"type", "content_block_stop"}, {"index", num_blocks_++}});
  }
  std::string delta(Json delta) const {
    return sse("content_block_delta",
               {{"type", "content_block_delta"}, {"index", num_blocks_}, {"delta", std::move(delta)}});
  }

  const ServedRequest request_;
  std::string open_;  // the type of the open block
  int64_t num_blocks_ = 0;
  bool has_calls_ = false;
};

OrderedJson tool_result(Fields& block, const std::string& where) {
  OrderedJson message({{"role", "tool"}, {"tool_call_id", block.required_text("tool_use_id")}});
  const OrderedJson* content = block.find("content");
  std::string text = content ? content_text(*content, where + ".content") : "";
  if (block.boolean("is_error").value_or(false)) text = "Error: " + text;
  message["content"] = std::move(text);
  return message;
}

// Converts a message's content blocks to messages of OpenAI's form. Each tool result becomes a message.
void add_blocks(const std::string& role, const OrderedJson& blocks, const std::string& where,
                OrderedJson& messages) {
  OrderedJson texts = OrderedJson::array(), calls = OrderedJson::array();
  std::string reasoning;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const std::string place = str(where, "[", i, "]");
    Fields block(blocks[i], place);
    const std::string type = block.required_text("type");
    if (type == "text") {
      texts.push_back(blocks[i]);
    } else if (type == "thinking" && role == "assistant") {
      reasoning += block.required_text("thinking");
    } else if (type == "tool_use" && role == "assistant") {
      const OrderedJson* input = block.object("input");
      OrderedJson function({{"name", block.required_text("name")}});
      function["arguments"] = input ? *input : OrderedJson::object();
      calls.push_back(
          {{"id", block.required_text("id")}, {"type", "function"}, {"function", std::move(function)}});
    } else if (type == "tool_result" && role == "user") {
      messages.push_back(tool_result(block, place));
    } else {
      throw ApiError(400, str(place, ": a block of type ", quoted(type), " of ", role, " is not supported"),
                     place);
    }
  }
  if (role == "user" && texts.empty()) return;
  // The texts of an answer are parts of one text.
  OrderedJson message({{"role", role}, {"content", content_text(texts, where, role == "user" ? "\n" : "")}});
  if (!reasoning.empty()) message["reasoning_content"] = reasoning;
  if (!calls.empty()) message["tool_calls"] = std::move(calls);
  messages.push_back(std::move(message));
}

OrderedJson read_messages(Fields& fields) {
  OrderedJson messages = OrderedJson::array();
  if (const OrderedJson* system = fields.find("system"))
    messages.push_back({{"role", "system"}, {"content", content_text(*system, "system")}});
  const OrderedJson* given = fields.array("messages");
  if (!given || given->empty()) fields.wrong("messages", "a list of at least one message");
  for (size_t i = 0; i < given->size(); ++i) {
    const std::string where = str("messages[", i, "]");
    Fields message((*given)[i], where);
    const std::string role = message.required_text("role");
    if (role != "user" && role != "assistant") message.wrong("role", "user or assistant");
    if (i + 1 == given->size() && role == "assistant")
      message.wrong("role", "user: the server does not continue a partial answer");
    const OrderedJson* content = message.find("content");
    if (!content) message.wrong("content", "a text or a list of blocks");
    if (content->is_array()) add_blocks(role, *content, where + ".content", messages);
    else messages.push_back({{"role", role}, {"content", content_text(*content, where + ".content")}});
  }
  return messages;
}

OrderedJson anthropic_function(Fields& tool) {
  if (tool.text("type").value_or("custom") != "custom")
    tool.wrong("type", "custom: tools that run at Anthropic are not supported");
  OrderedJson function({{"name", tool.required_text("name")}});
  if (const auto description = tool.text("description")) function["description"] = *description;
  const OrderedJson* schema = tool.object("input_schema");
  if (!schema) tool.wrong("input_schema", "a JSON schema");
  function["parameters"] = *schema;
  return function;
}

ServedRequest read_conversation(Fields& fields, const ServedModel& model, const SessionPointer& session) {
  fields.required_text("model");
  ServedRequest request = begin_request(fields, model, session);
  request.sampling.n_samples = 1;
  Conversation conversation;
  conversation.messages = read_messages(fields);
  conversation.tools = read_tools(fields, anthropic_function);
  conversation.add_generation_prompt = true;
  ToolChoice choice;
  if (const OrderedJson* given = fields.object("tool_choice")) {
    using Kind = ToolChoice::Kind;
    Fields inner(*given, "tool_choice");
    const std::string type = inner.required_text("type");
    if (type == "none") choice.kind = Kind::kNone;
    else if (type == "any") choice.kind = Kind::kForced;
    else if (type == "tool") choice = {Kind::kForced, inner.required_text("name"), false};
    else if (type != "auto") inner.wrong("type", "auto, any, tool or none");
    choice.one_call = inner.boolean("disable_parallel_tool_use").value_or(false);
  }
  if (const OrderedJson* thinking = fields.object("thinking")) {
    Fields inner(*thinking, "thinking");
    conversation.variables["enable_thinking"] = inner.required_text("type") != "disabled";
  }
  set_conversation(std::move(conversation), choice, model, request);
  fields.only("output_config", nullptr, kUnconstrained);
  for (const char* name :
       {"container", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"})
    fields.only(name, nullptr, "the server does not support it");
  fields.ignore({"metadata", "service_tier", "cache_control", "betas"});
  return request;
}

}  // namespace

ReadRequest read_message(const OrderedJson& body, const ServedModel& model, const SessionPointer& session) {
  Fields fields(body);
  ReadRequest read;
  read.request = read_conversation(fields, model, session);
  ServedRequest& request = read.request;
  request.stream = fields.boolean("stream").value_or(false);
  read_sampling(fields, model, request);
  read_stop(fields, "stop_sequences", request.sampling);
  const auto max_tokens = fields.integer("max_tokens", 1, 1000000000);
  if (!max_tokens) fields.wrong("max_tokens", "a whole number above 0");
  fields.done();
  check_request(model, request, max_tokens);
  read.answer = std::make_unique<MessageAnswer>(model, request);
  return read;
}

ReadRequest read_token_count(const OrderedJson& body, const ServedModel& model,
                             const SessionPointer& session) {
  Fields fields(body);
  ReadRequest read;
  read.request = read_conversation(fields, model, nullptr);  // only for counting: the model gets no request
  fields.done();
  read.ready = Json({{"input_tokens", read.request.prompt_tokens()}});
  return read;
}

Json anthropic_error(const ApiError& error) {
  const char* type = error.status == 401   ? "authentication_error"
                     : error.status == 403 ? "permission_error"
                     : error.status == 404 ? "not_found_error"
                     : error.status == 413 ? "request_too_large"
                     : error.status == 429 ? "rate_limit_error"
                     : error.status == 503 ? "overloaded_error"
                     : error.status >= 500 ? "api_error"
                                           : "invalid_request_error";
  return {{"type", "error"}, {"error", {{"type", type}, {"message", error.what()}}}};
}

}  // namespace bough
