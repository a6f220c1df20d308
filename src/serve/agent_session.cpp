#include "serve/agent_session.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace bough {

AgentSession::AgentSession(const ConversationFormat& format, std::string id, uint64_t group, std::string name)
    : format_(format), id_(std::move(id)), group_(group), name_(std::move(name)) {}

// Chooses the conversation row of which the prompt's text extends the longest prefix, counted in tokens. If
// several prefixes are equally long, it takes that of the newest row.
std::shared_ptr<const AskedTurn> AgentSession::ask(const std::string& prompt, OutputBegin begun,
                                                   OrderedJson messages, OrderedJson tools) {
  const ChatCodec& codec = format_.codec();
  auto asked = std::make_shared<AskedTurn>();
  asked->messages = std::move(messages);
  asked->tools = std::move(tools);
  const std::string text = prompt + begun.forced;
  asked->begun = std::move(begun);
  const MutexLock lock(mutex_);
  ConversationRow::Shown best;
  size_t most = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    ConversationRow::Shown shown =
        rows_[i].shown_by(text, [&](std::string_view turn, const OutputBegin& of_turn) {
          return parse(turn, asked->tools, of_turn);
        });
    const size_t tokens = shown.segments == 0 ? 0 : rows_[i].segments[shown.segments - 1].end;
    if (tokens == 0 || tokens < most) continue;
    most = tokens;
    best = std::move(shown);
    asked->base = i;
  }
  if (asked->base) {
    ConversationRow& base = rows_[*asked->base];
    base.settle(best, codec, static_cast<int64_t>(*asked->base), differences_);
    asked->row = base.prefix(best.segments);
    asked->kept = best.segments;
  }
  const std::string_view rest = std::string_view(text).substr(best.end);
  if (!rest.empty()) asked->row.append_text(codec, rest);
  return asked;
}

std::shared_ptr<const AskedTurn> AgentSession::ask(const std::vector<int32_t>& ids) {
  auto asked = std::make_shared<AskedTurn>();
  const MutexLock lock(mutex_);
  size_t most = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const ConversationRow& row = rows_[i];
    const auto same = static_cast<size_t>(
        std::mismatch(ids.begin(), ids.end(), row.ids.begin(), row.ids.end()).first - ids.begin());
    size_t kept = 0;
    while (kept < row.segments.size() && row.segments[kept].end <= same) ++kept;
    if (kept == 0 || row.segments[kept - 1].end < most) continue;
    most = row.segments[kept - 1].end;
    asked->base = i;
    asked->kept = kept;
  }
  if (asked->base) asked->row = rows_[*asked->base].prefix(asked->kept);
  asked->row.append_ids(format_.codec(), std::span(ids).subspan(most));
  return asked;
}

std::optional<GenerationResult> AgentSession::answered(const RequestIdentity& identity) const {
  const MutexLock lock(mutex_);
  for (auto each = interactions_.rbegin(); each != interactions_.rend(); ++each)
    if (each->identity.is_repeated_by(identity)) return each->result;
  return std::nullopt;
}

void AgentSession::take_again(const RequestIdentity& identity, const std::string& answer_id) {
  const MutexLock lock(mutex_);
  for (auto each = interactions_.rbegin(); each != interactions_.rend(); ++each)
    if (each->identity.is_repeated_by(identity)) return each->answer_ids.push_back(answer_id);
}

void AgentSession::take(const AskedTurn& asked, const GenerationResult& result,
                        const SamplingParameters& sampling, const RequestIdentity& identity,
                        const std::string& answer_id) {
  const GeneratedSample& sample = result.samples.at(0);
  const MutexLock lock(mutex_);
  // Another request may have extended the row in the meantime.
  ConversationRow* row = nullptr;
  if (asked.base && rows_[*asked.base].segments.size() == asked.kept) {
    row = &rows_[*asked.base];
    row->append_rest(asked.row);
  } else {
    row = &rows_.emplace_back(asked.row);
  }
  ConversationRow::Segment& turn =
      row->append_turn(format_.codec(), sample, std::ssize(interactions_), asked.begun, sampling.stop);
  turn.parts = parse(turn.sampled, asked.tools, asked.begun);
  temperature_ = result.temperature;
  interactions_.push_back({.identity = identity,
                           .answer_ids = {answer_id},
                           .result = result,
                           .reward = {},
                           .parts = {},
                           .said = turn.parts,
                           .messages = asked.messages.is_null()
                                           ? OrderedJson::array({message_of("user", row->segments[0].text)})
                                           : asked.messages});
}

bool AgentSession::set_reward(const std::optional<std::string>& answer_id, double reward,
                              const std::map<std::string, double>& parts) {
  const MutexLock lock(mutex_);
  for (auto each = interactions_.rbegin(); each != interactions_.rend(); ++each) {
    const auto& ids = each->answer_ids;
    if (answer_id && std::find(ids.begin(), ids.end(), *answer_id) == ids.end()) continue;
    each->reward = reward;
    each->parts = parts;
    return true;
  }
  return false;
}

int64_t AgentSession::num_interactions() const {
  const MutexLock lock(mutex_);
  return std::ssize(interactions_);
}

bool AgentSession::has_reward() const {
  const MutexLock lock(mutex_);
  return std::any_of(interactions_.begin(), interactions_.end(),
                     [](const Interaction& each) { return each.reward.has_value(); });
}

// The last answer with its history, as readers see it.
OrderedJson AgentSession::messages_of(const Interaction& interaction) const {
  OrderedJson messages = interaction.messages;
  OrderedJson message = message_of("assistant", interaction.said.content);
  if (!interaction.said.reasoning.empty()) message["reasoning_content"] = interaction.said.reasoning;
  for (const ToolCall& call : interaction.said.calls) {
    if (!call.valid()) {
      message["content"] = message["content"].get<std::string>() + call.text;
      continue;
    }
    message["tool_calls"].push_back(
        {{"id", call.id},
         {"type", "function"},
         {"function", {{"name", call.name}, {"arguments", OrderedJson::parse(call.arguments)}}}});
  }
  messages.push_back(std::move(message));
  return messages;
}

std::vector<Trajectory> AgentSession::trajectory(const std::string& group, bool is_valid,
                                                 const std::string& reason, bool scored_elsewhere) const {
  const MutexLock lock(mutex_);
  std::vector<double> turn_rewards;
  std::map<std::string, double> parts;
  std::optional<double> reward;
  int64_t tokens = 0, calls = 0, invalid_calls = 0;
  for (const Interaction& each : interactions_) {
    turn_rewards.push_back(each.reward.value_or(0));
    if (each.reward) reward = reward.value_or(0) + *each.reward;
    for (const auto& [name, value] : each.parts) parts[name] += value;
    tokens += std::ssize(each.result.samples[0].token_ids);
    for (const ToolCall& call : each.said.calls) (call.valid() ? calls : invalid_calls) += 1;
  }
  std::vector<Trajectory> out;
  for (size_t r = 0; r < rows_.size(); ++r) {
    Trajectory& row = out.emplace_back(rows_[r].trajectory(format_.codec(), /*all_logprobs=*/false));
    row.group = group;
    row.trajectory = name_;
    row.temperature = temperature_;
    row.valid = is_valid && (reward || scored_elsewhere);
    if (row.valid) {
      row.reward = reward;
      row.rewards = parts;
    } else {
      row.reward_failure = is_valid ? "the session ended without a reward" : reason;
    }
    row.turn_rewards = turn_rewards;
    const GeneratedSample& last = interactions_.back().result.samples[0];
    row.finish_reason = last.finish_reason == FinishReason::kLength ? "length"
                        : row.valid                                 ? "stop"
                                                                    : "cancelled";
    ConversationSummary summary{.reason = reason,
                                .turns = std::ssize(interactions_),
                                .tokens = tokens,
                                .calls = calls,
                                .invalid_calls = invalid_calls};
    const bool is_last = r + 1 == rows_.size();
    if (is_last) summary.messages = messages_of(interactions_.back());
    describe_row(row, r, rows_.size(), is_last ? &summary : nullptr, differences_);
  }
  return out;
}

void AgentSession::check_integrity() const {
  const MutexLock lock(mutex_);
  size_t trained = 0, sampled = 0;
  for (const ConversationRow& row : rows_) {
    row.check_integrity();
    BOUGH_CHECK(row.segments.back().turn, "a row must end with an answer");
    trained += static_cast<size_t>(std::count(row.loss_mask.begin(), row.loss_mask.end(), 1));
  }
  for (const Interaction& each : interactions_) sampled += each.result.samples[0].token_ids.size();
  BOUGH_CHECK(trained == sampled, trained, " trained tokens of ", sampled, " sampled");
}

}  // namespace bough
