// A conversation of a model with an environment, as token ids: what the engine sampled and what the
// environment put there, never a text that was tokenised again.
//
// The first prompt is the chat template's text of the environment's messages. Each turn's tokens follow it as
// they were sampled, mask 1; then the tokens of what the template writes behind that turn, mask 0: the rest
// of the turn's end, the environment's messages, the opening of the next turn. So a prompt begins with the
// exact tokens of the one before.
//
// A row is such a sequence (conversation_row.h). A new row begins where the template, given the new messages,
// does not show an old segment any more as it was: it drops reasoning of earlier turns, say. The new row
// keeps the tokens of the segments before that, mask 0, since the row before has trained them, and the rest
// is encoded anew: rows are kept by exact prefix and never stretched to fit.
//
// What is counted and located: `retokenized`, where the text that the template shows for a turn would have
// been other tokens than those sampled. Calls that could not be read, or name no tool, go back to the model
// as the tool's answer.
//
// Every conversation ends with a reason: done (the environment said so), max_turns, max_new_tokens (of a
// turn), max_tokens, max_context, max_invalid_calls, template_refused, or what the environment failed with
// (environment.h). Those of a failure are not valid: they leave group and loss.
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
#include "data/trajectory.h"
#include "env/environment.h"
#include "report/conversation_page.h"
#include "report/metrics.h"

namespace bough {

// What all conversations of a run have in common. The template is asked once whether it shows calls and
// reasoning; where it does not, they stay in the content, as the model wrote them.
class ConversationFormat {
 public:
  // UserError: settings that name no parser, or variables that are no JSON object. `max_length`: the model's.
  // `scored_elsewhere`: a conversation to which the environment gave no reward is for the reward function to
  // score; else it has the reward 0.
  ConversationFormat(const ChatCodec& codec, const EnvironmentSettings& settings, int64_t max_length,
                     bool scored_elsewhere = false);

  const ChatCodec& codec() const { return codec_; }
  const EnvironmentSettings& settings() const { return settings_; }
  int64_t max_context() const { return max_context_; }
  bool scored_elsewhere() const { return scored_elsewhere_; }
  bool shows_calls() const { return shows_calls_; }
  bool shows_reasoning() const { return shows_reasoning_; }

  std::string render(const OrderedJson& messages, const OrderedJson& tools, bool add_generation_prompt) const;
  OutputParts parse(std::string_view text, const OrderedJson& tools, const OutputBegin& begun) const;

 private:
  const ChatCodec& codec_;
  const EnvironmentSettings settings_;
  int64_t max_context_;
  bool scored_elsewhere_;
  OrderedJson variables_ = OrderedJson::object();
  bool shows_calls_ = false, shows_reasoning_ = false;
};

class ConversationRun {
 public:
  enum class Waits { kEnvironment, kEngine, kNothing };

  // `problem` must outlive it. It waits for the environment's opening.
  ConversationRun(const ConversationFormat& format, const Problem& problem,
                  const SamplingParameters& sampling);

  Waits waits_for() const { return waits_; }

  // Of the environment.
  void observe(EpisodeReply reply);
  // Of the engine.
  void sampled(const GeneratedSample& sample, double temperature);

  // What the environment is to answer, where it waits for that.
  const Action& action() const { return action_; }
  // What the engine is to go on from, and for how many tokens at most, where it waits for that.
  const std::vector<int32_t>& prompt() const { return rows_.back().ids; }
  int64_t turn() const { return turn_; }  // the number of the next one; of turns, at the end
  int64_t max_new_tokens() const;

  const std::string& reason() const { return reason_; }  // that it ended with
  // Its rows, at least one, in order; the reward is that of the environment, if it gave one.
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
  OrderedJson refusals_ = OrderedJson::array();  // answers to calls of the turn that nobody can take
  int64_t turn_ = 0, num_tokens_ = 0, num_calls_ = 0, num_invalid_ = 0;
  ConversationRow::Differences differences_;
  double temperature_ = 1;
  std::optional<double> reward_;
  std::map<std::string, double> rewards_;
  std::vector<double> turn_rewards_;
  std::vector<int64_t> turn_tokens_;
  std::vector<double> engine_seconds_, environment_seconds_;  // by turn
  std::chrono::steady_clock::time_point since_ =
      std::chrono::steady_clock::now();  // it waits for what it waits for
  std::string reason_, failure_;
};

// Whether a trajectory begins with row i: rows of one trajectory follow each other, and are one sample of
// their group.
inline bool begins_trajectory(std::span<const Trajectory> rows, size_t i) {
  return i == 0 || rows[i].trajectory.empty() || rows[i].trajectory != rows[i - 1].trajectory ||
         rows[i].group != rows[i - 1].group;
}

// What people read of a conversation, beside its rows.
struct ConversationSummary {
  std::string reason;  // that it ended with
  int64_t turns = 0, tokens = 0, calls = 0, invalid_calls = 0;
  std::vector<int64_t> turn_tokens;  // by turn, as what follows; empty where nobody took the time
  std::vector<double> engine_seconds, environment_seconds;
  OrderedJson messages = OrderedJson::array();
};
// Sets the row's `conversation` (docs/formats.md): its number among `num_rows`; in the last one the summary
// and where texts would have been other tokens.
void describe_row(Trajectory& row, size_t number, size_t num_rows, const ConversationSummary* summary,
                  const ConversationRow::Differences& differences);

// Whether a row is of a conversation; what its model said last, of the conversation's last row.
bool is_conversation(const Trajectory& row);
std::string_view last_turn(const Trajectory& row);

// Counts of the conversations among these rows: turns, tokens, calls, what was counted, reasons by name.
MetricValues conversation_metrics(std::span<const Trajectory* const> rows);

// A conversation as a person reads it: turns, calls, rewards, the reason. Empty: the row is not the last of
// one.
std::string describe_conversation(const Trajectory& row);

// The same of a step's rollouts for report.html: the first `most` groups of conversations, and where those of
// a group forked.
std::vector<TalkGroup> conversation_groups(std::span<const Trajectory> rollouts, int64_t step, size_t most);

}  // namespace bough
