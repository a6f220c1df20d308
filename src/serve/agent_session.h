// One episode of an agent that is trained from outside: all that its session's key asked and was answered, as
// rows of exact tokens (control/conversation_row.h).
//
// A request that goes on from an answer is shown that answer by the template; where it is shown as it was,
// the prompt begins with the tokens that were sampled, and the row grows. Where it is not (reasoning dropped,
// history rewritten, another sub-agent), or where two requests go on from one place, a new row begins with
// the exact tokens of what they share. So the rows are the paths of a tree, and each token is trained once.
//
// The same request sent again by a client's own retry is the same interaction: what it was answered is given
// again. Other equal requests are separate samples. Lanes and the I/O thread use it: all is under a lock.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "control/conversation.h"
#include "control/conversation_row.h"

namespace bough {

// What a request asks of the engine, and where its answer goes.
struct AskedTurn {
  ConversationRow row;          // all of the prompt
  std::optional<size_t> base;   // the row that it goes on from
  size_t kept = 0;              // segments of that one
  OutputBegin begun;            // by the prompt
  OrderedJson messages, tools;  // as the template was given them; null: token ids were asked
};

// How a retry is told.
struct RequestIdentity {
  uint64_t fingerprint = 0;     // of path and body
  std::string idempotency_key;  // "": none
  bool is_retry = false;        // the client says so
  // Whether `later` is this request sent again.
  bool is_repeated_by(const RequestIdentity& later) const {
    if (later.fingerprint != fingerprint) return false;
    return later.idempotency_key.empty() ? later.is_retry : later.idempotency_key == idempotency_key;
  }
};

class AgentSession {
 public:
  // `format` must outlive it. `sampling`: the run's, for stop strings that requests do not have.
  AgentSession(const ConversationFormat& format, std::string id, uint64_t group, std::string name);

  const std::string& id() const { return id_; }
  uint64_t group() const { return group_; }

  // The prompt of a conversation: the template's text, and what is forced behind it; of token ids.
  std::shared_ptr<const AskedTurn> ask(const std::string& prompt, OutputBegin begun, OrderedJson messages,
                                       OrderedJson tools);
  std::shared_ptr<const AskedTurn> ask(const std::vector<int32_t>& ids);
  // What a request with this identity was answered.
  std::optional<GenerationResult> answered(const RequestIdentity& identity) const;
  // The answer to `asked`, which the client knows as `answer_id`; to a repeated request again under the name
  // of this answer.
  void take(const AskedTurn& asked, const GenerationResult& result, const SamplingParameters& sampling,
            const RequestIdentity& identity, const std::string& answer_id);
  void take_again(const RequestIdentity& identity, const std::string& answer_id);

  // Of an answer, or of the last one: replaces what was set before. False: there is no such answer.
  bool set_reward(const std::optional<std::string>& answer_id, double reward,
                  const std::map<std::string, double>& parts);
  int64_t num_interactions() const;
  bool has_reward() const;

  // Its rows. Not `is_valid`: why, in `reason`. `scored_elsewhere`: a session without a reward is for the
  // run's reward function to score.
  std::vector<Trajectory> trajectory(const std::string& group, bool is_valid, const std::string& reason,
                                     bool scored_elsewhere) const;
  void check_integrity() const;

 private:
  struct Interaction {
    RequestIdentity identity;
    std::vector<std::string> answer_ids;  // several where it was given again
    GenerationResult result;
    std::optional<double> reward;
    std::map<std::string, double> parts;  // of the reward
    OutputParts said;
    OrderedJson messages;
  };
  OutputParts parse(std::string_view text, const OrderedJson& tools, const OutputBegin& begun) const {
    return format_.parse(text, tools, begun);
  }
  OrderedJson messages_of(const Interaction& interaction) const;

  const ConversationFormat& format_;
  const std::string id_;
  const uint64_t group_;
  const std::string name_;  // Trajectory::trajectory
  mutable Mutex mutex_;
  std::vector<ConversationRow> rows_ GUARDED_BY(mutex_);
  std::vector<Interaction> interactions_ GUARDED_BY(mutex_);  // their numbers are the turns
  ConversationRow::Differences differences_ GUARDED_BY(mutex_);
  double temperature_ GUARDED_BY(mutex_) = 1;
};

}  // namespace bough
