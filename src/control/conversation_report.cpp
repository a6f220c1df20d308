// Conversations from the rows of a batch or a file: their metrics, and their texts for people.
#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "base/format.h"
#include "control/conversation.h"

namespace bough {

namespace {

Json to_plain(const OrderedJson& json) {
  return Json::parse(dump_ordered(json));
}

// Rounded to milliseconds, for readers.
std::vector<double> rounded(const std::vector<double>& seconds) {
  std::vector<double> out;
  for (const double value : seconds) out.push_back(std::round(value * 1000) / 1000);
  return out;
}

constexpr const char* kKey = "conversation";  // key in Trajectory::fields

// The conversation fields of a conversation's last row. nullptr if the row has none.
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
                  {"turn_tokens", summary->turn_tokens},
                  {"engine_seconds", rounded(summary->engine_seconds)},
                  {"environment_seconds", rounded(summary->environment_seconds)},
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

namespace {

// Files may have been written by other programs. A field of an unexpected type reads as absent.
std::string text_in(const Json& object, const char* key) {
  if (!object.is_object()) return "";
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return "";
  return found->is_string() ? found->get<std::string>() : dump_line(*found);
}
double number_in(const Json& list, size_t i) {
  return list.is_array() && i < list.size() && list[i].is_number() ? list[i].get<double>() : 0;
}
int64_t count_in(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}
Json list_in(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_array() ? *found : Json::array();
}

ConversationView view_of(const Trajectory& row, const Json& conversation) {
  ConversationView view;
  view.name = "#" + row.trajectory;
  view.reason = text_in(conversation, "reason");
  view.failure = row.reward_failure.value_or("");
  view.reward = row.reward;
  view.rewards = row.rewards;
  view.turns = count_in(conversation, "turns");
  view.tokens = count_in(conversation, "tokens");
  view.invalid_calls = count_in(conversation, "invalid_calls");
  view.rows = std::max<int64_t>(1, count_in(conversation, "rows"));
  const Json tokens = list_in(conversation, "turn_tokens"), engine = list_in(conversation, "engine_seconds"),
             environment = list_in(conversation, "environment_seconds");
  std::set<int64_t> retokenized;
  for (const Json& place : list_in(conversation, "retokenized"))
    if (place.is_object()) retokenized.insert(count_in(place, "turn"));
  size_t turn = 0;
  for (const Json& from : list_in(conversation, "messages")) {
    MessageView& message = view.messages.emplace_back();
    message.role = text_in(from, "role");
    message.content = text_in(from, "content");
    if (message.role == "tool") message.name = text_in(from, "name");
    message.reasoning = text_in(from, "reasoning_content");
    if (from.is_object())
      for (const Json& call : list_in(from, "tool_calls")) {
        const Json function = call.is_object() ? call.value("function", Json()) : Json();
        message.calls.emplace_back(text_in(function, "name"), text_in(function, "arguments"));
      }
    if (message.role != "assistant") continue;
    message.turn = static_cast<int64_t>(turn);
    message.tokens = static_cast<int64_t>(number_in(tokens, turn));
    message.engine_seconds = number_in(engine, turn);
    message.environment_seconds = number_in(environment, turn);
    message.retokenized = retokenized.contains(static_cast<int64_t>(turn));
    if (turn < row.turn_rewards.size()) message.reward = row.turn_rewards[turn];
    ++turn;
  }
  for (size_t i = 0; i < row.input_ids.size(); ++i) {
    const bool is_model = row.turns.empty() ? row.loss_mask[i] != 0 : row.turns[i] >= 0;
    if (view.runs.empty() || view.runs.back().is_model != is_model) view.runs.push_back({0, is_model});
    ++view.runs.back().tokens;
  }
  return view;
}

}  // namespace

std::string describe_conversation(const Trajectory& row) {
  const Json* const conversation = about(row);
  if (!conversation) return "";
  const ConversationView view = view_of(row, *conversation);
  std::string out = str("== ", row.group, " ", view.name, ": ", view.reason);
  if (view.reward) out += str(", reward ", format_significant(*view.reward, 4));
  for (const auto& [name, value] : view.rewards) out += str(", ", name, " ", format_significant(value, 4));
  out += str(", ", view.turns, " turns, ", view.tokens, " tokens");
  if (view.invalid_calls > 0) out += str(", ", view.invalid_calls, " invalid_calls");
  if (view.rows > 1) out += str(", ", view.rows, " rows");
  if (!view.failure.empty()) out += "\n   " + view.failure;
  for (const MessageView& message : view.messages) {
    std::string label = message.role;
    if (message.turn) label += str(" (turn ", *message.turn, ")");
    if (!message.name.empty()) label += " " + message.name;
    const auto add = [&](const std::string& head, const std::string& text) {
      out += "\n[" + head + "] ";
      for (const char c : text) out += c == '\n' ? "\n    " : std::string(1, c);
    };
    if (!message.reasoning.empty()) add(label + " thinks", message.reasoning);
    if (!message.content.empty() || message.calls.empty()) add(label, message.content);
    for (const auto& [name, arguments] : message.calls) add(label + " calls", name + arguments);
    if (message.reward != 0) out += str("\n    reward of the turn: ", format_significant(message.reward, 4));
  }
  return out + "\n";
}

std::vector<ConversationGroup> conversation_groups(std::span<const Trajectory> rollouts, int64_t step,
                                                   size_t most) {
  std::vector<ConversationGroup> groups;
  std::vector<const Trajectory*> rows;  // conversations of the last group
  for (const Trajectory& row : rollouts) {
    const Json* const conversation = about(row);
    if (!conversation) continue;
    if (groups.empty() || groups.back().name != row.group) {
      if (groups.size() == most) break;
      groups.push_back({step, row.group, {}});
      rows.clear();
    }
    ConversationView view = view_of(row, *conversation);
    for (size_t i = 0; i < rows.size(); ++i) {
      const std::vector<int32_t>&ids = row.input_ids, &other = rows[i]->input_ids;
      const auto common =
          std::mismatch(ids.begin(), ids.end(), other.begin(), other.end()).first - ids.begin();
      if (!view.forks_from.empty() && common <= view.common_tokens) continue;
      view.forks_from = groups.back().views[i].name;
      view.common_tokens = common;
      view.fork_turn = -1;
      if (row.turns.empty()) continue;  // also a conversation that failed before its first token
      const auto at = static_cast<size_t>(std::min<std::ptrdiff_t>(common, std::ssize(row.turns) - 1));
      view.fork_turn = row.turns[at];
      // If the environment's answers differ, the fork belongs to the turn that the environment answered.
      for (size_t t = at; view.fork_turn < 0 && t > 0; --t) view.fork_turn = row.turns[t - 1];
    }
    groups.back().views.push_back(std::move(view));
    rows.push_back(&row);
  }
  return groups;
}

}  // namespace bough
