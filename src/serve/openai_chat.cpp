// POST /v1/chat/completions.
#include "base/clock.h"
#include "serve/api.h"

namespace bough {

namespace {

struct ChatOptions {
  ServedRequest request;  // holds names and sizes; its prompts are not used
  bool include_usage = false;
  bool logprobs = false;
  bool return_token_ids = false;
};

const char* finish_reason(const ChoiceDelta& choice, bool has_calls) {
  if (choice.end->reason == FinishReason::kLength) return "length";
  return has_calls ? "tool_calls" : "stop";
}

Json stop_reason(const SampleEnd& end) {
  if (end.stop) return *end.stop;
  return nullptr;
}

Json call_json(const ToolCall& call, const std::string& tool_call_parser) {
  return {{"id", id_of(call, tool_call_parser, "call_")},
          {"type", "function"},
          {"function", {{"name", call.name}, {"arguments", call.arguments}}}};
}

class ChatAnswer final : public Answer {
 public:
  ChatAnswer(const ServedModel& model, ChatOptions options)
      : Answer(new_id("chatcmpl-")), model_(model), options_(std::move(options)), created_(now_seconds()) {
    calls_of_.resize(static_cast<size_t>(options_.request.num_choices()));
  }

  Json whole(const std::vector<ChoiceDelta>& choices) override {
    Json list = Json::array();
    for (size_t i = 0; i < choices.size(); ++i) {
      const ChoiceDelta& choice = choices[i];
      const OutputParts& parts = choice.parts;
      Json message({{"role", "assistant"}, {"content", parts.content}, {"refusal", nullptr}});
      if (parts.content.empty() && (!parts.calls.empty() || !parts.reasoning.empty()))
        message["content"] = nullptr;
      if (!options_.request.reasoning_parser.empty())
        message["reasoning_content"] = parts.reasoning.empty() ? Json() : Json(parts.reasoning);
      for (const ToolCall& call : parts.calls)
        message["tool_calls"].push_back(call_json(call, options_.request.tool_call_parser));
      Json entry({{"index", i},
                  {"message", std::move(message)},
                  {"finish_reason", finish_reason(choice, !parts.calls.empty())},
                  {"stop_reason", stop_reason(*choice.end)},
                  {"logprobs", nullptr}});
      add_tokens(entry, choice);
      list.push_back(std::move(entry));
    }
    Json answer = frame("chat.completion");
    answer["choices"] = std::move(list);
    answer["usage"] = usage(choices);
    if (options_.return_token_ids) answer["prompt_token_ids"] = options_.request.prompts.front();
    return answer;
  }

  std::string begin() override {
    Json chunk = frame("chat.completion.chunk");
    chunk["choices"] = Json::array();
    for (int64_t i = 0; i < options_.request.num_choices(); ++i)
      chunk["choices"].push_back({{"index", i},
                                  {"delta", {{"role", "assistant"}, {"content", ""}}},
                                  {"finish_reason", nullptr},
                                  {"logprobs", nullptr}});
    if (options_.return_token_ids) chunk["prompt_token_ids"] = options_.request.prompts.front();
    return sse(chunk);
  }

  std::string add(size_t index, const ChoiceDelta& choice) override {
    const OutputParts& parts = choice.parts;
    const bool shows_tokens = options_.logprobs || options_.return_token_ids;
    Json delta = Json::object();
    if (!parts.content.empty()) delta["content"] = parts.content;
    if (!parts.reasoning.empty()) delta["reasoning_content"] = parts.reasoning;
    for (const ToolCall& call : parts.calls) {
      Json json = call_json(call, options_.request.tool_call_parser);
      json["index"] = calls_of_[index]++;
      delta["tool_calls"].push_back(std::move(json));
    }
    if (delta.empty() && !choice.end && !(shows_tokens && !choice.tokens.empty())) return "";
    Json entry(
        {{"index", index}, {"delta", std::move(delta)}, {"finish_reason", nullptr}, {"logprobs", nullptr}});
    if (choice.end) {
      entry["finish_reason"] = finish_reason(choice, calls_of_[index] > 0);
      entry["stop_reason"] = stop_reason(*choice.end);
    }
    add_tokens(entry, choice);
    Json chunk = frame("chat.completion.chunk");
    chunk["choices"] = Json::array({std::move(entry)});
    return sse(chunk);
  }

  std::string end(const std::vector<ChoiceDelta>& choices) override {
    std::string text;
    if (options_.include_usage) {
      Json chunk = frame("chat.completion.chunk");
      chunk["choices"] = Json::array();
      chunk["usage"] = usage(choices);
      text = sse(chunk);
    }
    return text + "data: [DONE]\n\n";
  }

  std::string fail(const ApiError& error) override { return sse(openai_error(error)) + "data: [DONE]\n\n"; }

 private:
  Json usage(const std::vector<ChoiceDelta>& choices) const {
    Json usage = usage_json(options_.request.prompt_tokens(), count_tokens(choices));
    usage["completion_tokens_details"] = {{"reasoning_tokens", count_reasoning_tokens(choices)}};
    return usage;
  }
  Json frame(const char* object) const {
    return {{"id", id()}, {"object", object}, {"created", created_}, {"model", options_.request.model}};
  }
  void add_tokens(Json& entry, const ChoiceDelta& choice) const {
    if (options_.logprobs) {
      Json content = Json::array();
      for (const AnswerToken& token : choice.tokens) content.push_back(logprob_json(model_.tokenizer, token));
      entry["logprobs"] = {{"content", std::move(content)}, {"refusal", nullptr}};
    }
    if (options_.return_token_ids) {
      Json ids = Json::array();
      for (const AnswerToken& token : choice.tokens) ids.push_back(token.id);
      entry["token_ids"] = std::move(ids);
    }
  }

  const ServedModel& model_;
  const ChatOptions options_;
  const int64_t created_;
  std::vector<int64_t> calls_of_;  // calls streamed so far, by choice
};

void check_tools(const OrderedJson* tools) {
  for (size_t i = 0; tools && i < tools->size(); ++i) {
    const std::string where = str("tools[", i, "]");
    Fields tool((*tools)[i], where);
    if (tool.required_text("type") != "function") tool.wrong("type", "function");
    const OrderedJson* function = tool.object("function");
    if (!function) tool.wrong("function", "an object");
    Fields(*function, where + ".function").required_text("name");
  }
}

void refuse_unsupported_chat(Fields& fields) {
  if (const OrderedJson* format = fields.object("response_format"))
    Fields(*format, "response_format").only("type", "text", kUnconstrained);
  fields.only("logit_bias", OrderedJson::object(), "logits are not changed");
  fields.only("modalities", OrderedJson::array({"text"}), "only text is generated");
  for (const char* name :
       {"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"})
    fields.only(name, nullptr, kUnconstrained);
  for (const char* name : {"audio", "moderation", "prediction", "web_search_options", "logits_processors",
                           "bad_words", "allowed_token_ids"})
    fields.only(name, nullptr, "the server does not support it");
  for (const char* name : {"functions", "function_call"})
    fields.only(name, nullptr, "OpenAI replaced it; send tools and tool_choice");
  for (const char* name : {"use_beam_search", "include_stop_str_in_output", "continue_final_message", "echo"})
    fields.only(name, false, "the server does not support it");
  fields.only("skip_special_tokens", true, "the server does not support it");
  fields.only("add_special_tokens", false, "the chat template writes them");
  // No part of the answer depends on these fields here.
  fields.ignore({"user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention",
                 "prompt_cache_options", "safety_identifier", "verbosity", "priority", "request_id",
                 "spaces_between_special_tokens", "cache_salt"});
}

}  // namespace

ReadRequest read_chat_completion(const OrderedJson& body, const ServedModel& model,
                                 const SessionPointer& session) {
  Fields fields(body);
  ReadRequest read;
  ServedRequest& request = read.request = begin_request(fields, model, session);
  ChatOptions options;
  options.include_usage = read_stream_options(fields, request);
  options.logprobs = fields.boolean("logprobs").value_or(false);
  read_top_logprobs(fields, "top_logprobs", model, request);
  if (request.sampling.top_logprobs > 0 && !options.logprobs)
    fields.wrong("top_logprobs", "0, or logprobs: true in addition");
  options.return_token_ids = fields.boolean("return_token_ids").value_or(false);

  const OrderedJson* messages = fields.array("messages");
  if (!messages || messages->empty()) fields.wrong("messages", "a list of at least one message");
  const OrderedJson* tools = fields.array("tools");
  check_tools(tools);
  const ToolChoice choice = read_tool_choice(fields);
  Conversation conversation;
  conversation.messages = with_api_errors([&] { return template_messages(*messages); });
  if (tools && !tools->empty()) conversation.tools = *tools;
  conversation.add_generation_prompt = fields.boolean("add_generation_prompt").value_or(true);
  if (const OrderedJson* documents = fields.array("documents")) conversation.documents = *documents;
  if (const auto effort = fields.text("reasoning_effort"))
    conversation.variables["reasoning_effort"] = *effort;
  if (const OrderedJson* variables = fields.object("chat_template_kwargs"))
    for (const auto& [key, value] : variables->items()) conversation.variables[key] = value;

  read_sampling(fields, model, request);
  read_stop(fields, "stop", request.sampling);
  request.sampling.n_samples = fields.integer("n", 1, 100000).value_or(request.sampling.n_samples);
  const auto max_tokens = fields.integer("max_tokens", 1, 1000000000);
  const auto max_completion_tokens = fields.integer("max_completion_tokens", 1, 1000000000);
  refuse_unsupported_chat(fields);
  fields.done();
  set_conversation(std::move(conversation), choice, model, request);
  check_request(model, request, max_completion_tokens ? max_completion_tokens : max_tokens);
  options.request = request;
  read.answer = std::make_unique<ChatAnswer>(model, std::move(options));
  return read;
}

}  // namespace bough
