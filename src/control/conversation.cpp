#include "control/conversation.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/format.h"

namespace bough {

namespace {

std::string dump(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

Json to_plain(const OrderedJson& json) {
  return Json::parse(dump(json));
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

constexpr const char* kKey = "conversation";  // of Trajectory::fields

}  // namespace

// ---- What conversations have in common ----

ConversationFormat::ConversationFormat(const ChatCodec& codec, const EnvironmentSettings& settings,
                                       int64_t max_length, bool scored_elsewhere)
    : codec_(codec),
      settings_(settings),
      max_context_(settings.max_context > 0 ? std::min(settings.max_context, max_length) : max_length),
      scored_elsewhere_(scored_elsewhere) {
  if (!settings_.chat_template_kwargs.empty()) {
    variables_ = parse_ordered_json(settings_.chat_template_kwargs, "environment.chat_template_kwargs");
    if (!variables_.is_object())
      throw UserError(str("environment.chat_template_kwargs: got ", quoted(settings_.chat_template_kwargs),
                          ", expected a JSON object"));
  }
  parse("", {}, false);  // names that are none are refused here
  const auto shows = [&](OrderedJson assistant, std::string_view probe) {
    assistant["role"] = "assistant";
    try {
      const OrderedJson messages = {message_of("user", "Question"), std::move(assistant)};
      return render(messages, {}, false).find(probe) != std::string::npos;
    } catch (const UserError&) {
      return false;
    }
  };
  const OrderedJson call = {{"id", "c00000000"},
                            {"type", "function"},
                            {"function", {{"name", "probe_name"}, {"arguments", OrderedJson::object()}}}};
  shows_calls_ = !settings_.tool_call_parser.empty() &&
                 shows({{"content", ""}, {"tool_calls", OrderedJson::array({call})}}, "probe_name");
  shows_reasoning_ =
      !settings_.reasoning_parser.empty() &&
      shows({{"content", "Answer"}, {"reasoning_content", "ProbeText"}, {"thinking", "ProbeText"}},
            "ProbeText");
  // What no template is, or none at all, is found before anything is generated.
  render(OrderedJson::array({message_of("user", "Question")}), {}, true);
}

std::string ConversationFormat::render(const OrderedJson& messages, const OrderedJson& tools,
                                       bool add_generation_prompt) const {
  return codec_.render({.messages = messages,
                        .tools = tools,
                        .documents = {},
                        .variables = variables_,
                        .add_generation_prompt = add_generation_prompt,
                        .now = {}});
}

OutputParts ConversationFormat::parse(std::string_view text, const OrderedJson& tools,
                                      bool in_reasoning) const {
  return OutputParser::parse(
      OutputParser(settings_.reasoning_parser, settings_.tool_call_parser, tools, in_reasoning), text);
}

// ---- One conversation ----

ConversationRun::ConversationRun(const ConversationFormat& format, const Problem& problem,
                                 const SamplingParameters& sampling)
    : format_(format), problem_(problem), sampling_(sampling) {}

void ConversationRun::end(const std::string& reason) {
  reason_ = reason;
  waits_ = Waits::kNothing;
  if (rows_.empty()) return;
  rows_.back().drop_unanswered();
  if (rows_.size() > 1 && !rows_.back().trains()) rows_.pop_back();
}

int64_t ConversationRun::max_new_tokens() const {
  int64_t most = sampling_.max_new_tokens;
  if (const int64_t bound = format_.settings().max_tokens; bound > 0)
    most = std::min(most, bound - num_tokens_);
  return std::min(most, format_.max_context() - std::ssize(prompt()));
}

// ---- The environment's part.

void ConversationRun::observe(EpisodeReply reply) {
  BOUGH_CHECK(waits_ == Waits::kEnvironment, "an answer of the environment that nobody waits for");
  if (reply.failure != EpisodeFailure::kNone) {
    failure_ = std::move(reply.message);
    return end(failure_name(reply.failure));
  }
  Observation& observation = reply.observation;
  if (turn_ == 0) {
    tools_ = std::move(observation.tools);
    if (observation.messages.empty()) {
      for (const Message& message : problem_.messages)
        observation.messages.push_back(message_of(message.role, message.content));
      if (observation.messages.empty()) observation.messages.push_back(message_of("user", problem_.prompt));
    }
  } else {
    if (observation.reward) {
      turn_rewards_.back() = *observation.reward;
      reward_ = reward_.value_or(0) + *observation.reward;
    }
    for (const auto& [name, value] : observation.rewards) rewards_[name] += value;
    num_invalid_ += observation.invalid_calls;
    for (OrderedJson& message : observation.messages)
      if (const auto content = message.find("content"); content != message.end() && content->is_string())
        *content = cut(content->get<std::string>());
    // Answers without a name are those of the calls, in order.
    size_t next = 0;
    for (OrderedJson& message : observation.messages) {
      if (message.value("role", "") != "tool" || next == action_.calls.size()) continue;
      const EnvironmentCall& call = action_.calls[next++];
      if (!message.contains("tool_call_id")) message["tool_call_id"] = call.id;
      if (!message.contains("name")) message["name"] = call.name;
    }
  }
  OrderedJson messages = std::exchange(refusals_, OrderedJson::array());
  for (OrderedJson& message : observation.messages) messages.push_back(std::move(message));
  for (OrderedJson& message : messages) messages_.push_back(message);
  if (observation.done) {
    if (rows_.empty()) make_prompt();
    return end("done");
  }
  go_on();
}

void ConversationRun::go_on() {
  const EnvironmentSettings& settings = format_.settings();
  if (num_invalid_ > settings.max_invalid_calls) return end("max_invalid_calls");
  if (turn_ >= settings.max_turns) return end("max_turns");
  if (settings.max_tokens > 0 && num_tokens_ >= settings.max_tokens) return end("max_tokens");
  try {
    make_prompt();
  } catch (const UserError& error) {
    failure_ = error.what();
    return end("template_refused");
  }
  if (std::ssize(prompt()) >= format_.max_context()) return end("max_context");
  waits_ = Waits::kEngine;
}

std::string ConversationRun::cut(const std::string& text) const {
  const auto most = static_cast<size_t>(format_.settings().max_tool_response_length);
  if (most == 0 || text.size() <= most) return text;
  const std::string& side = format_.settings().tool_response_truncate_side;
  const size_t head = side == "left" ? 0 : side == "right" ? most : most / 2, tail = most - head;
  // Between characters.
  const auto inside = [&](size_t at) {
    return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  size_t first = head, second = text.size() - tail;
  while (first > 0 && inside(first)) --first;
  while (inside(second)) ++second;
  return str(text.substr(0, first), "...(", second - first, " bytes cut)...", text.substr(second));
}

// ---- Rows.

void ConversationRun::make_prompt() {
  const std::string text = format_.render(messages_, tools_, /*add_generation_prompt=*/true);
  const ChatCodec& codec = format_.codec();
  if (rows_.empty()) return rows_.emplace_back().append_text(codec, text);
  ConversationRow& row = rows_.back();
  const auto shown = row.shown_by(text, [this](std::string_view turn, bool in_reasoning) {
    return format_.parse(turn, tools_, in_reasoning);
  });
  row.settle(shown, codec, std::ssize(rows_) - 1, differences_);
  const std::string_view rest = std::string_view(text).substr(shown.end);
  if (shown.segments == row.segments.size()) return row.append_text(codec, rest);
  ConversationRow next = row.prefix(shown.segments);
  next.append_text(codec, rest);
  rows_.push_back(std::move(next));
}

// ---- The model's part.

void ConversationRun::sampled(const GeneratedSample& sample, double temperature) {
  BOUGH_CHECK(waits_ == Waits::kEngine, "a turn that nobody waits for");
  temperature_ = temperature;
  ConversationRow& row = rows_.back();
  const bool in_reasoning = opens_reasoning(format_.settings().reasoning_parser, row.segments.back().text);
  ConversationRow::Segment& segment =
      row.append_turn(format_.codec(), sample, turn_, in_reasoning, sampling_.stop);
  num_tokens_ += std::ssize(sample.token_ids);
  segment.parts = format_.parse(segment.sampled, tools_, in_reasoning);
  ++turn_;
  turn_rewards_.push_back(0);
  messages_.push_back(assistant_message(segment.parts, segment.sampled));
  OutputParts parts = segment.parts;
  const std::string text = segment.sampled;

  if (sample.finish_reason == FinishReason::kCancelled) return end("cancelled");
  if (sample.finish_reason == FinishReason::kLength) {
    const int64_t most = format_.settings().max_tokens;
    if (std::ssize(row.ids) >= format_.max_context()) return end("max_context");
    return end(most > 0 && num_tokens_ >= most ? "max_tokens" : "max_new_tokens");
  }
  action_ = {.text = text, .content = parts.content, .reasoning = parts.reasoning, .calls = {}};
  take_calls(parts);
  if (action_.calls.empty() && !refusals_.empty()) {  // there is nothing that the environment could do
    for (OrderedJson& message : std::exchange(refusals_, OrderedJson::array())) messages_.push_back(message);
    return go_on();
  }
  waits_ = Waits::kEnvironment;
}

// Calls that the template shows are a list of their own in the message, where all of the turn could be read;
// all else is content, as it was written.
OrderedJson ConversationRun::assistant_message(OutputParts& parts, const std::string& sampled) const {
  OrderedJson calls = OrderedJson::array();
  std::string content = sampled, unshown;
  const bool are_shown =
      format_.shows_calls() &&
      std::all_of(parts.calls.begin(), parts.calls.end(), [](const ToolCall& call) { return call.valid(); });
  for (size_t i = 0; i < parts.calls.size(); ++i) {
    ToolCall& call = parts.calls[i];
    char id[16];
    // Nine letters and digits: what Mistral's templates ask for.
    std::snprintf(id, sizeof id, "c%05d%03d", static_cast<int>(turn_ % 100000), static_cast<int>(i % 1000));
    if (call.id.empty()) call.id = id;
    if (!are_shown) {
      unshown += call.text;
      continue;
    }
    if (const size_t at = content.find(call.text); at != std::string::npos)
      content.erase(at, call.text.size());
    calls.push_back({{"id", call.id},
                     {"type", "function"},
                     {"function", {{"name", call.name}, {"arguments", OrderedJson::parse(call.arguments)}}}});
  }
  const bool has_reasoning = format_.shows_reasoning() && !parts.reasoning.empty();
  OrderedJson message = {{"role", "assistant"},
                         {"content", has_reasoning ? parts.content + unshown : content}};
  if (!calls.empty() && trimmed(content).empty()) message["content"] = "";
  if (has_reasoning) {
    message["reasoning_content"] = trimmed(parts.reasoning);
    message["thinking"] = trimmed(parts.reasoning);  // as gpt-oss's template calls it
  }
  if (!calls.empty()) message["tool_calls"] = std::move(calls);
  return message;
}

std::string ConversationRun::why_invalid(const ToolCall& call) const {
  if (!call.valid()) return call.error;
  if (tools_.is_null()) return "";
  std::string names;
  for (const OrderedJson& tool : tools_) {
    const OrderedJson& function = tool.contains("function") ? tool["function"] : tool;
    const std::string name = function.value("name", "");
    names += (names.empty() ? "" : ", ") + name;
    if (name != call.name) continue;
    const OrderedJson given = OrderedJson::parse(call.arguments);
    const OrderedJson schema = function.value("parameters", OrderedJson::object());
    if (!schema.is_object() || !schema.contains("required") || !schema["required"].is_array()) return "";
    for (const OrderedJson& key : schema["required"])
      if (key.is_string() && !given.contains(key.get<std::string>()))
        return str("the argument ", key.get<std::string>(), " is missing");
    return "";
  }
  return str("there is no tool ", quoted(call.name), "; there are: ", names.empty() ? "none" : names);
}

void ConversationRun::take_calls(const OutputParts& parts) {
  refusals_ = OrderedJson::array();
  for (const ToolCall& call : parts.calls) {
    ++num_calls_;
    const std::string why = why_invalid(call);
    if (why.empty()) {
      action_.calls.push_back({call.id, call.name, OrderedJson::parse(call.arguments)});
      continue;
    }
    ++num_invalid_;
    OrderedJson message = message_of("tool", "error: " + why);
    message["tool_call_id"] = call.id;
    if (!call.name.empty()) message["name"] = call.name;
    refusals_.push_back(std::move(message));
  }
}

// ---- What came of it.

std::vector<Trajectory> ConversationRun::trajectory(const std::string& group, const std::string& name,
                                                    bool all_logprobs) const {
  BOUGH_CHECK(waits_ == Waits::kNothing, "a conversation that has not ended");
  static const std::set<std::string> kCut = {"max_new_tokens", "max_tokens", "max_context", "max_turns"};
  const bool is_valid = failure_.empty() && reason_ != "cancelled";
  std::vector<Trajectory> out;
  for (size_t r = 0; r < std::max<size_t>(1, rows_.size()); ++r) {
    static const ConversationRow kNone;
    Trajectory& sample =
        out.emplace_back((rows_.empty() ? kNone : rows_[r]).trajectory(format_.codec(), all_logprobs));
    sample.group = group;
    sample.trajectory = name;
    sample.temperature = temperature_;
    sample.valid = is_valid;
    if (is_valid) {
      sample.reward = format_.scored_elsewhere() ? reward_ : reward_.value_or(0);
      sample.rewards = rewards_;
    } else {
      sample.reward_failure = failure_.empty() ? reason_ : failure_;
    }
    sample.turn_rewards = turn_rewards_;
    sample.answer = problem_.answer;
    sample.finish_reason = kCut.contains(reason_) ? "length" : is_valid ? "stop" : "cancelled";
    const bool is_last = r + 1 >= rows_.size();
    const ConversationSummary summary{.reason = reason_,
                                      .turns = turn_,
                                      .tokens = num_tokens_,
                                      .calls = num_calls_,
                                      .invalid_calls = num_invalid_,
                                      .messages = is_last ? messages_ : OrderedJson()};
    describe_row(sample, r, std::max<size_t>(1, rows_.size()), is_last ? &summary : nullptr, differences_);
  }
  return out;
}

void ConversationRun::check_integrity() const {
  for (const ConversationRow& row : rows_) row.check_integrity();
  BOUGH_CHECK(std::ssize(turn_rewards_) == turn_, "rewards of ", turn_rewards_.size(), " turns, of ", turn_);
}

// ---- Conversations among rows.

namespace {

// What a conversation's last row knows of it; null: the row is none.
const Json* about(const Trajectory& row) {
  if (!row.fields.is_object()) return nullptr;
  const auto found = row.fields.find(kKey);
  return found != row.fields.end() && found->is_object() && found->contains("reason") ? &*found : nullptr;
}

}  // namespace

void describe_row(Trajectory& row, size_t number, size_t num_rows, const ConversationSummary* summary,
                  const ConversationRow::Differences& differences) {
  Json about = {{"row", number}, {"rows", num_rows}};
  if (summary) {
    Json retokenized = Json::array();
    for (const auto& place : differences.retokenized)
      retokenized.push_back({{"turn", place.turn}, {"row", place.row}, {"position", place.position}});
    about.update({{"reason", summary->reason},
                  {"turns", summary->turns},
                  {"tokens", summary->tokens},
                  {"calls", summary->calls},
                  {"invalid_calls", summary->invalid_calls},
                  {"shown_otherwise", differences.shown_otherwise},
                  {"retokenized", std::move(retokenized)},
                  {"messages", to_plain(summary->messages)}});
  }
  row.fields = {{kKey, std::move(about)}};
}

bool is_conversation(const Trajectory& row) {
  return row.fields.is_object() && row.fields.contains(kKey);
}

std::string_view last_turn(const Trajectory& row) {
  const Json* const conversation = about(row);
  if (!conversation) return "";
  const Json& messages = conversation->at("messages");
  for (auto message = messages.rbegin(); message != messages.rend(); ++message)
    if (message->value("role", "") == "assistant" && (*message)["content"].is_string())
      return (*message)["content"].get_ref<const std::string&>();
  return "";
}

MetricValues conversation_metrics(std::span<const Trajectory* const> rows) {
  MetricValues sums;
  double count = 0;
  for (const Trajectory* row : rows) {
    const Json* const conversation = about(*row);
    if (!conversation) continue;
    ++count;
    for (const char* key : {"turns", "tokens", "calls", "rows"})
      sums[str("conversation/", key, "_mean")] += conversation->value(key, 0.0);
    for (const char* key : {"invalid_calls", "shown_otherwise"})
      sums[str("conversation/", key)] += conversation->value(key, 0.0);
    sums["conversation/retokenized"] += static_cast<double>(conversation->at("retokenized").size());
    sums["conversation/reason/" + conversation->at("reason").get<std::string>()] += 1;
  }
  for (auto& [name, value] : sums)
    if (name.ends_with("_mean")) value /= count;
  return sums;
}

std::string describe_conversation(const Trajectory& row) {
  const Json* const conversation = about(row);
  if (!conversation) return "";
  std::string out =
      str("== ", row.group, " #", row.trajectory, ": ", conversation->at("reason").get<std::string>());
  if (row.reward) out += str(", reward ", format_significant(*row.reward, 4));
  for (const auto& [name, value] : row.rewards) out += str(", ", name, " ", format_significant(value, 4));
  for (const char* key : {"turns", "tokens", "invalid_calls", "rows"})
    if (const auto value = conversation->value(key, int64_t{0}); value > (key == std::string("rows") ? 1 : 0))
      out += str(", ", value, " ", key);
  if (row.reward_failure) out += "\n   " + *row.reward_failure;
  size_t turn = 0;
  for (const Json& message : conversation->at("messages")) {
    const std::string role = message.value("role", "");
    const auto content = message.find("content");
    std::string label = role;
    if (role == "assistant") label += str(" (turn ", turn, ")");
    if (role == "tool" && message.contains("name")) label += " " + message["name"].get<std::string>();
    const auto add = [&](const std::string& head, const std::string& text) {
      out += "\n[" + head + "] ";
      for (const char c : text) out += c == '\n' ? "\n    " : std::string(1, c);
    };
    if (message.contains("reasoning_content"))
      add(label + " thinks", message["reasoning_content"].get<std::string>());
    const bool has_calls = message.contains("tool_calls");
    const std::string text = content == message.end() ? ""
                             : content->is_string()   ? content->get<std::string>()
                                                      : dump_line(*content);
    if (!text.empty() || !has_calls) add(label, text);
    if (has_calls)
      for (const Json& call : message["tool_calls"])
        add(label + " calls",
            str(call["function"]["name"].get<std::string>(), dump_line(call["function"]["arguments"])));
    if (role != "assistant") continue;
    if (turn < row.turn_rewards.size() && row.turn_rewards[turn] != 0)
      out += str("\n    reward of the turn: ", format_significant(row.turn_rewards[turn], 4));
    ++turn;
  }
  return out + "\n";
}

}  // namespace bough
