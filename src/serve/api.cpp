#include "serve/api.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <random>

namespace bough {

std::string ServedModel::name_for(const std::string& asked) const {
  if (asked.empty()) return names.front();
  if (is_adapter(asked)) return asked;
  if (any_name || std::find(names.begin(), names.end(), asked) != names.end()) return asked;
  std::string all;
  for (const auto& each : {names, adapters})
    for (const std::string& name : each) all += (all.empty() ? "" : ", ") + name;
  throw ApiError(404,
                 str("model ", quoted(asked), " does not exist; this server has ", all,
                     " (served_model_name gives it other names)"),
                 "model", "model_not_found");
}

bool ServedModel::is_adapter(const std::string& name) const {
  return std::find(adapters.begin(), adapters.end(), name) != adapters.end();
}

namespace {

// Writes the calls of messages into their content, for a template that shows no calls.
void write_calls(OrderedJson& messages, const std::string& parser) {
  for (size_t i = 0; i < messages.size(); ++i) {
    OrderedJson& message = messages[i];
    if (!message.contains("tool_calls") || message["tool_calls"].empty()) continue;
    const auto calls = written_calls(parser, message["tool_calls"]);
    if (!calls)
      throw ApiError(
          400,
          str("messages[", i, "].tool_calls: the model's chat template does not show tool calls, and ",
              parser.empty() ? "the server has no tool_call_parser with which to write them as text"
                             : str("calls of the format ", parser, " cannot be written as text"),
              "; send the call as content"),
          str("messages[", i, "].tool_calls"));
    const OrderedJson given = message.value("content", OrderedJson());
    const std::string content = given.is_string() ? given.get<std::string>() : "";
    message["content"] = str(content, content.empty() || content.ends_with('\n') ? "" : "\n", *calls);
    message.erase("tool_calls");
  }
}

}  // namespace

std::string ServedModel::render(Conversation conversation) const {
  if (!chat_template)
    throw ApiError(400, str("conversations need a chat template: ", no_template), "messages");
  const MessageForm& form = chat_template->message_form();
  if (!form.shows_calls) write_calls(conversation.messages, settings.tool_call_parser);
  apply(form, conversation.messages);
  try {
    return chat_template->render(conversation);
  } catch (const UserError& error) {
    throw ApiError(400, error.what(), "messages");
  }
}

Fields::Fields(const OrderedJson& object, std::string where) : object_(object), where_(std::move(where)) {
  if (!object.is_object())
    throw ApiError(400, str(where_.empty() ? "the body" : where_, ": expected a JSON object"), where_);
}

const OrderedJson* Fields::find(const std::string& name) {
  known_.insert(name);
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void Fields::wrong(const std::string& name, const std::string& expected) {
  const auto found = object_.find(name);
  const std::string got = found == object_.end() || found->is_null()
                              ? "nothing"
                              : quoted(found->dump(-1, ' ', false, OrderedJson::error_handler_t::replace));
  throw ApiError(400, str(path(name), ": got ", got, ", expected ", expected), path(name));
}

const OrderedJson* Fields::array(const std::string& name) {
  const OrderedJson* value = find(name);
  if (value && !value->is_array()) wrong(name, "a list");
  return value;
}

const OrderedJson* Fields::object(const std::string& name) {
  const OrderedJson* value = find(name);
  if (value && !value->is_object()) wrong(name, "an object");
  return value;
}

std::optional<bool> Fields::boolean(const std::string& name) {
  const OrderedJson* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_boolean()) wrong(name, "true or false");
  return value->get<bool>();
}

std::optional<int64_t> Fields::integer(const std::string& name, int64_t low, int64_t high) {
  const OrderedJson* value = find(name);
  if (!value) return std::nullopt;
  const std::string expected = str("a whole number from ", low, " to ", high);
  if (!value->is_number_integer()) wrong(name, expected);
  if (value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
    wrong(name, expected);
  const auto number = value->get<int64_t>();
  if (number < low || number > high) wrong(name, expected);
  return number;
}

std::optional<double> Fields::number(const std::string& name, double low, double high) {
  const OrderedJson* value = find(name);
  if (!value) return std::nullopt;
  const std::string expected = str("a number from ", low, " to ", high);
  if (!value->is_number()) wrong(name, expected);
  const auto number = value->get<double>();
  if (!(number >= low && number <= high)) wrong(name, expected);
  return number;
}

std::optional<std::string> Fields::text(const std::string& name) {
  const OrderedJson* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_string()) wrong(name, "a text");
  return value->get<std::string>();
}

std::string Fields::required_text(const std::string& name) {
  auto value = text(name);
  if (!value) wrong(name, "a text");
  return *value;
}

int64_t Fields::required_integer(const std::string& name, int64_t low, int64_t high) {
  const auto value = integer(name, low, high);
  if (!value) wrong(name, str("a whole number from ", low, " to ", high));
  return *value;
}

void Fields::ignore(std::initializer_list<const char*> names) {
  known_.insert(names.begin(), names.end());
}

void Fields::only(const std::string& name, const OrderedJson& value, const std::string& why) {
  const OrderedJson* given = find(name);
  if (given && *given != value) wrong(name, str(value.dump(), ": ", why));
}

void Fields::done() const {
  std::vector<const char*> names;
  for (const std::string& name : known_) names.push_back(name.c_str());
  for (const auto& [key, value] : object_.items()) {
    if (known_.contains(key)) continue;
    const std::string near = nearest(key, names.data(), names.data() + names.size());
    throw ApiError(
        400,
        str(path(quoted(key)), " is an unknown field", near.empty() ? "" : "; did you mean " + near + "?"),
        path(key), "unknown_parameter");
  }
}

int64_t ServedRequest::prompt_tokens() const {
  size_t sum = 0;
  for (const auto& prompt : prompts) sum += prompt.size();
  return static_cast<int64_t>(sum);
}

ServedRequest begin_request(Fields& fields, const ServedModel& model, const SessionPointer& session) {
  ServedRequest request;
  request.model = model.name_for(fields.text("model").value_or(""));
  if (model.is_adapter(request.model)) request.adapter = request.model;
  request.sampling = model.settings.gconfig;
  request.session = session;
  return request;
}

void read_sampling(Fields& fields, const ServedModel& model, ServedRequest& request) {
  SamplingParameters passed_over = request.sampling;
  SamplingParameters& sampling = request.session ? passed_over : request.sampling;
  if (const auto value = fields.number("temperature", 0, 100)) {
    sampling.temperature = *value;
    sampling.greedy = false;
  }
  if (const auto value = fields.number("top_p", 0, 1)) sampling.top_p = *value;
  if (const auto value = fields.integer("top_k", -1, 100000000))
    sampling.top_k = std::max<int64_t>(0, *value);
  if (const auto value = fields.number("min_p", 0, 0.9999)) sampling.min_p = *value;
  if (const auto value = fields.number("repetition_penalty", 0.01, 100)) sampling.repetition_penalty = *value;
  if (const auto value = fields.number("presence_penalty", -100, 100)) sampling.presence_penalty = *value;
  if (const auto value = fields.number("frequency_penalty", -100, 100)) sampling.frequency_penalty = *value;
  if (const auto value = fields.boolean("ignore_eos")) sampling.ignore_eos = *value;
  if (const auto value = fields.integer("min_tokens", 0, 100000000)) sampling.min_new_tokens = *value;
  if (const OrderedJson* ids = fields.array("stop_token_ids")) {
    request.sampling.stop_token_ids.clear();
    for (const OrderedJson& id : *ids) {
      if (!id.is_number_integer() || id < 0 || id >= model.vocab_size)
        fields.wrong("stop_token_ids", str("token ids below ", model.vocab_size));
      request.sampling.stop_token_ids.push_back(id.get<int64_t>());
    }
  }
  if (const auto value = fields.integer("seed", INT64_MIN, INT64_MAX); value && !request.session)
    request.seed = static_cast<uint64_t>(*value);
}

bool read_stream_options(Fields& fields, ServedRequest& request) {
  request.stream = fields.boolean("stream").value_or(false);
  const OrderedJson* options = fields.object("stream_options");
  if (!options) return false;
  Fields inner(*options, "stream_options");
  const bool include_usage = inner.boolean("include_usage").value_or(false);
  inner.only("continuous_usage_stats", false, "usage is sent at the end");
  inner.ignore({"include_obfuscation"});
  inner.done();
  return include_usage;
}

void read_stop(Fields& fields, const std::string& name, SamplingParameters& sampling) {
  const OrderedJson* stop = fields.find(name);
  if (!stop) return;
  constexpr size_t kMost = 64, kLongest = 4096;
  const std::string expected = str("a text, or up to ", kMost, " of them, each of 1 to ", kLongest, " bytes");
  sampling.stop.clear();
  if (stop->is_string()) sampling.stop.push_back(stop->get<std::string>());
  else if (!stop->is_array() || stop->size() > kMost) fields.wrong(name, expected);
  else
    for (const OrderedJson& each : *stop) {
      if (!each.is_string()) fields.wrong(name, expected);
      sampling.stop.push_back(each.get<std::string>());
    }
  for (const std::string& text : sampling.stop)
    if (text.empty() || text.size() > kLongest) fields.wrong(name, expected);
}

ToolChoice read_tool_choice(Fields& fields) {
  using Kind = ToolChoice::Kind;
  ToolChoice read;
  read.one_call = !fields.boolean("parallel_tool_calls").value_or(true);
  const OrderedJson* choice = fields.find("tool_choice");
  if (!choice || *choice == "auto") return read;
  read.kind = *choice == "none" ? Kind::kNone : Kind::kForced;
  if (*choice == "none" || *choice == "required") return read;
  const std::string expected = "auto, none, required or {\"type\": \"function\", ...} with a tool's name";
  if (!choice->is_object()) fields.wrong("tool_choice", expected);
  Fields inner(*choice, "tool_choice");
  if (inner.required_text("type") != "function") fields.wrong("tool_choice", expected);
  // Chat completions have the name in the object `function`. The responses API has it at the top level.
  const OrderedJson* function = inner.object("function");
  read.name = function ? Fields(*function, "tool_choice.function").required_text("name")
                       : inner.required_text("name");
  return read;
}

namespace {

// Returns whether there are tools that the answer may call.
bool choose_tools(OrderedJson& tools, const ToolChoice& choice, const ServedModel& model) {
  const bool has_tools = tools.is_array() && !tools.empty();
  if (choice.kind == ToolChoice::Kind::kNone) return false;
  if (choice.kind == ToolChoice::Kind::kForced) {
    if (!has_tools)
      throw ApiError(400, "tool_choice: a call is forced, but there are no tools", "tool_choice");
    if (!choice.name.empty()) {
      OrderedJson chosen = OrderedJson::array();
      for (const OrderedJson& tool : tools)
        if (tool["function"]["name"] == choice.name) chosen.push_back(tool);
      if (chosen.empty())
        throw ApiError(400, str("tool_choice: there is no tool ", quoted(choice.name)), "tool_choice");
      tools = std::move(chosen);
    }
  }
  if (has_tools && model.settings.tool_call_parser.empty())
    throw ApiError(
        400,
        "tools: the server knows no format of the model's tool calls: tool_call_parser is empty, or it is "
        "auto and the chat template has the markers of no known format; start the server with "
        "tool_call_parser=NAME (docs/chat.md lists them), or send tool_choice none",
        "tools");
  return has_tools;
}

}  // namespace

void set_conversation(Conversation conversation, const ToolChoice& choice, const ServedModel& model,
                      ServedRequest& request) {
  // Chat templates know only the role `system` for instructions, and skip messages with an unknown role.
  for (OrderedJson& message : conversation.messages)
    if (message.value("role", "") == "developer") message["role"] = "system";
  request.reasoning_parser = model.settings.reasoning_parser;
  if (choose_tools(conversation.tools, choice, model)) {
    request.tool_call_parser = model.settings.tool_call_parser;
    request.tools = conversation.tools;
    request.ends_after_call = choice.one_call;
  }
  const std::string prompt = model.render(conversation);
  request.begun.in_reasoning = opens_reasoning(request.reasoning_parser, prompt);
  try {
    if (choice.kind == ToolChoice::Kind::kForced)
      request.begun.forced =
          forced_call(request.reasoning_parser, request.tool_call_parser, request.begun.in_reasoning);
  } catch (const UserError& error) {
    throw ApiError(400, error.what(), "tool_choice");
  }
  try {
    if (request.session)
      request.asked = request.session->ask(prompt, request.begun, std::move(conversation.messages),
                                           std::move(conversation.tools));
    request.prompts.push_back(request.asked ? request.asked->row.ids
                                            : model.tokenizer.encode(prompt + request.begun.forced));
  } catch (const UserError& error) {
    throw ApiError(400, error.what(), "messages");
  }
}

void check_request(const ServedModel& model, ServedRequest& request, std::optional<int64_t> max_tokens) {
  int64_t longest = 0;
  for (const auto& prompt : request.prompts) {
    if (prompt.empty()) throw ApiError(400, "the prompt is empty; expected at least one token", "prompt");
    for (const int32_t token : prompt)
      if (token < 0 || token >= model.vocab_size)
        throw ApiError(400,
                       str("the prompt has token ", token, ", outside the vocabulary of ", model.vocab_size),
                       "prompt");
    longest = std::max(longest, static_cast<int64_t>(prompt.size()));
  }
  if (longest >= model.max_length)
    throw ApiError(400,
                   str("the prompt has ", longest, " tokens, but the model's context is ", model.max_length,
                       ": no room for an answer; shorten it"),
                   "messages", "context_length_exceeded");
  SamplingParameters& sampling = request.sampling;
  if (request.session) {
    if (request.prompts.size() != 1 || sampling.n_samples != 1)
      throw ApiError(
          400,
          str("n: ", request.prompts.size(), " prompts with ", sampling.n_samples,
              " samples each in a training session, expected one prompt with one sample; send more requests "
              "for more samples"),
          "n");
    if (!request.asked) request.asked = request.session->ask(request.prompts.front());
    max_tokens = std::min(
        {max_tokens.value_or(sampling.max_new_tokens), sampling.max_new_tokens, model.max_length - longest});
    sampling.min_new_tokens = std::min(sampling.min_new_tokens, *max_tokens);
  }
  sampling.max_new_tokens =
      std::min(max_tokens.value_or(sampling.max_new_tokens), model.max_length - longest);
  if (sampling.min_new_tokens > sampling.max_new_tokens)
    throw ApiError(400,
                   str("min_tokens is ", sampling.min_new_tokens, ", more than the ", sampling.max_new_tokens,
                       " tokens that the answer may have"),
                   "min_tokens");
  const int64_t most = model.settings.max_samples_per_request;
  if (static_cast<int64_t>(request.prompts.size()) > most || sampling.n_samples > most ||
      request.num_choices() > most)
    throw ApiError(400,
                   str("n: ", request.prompts.size(), " prompts with ", sampling.n_samples,
                       " samples each are more than ", most, " (max_samples_per_request)"),
                   "n");
}

OrderedJson read_tools(Fields& fields, OrderedJson (*function_of)(Fields& tool)) {
  const OrderedJson* given = fields.array("tools");
  if (!given || given->empty()) return nullptr;
  OrderedJson tools = OrderedJson::array();
  for (size_t i = 0; i < given->size(); ++i) {
    Fields tool((*given)[i], str("tools[", i, "]"));
    tools.push_back({{"type", "function"}, {"function", function_of(tool)}});
  }
  return tools;
}

std::string content_text(const OrderedJson& content, const std::string& where, const char* separator) {
  return with_api_errors([&] { return text_of_content(content, where, separator); });
}

OrderedJson arguments_object(const std::string& arguments, const std::string& where) {
  return with_api_errors([&] { return parse_arguments(arguments, where); });
}

std::string new_id(const std::string& prefix) {
  // Only uniqueness matters: no sample depends on an id.
  thread_local std::mt19937_64 random{std::random_device{}() + (uint64_t{std::random_device{}()} << 32)};
  std::array<char, 40> digits;
  std::snprintf(digits.data(), digits.size(), "%016llx%08llx", static_cast<unsigned long long>(random()),
                static_cast<unsigned long long>(random() >> 32));
  return prefix + digits.data();
}

std::string id_of(const ToolCall& call, const std::string& tool_call_parser, const std::string& prefix) {
  if (!call.id.empty()) return call.id;
  return tool_call_parser == "mistral" ? new_id("").substr(0, 9) : new_id(prefix);
}

Json usage_json(int64_t prompt_tokens, int64_t completion_tokens) {
  return {{"prompt_tokens", prompt_tokens},
          {"completion_tokens", completion_tokens},
          {"total_tokens", prompt_tokens + completion_tokens}};
}

std::string sse(const Json& data) {
  return "data: " + dump_line(data) + "\n\n";
}

std::string sse(const std::string& event, const Json& data) {
  return "event: " + event + "\n" + sse(data);
}

int64_t count_tokens(const std::vector<ChoiceDelta>& choices) {
  size_t sum = 0;
  for (const ChoiceDelta& choice : choices) sum += choice.tokens.size();
  return static_cast<int64_t>(sum);
}

int64_t count_reasoning_tokens(const std::vector<ChoiceDelta>& choices) {
  int64_t sum = 0;
  for (const ChoiceDelta& choice : choices)
    if (choice.end) sum += choice.end->reasoning_tokens;
  return sum;
}

std::string token_text(const Tokenizer& tokenizer, int32_t id) {
  // The JSON writer replaces bytes that are not UTF-8 by U+FFFD. Text offsets in answers count the replaced
  // text.
  return Json::parse(dump_line(tokenizer.id_to_bytes(id))).get<std::string>();
}

void read_top_logprobs(Fields& fields, const std::string& name, const ServedModel& model,
                       ServedRequest& request) {
  const auto top = fields.integer(name, 0, 20);
  if (!top || *top == 0) return;
  if (model.settings.logprobs_mode != "raw_logprobs")
    fields.wrong(name,
                 "0: the server's logprobs_mode is processed_logprobs, and these are known only for sampled "
                 "tokens");
  request.sampling.top_logprobs = *top;
}

Json logprob_json(const Tokenizer& tokenizer, const AnswerToken& token) {
  const auto entry = [&](int32_t id, double logprob) {
    Json bytes = Json::array();
    for (const char byte : tokenizer.id_to_bytes(id)) bytes.push_back(static_cast<unsigned char>(byte));
    return Json({{"token", tokenizer.id_to_bytes(id)}, {"logprob", logprob}, {"bytes", std::move(bytes)}});
  };
  Json json = entry(token.id, token.logprob);
  json["top_logprobs"] = Json::array();
  for (const auto& [id, logprob] : token.top) json["top_logprobs"].push_back(entry(id, logprob));
  return json;
}

Json openai_error(const ApiError& error) {
  const bool is_ours = error.status >= 500;
  const char* type = error.status == 401   ? "authentication_error"
                     : error.status == 429 ? "rate_limit_error"
                     : is_ours             ? "server_error"
                                           : "invalid_request_error";
  return {{"error",
           {{"message", error.what()},
            {"type", type},
            {"param", error.param.empty() ? Json() : Json(error.param)},
            {"code", error.code.empty() ? Json() : Json(error.code)}}}};
}

}  // namespace bough
