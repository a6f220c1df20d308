// POST /v1/responses: OpenAI's API of items. Nothing is stored: each request contains the whole conversation.
#include "base/clock.h"
#include "serve/api.h"

namespace bough {

namespace {

// Begins the `encrypted_content` that this server wrote, unlike that of another server, which it cannot read.
constexpr std::string_view kReasoningText = "reasoning: ";

struct ResponseOptions {
  ServedRequest request;
  bool logprobs = false;
  bool encrypted_reasoning = false;
  Json echoed;  // request fields that the answer repeats
};

class ResponseAnswer final : public Answer {
 public:
  ResponseAnswer(const ServedModel& model, ResponseOptions options)
      : Answer(new_id("resp_")), model_(model), options_(std::move(options)), created_(now_seconds()) {}

  Json whole(const std::vector<ChoiceDelta>& choices) override {
    close_all();
    return response(choices);
  }
  bool wants_deltas() const override { return true; }  // only deltas tell which tokens belong to a message

  std::string begin() override {
    Json response = frame("in_progress");
    // Events are numbered in this order.
    std::string text = event("response.created", {{"response", response}});
    text += event("response.in_progress", {{"response", std::move(response)}});
    return text;
  }

  // Output items are sent one after the other. Only the last item of output_ can be unfinished.
  std::string add(size_t, const ChoiceDelta& choice) override {
    const OutputParts& parts = choice.parts;
    std::string text;
    if (options_.logprobs) pending_.insert(pending_.end(), choice.tokens.begin(), choice.tokens.end());
    if (!parts.reasoning.empty()) {
      text += open("reasoning");
      pending_.clear();
      item()["content"][0]["text"].get_ref<std::string&>() += parts.reasoning;
      text += event("response.reasoning_text.delta", place({{"delta", parts.reasoning}}));
    }
    if (!parts.content.empty()) {
      text += open("message");
      item()["content"][0]["text"].get_ref<std::string&>() += parts.content;
      Json logprobs = take_logprobs();
      text += event("response.output_text.delta",
                    place({{"delta", parts.content}, {"logprobs", std::move(logprobs)}}));
    }
    for (const ToolCall& call : parts.calls) text += add_call(call);
    return text;
  }

  std::string end(const std::vector<ChoiceDelta>& choices) override {
    std::string text = close_all();
    const Json done = response(choices);
    const bool is_complete = done["status"] == "completed";
    return text + event(is_complete ? "response.completed" : "response.incomplete", {{"response", done}});
  }

  std::string fail(const ApiError& error) override {
    Json failed = frame("failed");
    failed["output"] = output_;
    failed["error"] = {{"code", "server_error"}, {"message", error.what()}};
    return event("response.failed", {{"response", std::move(failed)}});
  }

 private:
  Json& item() { return output_.back(); }
  std::string event(const std::string& type, Json data) {
    data["type"] = type;
    data["sequence_number"] = sequence_++;
    return sse(type, data);
  }
  // Adds the fields that say to which item and content part an event belongs.
  Json place(Json data) {
    data["item_id"] = item()["id"];
    data["output_index"] = output_.size() - 1;
    data["content_index"] = 0;
    return data;
  }
  Json item_event() { return {{"output_index", output_.size() - 1}, {"item", item()}}; }

  Json frame(const char* status) const {
    Json response = options_.echoed;
    response.update({{"id", id()},
                     {"object", "response"},
                     {"created_at", created_},
                     {"status", status},
                     {"model", options_.request.model},
                     {"output", Json::array()},
                     {"error", nullptr},
                     {"incomplete_details", nullptr},
                     {"store", false},
                     {"usage", nullptr}});
    return response;
  }
  Json response(const std::vector<ChoiceDelta>& choices) const {
    const bool is_cut = choices.front().end->reason == FinishReason::kLength;
    Json response = frame(is_cut ? "incomplete" : "completed");
    if (is_cut) response["incomplete_details"] = {{"reason", "max_output_tokens"}};
    response["output"] = output_;
    const int64_t input = options_.request.prompt_tokens(), output = count_tokens(choices);
    response["usage"] = {{"input_tokens", input},
                         {"input_tokens_details", {{"cached_tokens", 0}}},
                         {"output_tokens", output},
                         {"output_tokens_details", {{"reasoning_tokens", count_reasoning_tokens(choices)}}},
                         {"total_tokens", input + output}};
    return response;
  }

  static Json text_part() {
    return {
        {"type", "output_text"}, {"text", ""}, {"annotations", Json::array()}, {"logprobs", Json::array()}};
  }

  std::string open(const std::string& type) {
    if (open_ == type) return "";
    std::string text = close();
    open_ = type;
    const bool is_message = type == "message";
    Json made({{"id", new_id(is_message ? "msg_" : "rs_")},
               {"type", type},
               {"status", "in_progress"},
               {"content", Json::array()}});
    if (is_message) made["role"] = "assistant";
    else made["summary"] = Json::array();
    output_.push_back(std::move(made));
    text += event("response.output_item.added", item_event());
    Json part = is_message ? text_part() : Json({{"type", "reasoning_text"}, {"text", ""}});
    item()["content"].push_back(part);
    if (is_message) text += event("response.content_part.added", place({{"part", std::move(part)}}));
    return text;
  }

  std::string close() {
    if (open_.empty()) return "";
    const bool is_message = open_ == "message";
    open_.clear();
    item()["status"] = "completed";
    if (is_message) take_logprobs();
    const Json part = item()["content"][0];
    std::string text;
    if (is_message) {
      text +=
          event("response.output_text.done", place({{"text", part["text"]}, {"logprobs", part["logprobs"]}}));
      text += event("response.content_part.done", place({{"part", part}}));
    } else {
      text += event("response.reasoning_text.done", place({{"text", part["text"]}}));
      // Some clients keep only this field of streamed reasoning. The text is no secret.
      if (options_.encrypted_reasoning)
        item()["encrypted_content"] = str(kReasoningText, part["text"].get<std::string>());
    }
    return text + event("response.output_item.done", item_event());
  }

  // An empty answer is an empty message, so that a client can give it back.
  std::string close_all() {
    std::string text = output_.empty() ? open("message") : "";
    return text + close();
  }

  // Returns the log-probabilities of the unfinished message's tokens that no event has shown yet. Adds them
  // to the item, too.
  Json take_logprobs() {
    Json list = Json::array();
    for (const AnswerToken& token : pending_) {
      list.push_back(logprob_json(model_.tokenizer, token));
      item()["content"][0]["logprobs"].push_back(list.back());
    }
    pending_.clear();
    return list;
  }

  std::string add_call(const ToolCall& call) {
    std::string text = close();
    output_.push_back({{"id", new_id("fc_")},
                       {"type", "function_call"},
                       {"status", "in_progress"},
                       {"call_id", id_of(call, options_.request.tool_call_parser, "call_")},
                       {"name", call.name},
                       {"arguments", ""}});
    text += event("response.output_item.added", item_event());
    const Json where({{"item_id", item()["id"]}, {"output_index", output_.size() - 1}});
    Json delta = where, done = where;
    delta["delta"] = call.arguments;
    done["arguments"] = call.arguments;
    done["name"] = call.name;
    text += event("response.function_call_arguments.delta", std::move(delta));
    text += event("response.function_call_arguments.done", std::move(done));
    item()["arguments"] = call.arguments;
    item()["status"] = "completed";
    return text + event("response.output_item.done", item_event());
  }

  const ServedModel& model_;
  const ResponseOptions options_;
  const int64_t created_;
  Json output_ = Json::array();
  std::string open_;                  // the type of the open item
  std::vector<AnswerToken> pending_;  // sampled and not shown yet
  int64_t sequence_ = 0;
};

// Converts items to messages of the chat API. Consecutive reasoning, texts and calls of the assistant become
// one message.
class ItemReader {
 public:
  OrderedJson read(const OrderedJson& input) {
    if (input.is_string()) {
      messages.push_back({{"role", "user"}, {"content", input}});
    } else {
      for (size_t i = 0; i < input.size(); ++i) add(input[i], str("input[", i, "]"));
    }
    return std::move(messages);
  }
  OrderedJson messages = OrderedJson::array();

 private:
  void add(const OrderedJson& json, const std::string& where) {
    Fields item(json, where);
    const std::string type = item.text("type").value_or("message");
    if (type == "message") {
      const std::string role = item.required_text("role");
      const OrderedJson* content = item.find("content");
      if (!content) item.wrong("content", "a text or a list of parts");
      std::string text = content_text(*content, where + ".content");
      if (role != "assistant") {
        messages.push_back({{"role", role}, {"content", std::move(text)}});
        return;
      }
      // Texts before and after a call are parts of one answer.
      OrderedJson& message = assistant();
      std::string& all = message["content"].get_ref<std::string&>();
      all += (all.empty() || message.contains("tool_calls") ? "" : "\n") + text;
    } else if (type == "reasoning") {
      std::string text;
      for (const char* name : {"content", "summary"})
        if (const OrderedJson* parts = item.array(name); parts && text.empty())
          for (const OrderedJson& part : *parts)
            text += Fields(part, item.path(name)).text("text").value_or("");
      if (const auto encrypted = item.text("encrypted_content");
          text.empty() && encrypted && encrypted->starts_with(kReasoningText))
        text = encrypted->substr(kReasoningText.size());
      if (!text.empty()) assistant()["reasoning_content"] = text;
    } else if (type == "function_call") {
      OrderedJson function({{"name", item.required_text("name")}});
      function["arguments"] = arguments_object(item.required_text("arguments"), where + ".arguments");
      assistant()["tool_calls"].push_back(
          {{"id", item.required_text("call_id")}, {"type", "function"}, {"function", std::move(function)}});
    } else if (type == "function_call_output") {
      const OrderedJson* output = item.find("output");
      if (!output) item.wrong("output", "a text or a list of parts");
      messages.push_back({{"role", "tool"},
                          {"tool_call_id", item.required_text("call_id")},
                          {"content", content_text(*output, where + ".output")}});
    } else {
      throw ApiError(400, str(where, ": items of type ", quoted(type), " are not supported"), where);
    }
  }
  OrderedJson& assistant() {
    if (messages.empty() || messages.back()["role"] != "assistant")
      messages.push_back({{"role", "assistant"}, {"content", ""}});
    return messages.back();
  }
};

// From {"type": "function", "name": ...} to the chat API's {"type": "function", "function": {...}}.
OrderedJson responses_function(Fields& tool) {
  if (tool.required_text("type") != "function") tool.wrong("type", "function: other tools are not supported");
  OrderedJson function({{"name", tool.required_text("name")}});
  if (const auto description = tool.text("description")) function["description"] = *description;
  if (const OrderedJson* parameters = tool.object("parameters")) function["parameters"] = *parameters;
  return function;
}

void refuse_unsupported_responses(Fields& fields) {
  for (const char* name : {"previous_response_id", "conversation", "prompt", "max_tool_calls"})
    fields.only(name, nullptr, "nothing is stored here: send the whole conversation as input");
  for (const char* name : {"access_programs", "background_options", "image", "moderation"})
    fields.only(name, nullptr, "the server does not support it");
  fields.only("background", false, "answers are not stored");
  fields.only("truncation", "disabled", "a conversation that is too long is refused");
  if (const OrderedJson* text = fields.object("text")) {
    Fields inner(*text, "text");
    if (const OrderedJson* format = inner.object("format"))
      Fields(*format, "text.format").only("type", "text", kUnconstrained);
    inner.ignore({"verbosity"});
    inner.done();
  }
  fields.ignore({"store", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention",
                 "prompt_cache_options", "safety_identifier", "stream_options", "context_management"});
}

}  // namespace

ReadRequest read_response(const OrderedJson& body, const ServedModel& model, const SessionPointer& session) {
  Fields fields(body);
  ReadRequest read;
  ServedRequest& request = read.request = begin_request(fields, model, session);
  request.sampling.n_samples = 1;
  request.stream = fields.boolean("stream").value_or(false);
  const OrderedJson* input = fields.find("input");
  if (!input || !(input->is_string() || (input->is_array() && !input->empty())))
    fields.wrong("input", "a text or a list of items");
  ItemReader items;
  const auto instructions = fields.text("instructions");
  if (instructions) items.messages.push_back({{"role", "system"}, {"content", *instructions}});
  Conversation conversation;
  conversation.messages = items.read(*input);
  conversation.tools = read_tools(fields, responses_function);
  conversation.add_generation_prompt = true;
  const ToolChoice choice = read_tool_choice(fields);
  if (const OrderedJson* reasoning = fields.object("reasoning")) {
    Fields inner(*reasoning, "reasoning");
    if (const auto effort = inner.text("effort")) conversation.variables["reasoning_effort"] = *effort;
    inner.ignore({"summary", "generate_summary"});  // answers have the whole reasoning
    inner.done();
  }
  ResponseOptions options;
  if (const OrderedJson* include = fields.array("include"))
    for (const OrderedJson& what : *include) {
      if (what == "message.output_text.logprobs") options.logprobs = true;
      else if (what == "reasoning.encrypted_content") options.encrypted_reasoning = true;
      else
        fields.wrong("include",
                     "message.output_text.logprobs, reasoning.encrypted_content: the server has nothing else "
                     "to include");
    }
  read_top_logprobs(fields, "top_logprobs", model, request);
  if (request.sampling.top_logprobs > 0) options.logprobs = true;
  read_sampling(fields, model, request);
  const auto max_tokens = fields.integer("max_output_tokens", 1, 1000000000);
  const OrderedJson* metadata = fields.object("metadata");
  refuse_unsupported_responses(fields);
  fields.done();
  set_conversation(std::move(conversation), choice, model, request);
  check_request(model, request, max_tokens);

  const auto given = [&](const char* name, Json otherwise) {
    const auto found = body.find(name);
    return found == body.end() || found->is_null() ? otherwise : Json(*found);
  };
  options.echoed = {{"instructions", instructions ? Json(*instructions) : Json()},
                    {"metadata", metadata ? Json(*metadata) : Json::object()},
                    {"parallel_tool_calls", given("parallel_tool_calls", true)},
                    {"temperature", request.sampling.temperature},
                    {"top_p", request.sampling.top_p},
                    {"max_output_tokens", given("max_output_tokens", nullptr)},
                    {"tool_choice", given("tool_choice", "auto")},
                    {"tools", given("tools", Json::array())}};
  options.request = request;
  read.answer = std::make_unique<ResponseAnswer>(model, std::move(options));
  return read;
}

}  // namespace bough
