// A conversation of a model with an environment, as token ids. The tokens that are trained are the sampled
// tokens themselves, never text that was tokenised again.
//
// The first prompt is the chat template's text of the environment's messages. Then follow for each turn:
// - the turn's tokens as they were sampled, mask 1
// - the tokens of what the template writes after that turn, mask 0: the rest of the turn's end, the
//   environment's messages, the opening of the next turn
// So each prompt begins with the exact tokens of the previous prompt.
//
// Such a sequence is a row of the batch (conversation_row.h). Its segments are inputs and turns. A new row
// begins if the template, given the new messages, shows an old segment differently. For example, a template
// may drop the reasoning of earlier turns. The new row keeps the tokens of the segments before the changed
// one with mask 0, because the previous row trains them. The rest is encoded again. Rows have only exact
// prefixes in common.
//
// `retokenized` counts and locates the turns whose text in the template would be encoded to other tokens than
// those sampled. If a call cannot be parsed or names no tool, the model gets an error as the tool's answer.
//
// Every conversation ends with a reason: done (the environment said so), max_turns, max_new_tokens (of a
// turn), max_tokens, max_context, max_invalid_calls, template_refused, cancelled, or the environment's
// failure (environment.h). A conversation that ended by a failure, or whose first prompt leaves no room for a
// turn, is not valid: it counts neither in its group of samples nor in the loss.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "control/conversation_row.h"
#include "control/conversation_view.h"
#include "data/trajectory.h"
#include "env/environment.h"
#include "report/metrics.h"

namespace bough {

// Used by all conversations of a run. The constructor tests whether the template shows calls and reasoning.
// If the template does not, they stay in the content, as the model wrote them.
class ConversationFormat {
 public:
  // Throws UserError if the settings name no parser, if the template variables are no JSON object, or if
  // there is no usable chat template. `max_length`: the model's maximum length in tokens. `scored_elsewhere`:
  // if the environment gives a conversation no reward, the reward function scores it; else its reward is 0.
  ConversationFormat(const ChatCodec& codec, const EnvironmentSettings& settings, int64_t max_length,
                     bool scored_elsewhere = false);

  const ChatCodec& codec() const { return codec_; }
  const EnvironmentSettings& settings() const { return settings_; }
  int64_t max_context() const { return max_context_; }
  bool scored_elsewhere() const { return scored_elsewhere_; }
  bool shows_calls() const { return shows_calls_; }
  bool shows_reasoning() const { return shows_reasoning_; }
  bool knows_no_calls() const { return knows_no_calls_; }

  std::string render(const OrderedJson& messages, const OrderedJson& tools, bool add_generation_prompt) const;
  OutputParts parse(std::string_view text, const OrderedJson& tools, const OutputBegin& begun) const;

 private:
  const ChatCodec& codec_;
  EnvironmentSettings settings_;
  const bool knows_no_calls_;  // tool_call_parser is auto, and the template has no known markers
  int64_t max_context_;
  bool scored_elsewhere_;
  OrderedJson variables_ = OrderedJson::object();
  bool shows_calls_ = false, shows_reasoning_ = false;
};

class ConversationRun {
 public:
  enum class Waits { kEnvironment, kEngine, kNothing };

  // `format` and `problem` must outlive this object. At first the conversation waits for the environment.
  ConversationRun(const ConversationFormat& format, const Problem& problem,
                  const SamplingParameters& sampling);

  Waits waits_for() const { return waits_; }

  // Takes the environment's reply.
  void observe(EpisodeReply reply);
  // Takes the turn that the engine sampled.
  void sampled(const GeneratedSample& sample, double temperature);

  // The action that the environment must answer. Valid only while the conversation waits for the environment.
  const Action& action() const { return action_; }
  // prompt(): the tokens that the engine must continue. sampled_tokens(): a flag for each of them, 1 if the
  // policy sampled it. max_new_tokens(): the most tokens that it may add.
  // Valid only while the conversation waits for the engine.
  const std::vector<int32_t>& prompt() const { return rows_.back().ids; }
  const std::vector<uint8_t>& sampled_tokens() const { return rows_.back().sampled; }
  int64_t turn() const { return turn_; }  // number of the next turn; at the end, of all turns
  int64_t max_new_tokens() const;

  const std::string& reason() const { return reason_; }  // why it ended
  // Returns the conversation's rows of the batch in order, at least one. The reward is the environment's, if
  // it gave one. The conversation must have ended.
  std::vector<Trajectory> trajectory(const std::string& group, const std::string& name,
                                     bool all_logprobs) const;

  void check_integrity() const;

 private:
  void end(const std::string& reason);
  void go_on();
  void make_prompt();
  OrderedJson assistant_message(OutputParts& parts, const std::string& sampled) const;
  void take_calls(const OutputParts& parts);
  std::string why_invalid(const ToolCall& call) const;
  std::string cut(const std::string& text) const;

  const ConversationFormat& format_;
  const Problem& problem_;
  const SamplingParameters sampling_;
  Waits waits_ = Waits::kEnvironment;
  OrderedJson messages_ = OrderedJson::array(), tools_;
  std::vector<ConversationRow> rows_;
  Action action_;
  OrderedJson refusals_ = OrderedJson::array();  // answers to invalid calls of the last turn
  int64_t turn_ = 0, num_tokens_ = 0, num_calls_ = 0, num_invalid_ = 0;
  ConversationRow::Differences differences_;
  double temperature_ = 1;
  std::optional<double> reward_;
  std::map<std::string, double> rewards_;
  std::vector<double> turn_rewards_;
  std::vector<int64_t> turn_tokens_;
  std::vector<double> engine_seconds_, environment_seconds_;  // by turn
  std::chrono::steady_clock::time_point since_ =
      std::chrono::steady_clock::now();  // when the current wait began
  std::string reason_, failure_;
};

// Whether row i of the batch is the first of its trajectory. The rows of one trajectory (here: one
// conversation) are consecutive and count as one sample of their group.
inline bool begins_trajectory(std::span<const Trajectory> rows, size_t i) {
  return i == 0 || rows[i].trajectory.empty() || rows[i].trajectory != rows[i - 1].trajectory ||
         rows[i].group != rows[i - 1].group;
}

// The facts about a conversation that reports show in addition to its rows.
struct ConversationSummary {
  std::string reason;  // why it ended
  int64_t turns = 0, tokens = 0, calls = 0, invalid_calls = 0;
  std::vector<int64_t> turn_tokens;                         // by turn
  std::vector<double> engine_seconds, environment_seconds;  // by turn; empty: not measured
  OrderedJson messages = OrderedJson::array();
};
// Sets the row's field `conversation` (docs/formats.md): the row's index `number` among `num_rows`. The last
// row also gets the summary and the retokenized turns. summary: nullptr for all rows but the last.
void describe_row(Trajectory& row, size_t number, size_t num_rows, const ConversationSummary* summary,
                  const ConversationRow::Differences& differences);

// is_conversation(): whether a row belongs to a conversation. last_turn(): the model's last message; ""
// unless the row is the last of its conversation.
bool is_conversation(const Trajectory& row);
std::string_view last_turn(const Trajectory& row);

// Metrics of the conversations among these rows: turns, tokens, calls, invalid calls, retokenized turns, and
// counts by reason.
MetricValues conversation_metrics(std::span<const Trajectory* const> rows);

// A conversation as readable text: turns, calls, rewards, the reason. Empty if the row is not the last of a
// conversation.
std::string describe_conversation(const Trajectory& row);

// Returns, for the page of a run, the conversations of the first `most` groups, and where the conversations
// of a group fork. `rollouts`: those of training step `step`.
std::vector<ConversationGroup> conversation_groups(std::span<const Trajectory> rollouts, int64_t step,
                                                   size_t most);

}  // namespace bough
