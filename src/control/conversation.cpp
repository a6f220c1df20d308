#include "control/conversation.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <utility>

#include "base/ascii.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/format.h"
#include "base/log.h"

namespace bough {

// ---- State that conversations share ----

ConversationFormat::ConversationFormat(const ChatCodec& codec, const EnvironmentSettings& settings,
                                       int64_t max_length, bool scored_elsewhere)
    : codec_(codec),
      settings_(settings),
      knows_no_calls_(settings.tool_call_parser == kAutoParser && codec.tool_call_parser().empty()),
      max_context_(settings.max_context > 0 ? std::min(settings.max_context, max_length) : max_length),
      scored_elsewhere_(scored_elsewhere) {
  if (!settings_.chat_template_kwargs.empty()) {
    variables_ = parse_ordered_json(settings_.chat_template_kwargs, "environment.chat_template_kwargs");
    if (!variables_.is_object())
      throw UserError(str("environment.chat_template_kwargs: got ", quoted(settings_.chat_template_kwargs),
                          ", expected a JSON object"));
  }
  if (settings_.tool_call_parser == kAutoParser) {
    settings_.tool_call_parser = codec.tool_call_parser();
    log_info(str("environment.tool_call_parser=auto: ",
                 knows_no_calls_
                     ? "none, since the chat template has the markers of no known format; an environment "
                       "with tools is refused"
                     : settings_.tool_call_parser));
  }
  parse("", {}, {});  // unknown parser names are refused here
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
  // A missing or invalid template is found before anything is generated.
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
                                      const OutputBegin& begun) const {
  return OutputParser::parse(
      OutputParser(settings_.reasoning_parser, settings_.tool_call_parser, tools, begun), text);
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

// ---- The environment's turn.

void ConversationRun::observe(EpisodeReply reply) {
  BOUGH_CHECK(waits_ == Waits::kEnvironment, "unexpected answer of the environment");
  if (turn_ > 0) environment_seconds_.back() = seconds_since(since_);
  since_ = std::chrono::steady_clock::now();
  if (reply.failure != EpisodeFailure::kNone) {
    failure_ = std::move(reply.message);
    return end(failure_name(reply.failure));
  }
  Observation& observation = reply.observation;
  if (turn_ == 0) {
    tools_ = std::move(observation.tools);
    if (tools_.is_null()) tools_ = problem_.tools;
    if (format_.knows_no_calls() && tools_.is_array() && !tools_.empty())
      throw UserError(
          "environment: it has tools, but the model's chat template has the markers of no known format of "
          "tool calls; set environment.tool_call_parser (docs/chat.md lists the formats; empty: calls are "
          "not read)");
    if (observation.messages.empty()) {
      if (problem_.messages.empty()) observation.messages.push_back(message_of("user", problem_.prompt));
      else observation.messages = problem_.messages;
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
    // Tool messages answer the calls in order. A message without id or name gets those of its call.
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
  if (std::ssize(prompt()) >= format_.max_context()) {
    if (turn_ == 0)  // nothing was sampled that a reward could judge
      failure_ = str(problem_.where, problem_.where.empty() ? "" : ": ", "the conversation begins with ",
                     prompt().size(), " tokens, but its context is ", format_.max_context(),
                     ": no room for a turn; shorten the problem or the environment's first messages");
    return end("max_context");
  }
  waits_ = Waits::kEngine;
}

std::string ConversationRun::cut(const std::string& text) const {
  const auto most = static_cast<size_t>(format_.settings().max_tool_response_length);
  if (most == 0 || text.size() <= most) return text;
  const std::string& side = format_.settings().tool_response_truncate_side;
  const size_t head = side == "left" ? 0 : side == "right" ? most : most / 2, tail = most - head;
  // True if `at` lies inside a UTF-8 character.
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
  const auto shown = row.shown_by(text, [this](std::string_view turn, const OutputBegin& begun) {
    return format_.parse(turn, tools_, begun);
  });
  row.settle(shown, codec, std::ssize(rows_) - 1, differences_);
  const std::string_view rest = std::string_view(text).substr(shown.end);
  if (shown.segments == row.segments.size()) return row.append_text(codec, rest);
  ConversationRow next = row.prefix(shown.segments);
  next.append_text(codec, rest);
  rows_.push_back(std::move(next));
}

// ---- The model's turn.

void ConversationRun::sampled(const GeneratedSample& sample, double temperature) {
  BOUGH_CHECK(waits_ == Waits::kEngine, "unexpected sample of the engine");
  engine_seconds_.push_back(seconds_since(since_));
  environment_seconds_.push_back(0);
  since_ = std::chrono::steady_clock::now();
  temperature_ = temperature;
  ConversationRow& row = rows_.back();
  const OutputBegin begun{opens_reasoning(format_.settings().reasoning_parser, row.segments.back().text), ""};
  ConversationRow::Segment& segment = row.append_turn(format_.codec(), sample, turn_, begun, sampling_.stop);
  num_tokens_ += std::ssize(sample.token_ids);
  turn_tokens_.push_back(std::ssize(sample.token_ids));
  segment.parts = format_.parse(segment.sampled, tools_, begun);
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
  if (action_.calls.empty() && !refusals_.empty()) {  // no call is left for the environment
    for (OrderedJson& message : std::exchange(refusals_, OrderedJson::array())) messages_.push_back(message);
    return go_on();
  }
  waits_ = Waits::kEnvironment;
}

// If the template shows calls and the whole turn could be parsed, its calls become a list in the message.
// Otherwise everything is content, as the model wrote it.
OrderedJson ConversationRun::assistant_message(OutputParts& parts, const std::string& sampled) const {
  OrderedJson calls = OrderedJson::array();
  std::string content = sampled, unshown;
  const bool are_shown =
      format_.shows_calls() &&
      std::all_of(parts.calls.begin(), parts.calls.end(), [](const ToolCall& call) { return call.valid(); });
  for (size_t i = 0; i < parts.calls.size(); ++i) {
    ToolCall& call = parts.calls[i];
    char id[16];
    // Nine letters and digits, as Mistral's templates require.
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
    message["thinking"] = trimmed(parts.reasoning);  // the field's name in gpt-oss's template
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

// ---- Results.

std::vector<Trajectory> ConversationRun::trajectory(const std::string& group, const std::string& name,
                                                    bool all_logprobs) const {
  BOUGH_CHECK(waits_ == Waits::kNothing, "the conversation has not ended");
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
                                      .turn_tokens = turn_tokens_,
                                      .engine_seconds = engine_seconds_,
                                      .environment_seconds = environment_seconds_,
                                      .messages = is_last ? messages_ : OrderedJson()};
    describe_row(sample, r, std::max<size_t>(1, rows_.size()), is_last ? &summary : nullptr, differences_);
  }
  return out;
}

void ConversationRun::check_integrity() const {
  for (const ConversationRow& row : rows_) row.check_integrity();
  BOUGH_CHECK(std::ssize(turn_rewards_) == turn_, "rewards of ", turn_rewards_.size(), " turns, expected ",
              turn_);
}

}  // namespace bough
