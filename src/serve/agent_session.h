// One episode of an external agent that is trained: all requests under one session key and their answers.
// They are stored as conversation rows, "rows" in this file: token ids as the model read and sampled them
// (control/conversation_row.h). Each row becomes a trajectory.
//
// A later request usually contains an earlier answer, rendered by the chat template.
//   - If the template renders the answer as it was sampled, the prompt keeps the sampled tokens, and the row
//     grows.
//   - If not (reasoning dropped, history rewritten, another sub-agent), a new row begins.
//   - If two requests continue the same position, the second one begins a new row.
// A new row begins with the exact tokens of the prefix that it shares with an earlier row. The rows are thus
// the paths of a tree, and each sampled token is trained once.
//
// If a client retries a request, the session returns the first answer again. Equal requests that are no
// retries are separate samples. The server's preparation threads and its I/O thread call a session. A mutex
// guards all state.
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

// A request's prompt, and the place in the session's rows where its answer belongs.
struct AskedTurn {
  ConversationRow row;          // the whole prompt
  std::optional<size_t> base;   // index of the row that the prompt continues; nullopt: a new row
  size_t kept = 0;              // number of segments of the base row with which the prompt begins
  OutputBegin begun;            // beginning of the output that the prompt fixes
  OrderedJson messages, tools;  // as given to the template; null: the prompt was token ids
};

// Tells retries from new requests.
struct RequestIdentity {
  uint64_t fingerprint = 0;     // hash of path and body
  std::string idempotency_key;  // "" if the client sent none
  bool is_retry = false;        // the client marked the request as a retry
  // Returns whether `later` is a retry of this request.
  bool is_repeated_by(const RequestIdentity& later) const {
    if (later.fingerprint != fingerprint) return false;
    return later.idempotency_key.empty() ? later.is_retry : later.idempotency_key == idempotency_key;
  }
};

class AgentSession {
 public:
  // `format` must outlive the session. `name` becomes Trajectory::trajectory of all its rows.
  AgentSession(const ConversationFormat& format, std::string id, uint64_t group, std::string name);

  const std::string& id() const { return id_; }
  uint64_t group() const { return group_; }

  // Finds the longest row prefix that the prompt extends, and encodes only the rest. `prompt` is the rendered
  // conversation; begun.forced is appended to it. The second overload takes a prompt of token ids.
  std::shared_ptr<const AskedTurn> ask(const std::string& prompt, OutputBegin begun, OrderedJson messages,
                                       OrderedJson tools);
  std::shared_ptr<const AskedTurn> ask(const std::vector<int32_t>& ids);
  // Returns the answer to an earlier attempt of this request; nullopt if there is none.
  std::optional<GenerationResult> answered(const RequestIdentity& identity) const;
  // take() appends the answer to the row of `asked`; the client knows the answer by `answer_id`. take_again()
  // gives the answer of a retried request an additional id.
  void take(const AskedTurn& asked, const GenerationResult& result, const SamplingParameters& sampling,
            const RequestIdentity& identity, const std::string& answer_id);
  void take_again(const RequestIdentity& identity, const std::string& answer_id);

  // Sets the reward of one answer, or of the last answer if `answer_id` is nullopt. Replaces an earlier
  // reward. Returns false if there is no such answer.
  bool set_reward(const std::optional<std::string>& answer_id, double reward,
                  const std::map<std::string, double>& parts);
  int64_t num_interactions() const;
  bool has_reward() const;

  // Returns each row as a trajectory. If `is_valid` is false, `reason` says why. `scored_elsewhere`: rows
  // without a reward are valid too, because the run's reward function scores them.
  std::vector<Trajectory> trajectory(const std::string& group, bool is_valid, const std::string& reason,
                                     bool scored_elsewhere) const;
  void check_integrity() const;

 private:
  struct Interaction {
    RequestIdentity identity;
    std::vector<std::string> answer_ids;  // several if the answer was given again
    GenerationResult result;
    std::optional<double> reward;
    std::map<std::string, double> parts;  // of the reward, by name
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
  std::vector<Interaction> interactions_ GUARDED_BY(mutex_);  // by turn number
  ConversationRow::Differences differences_ GUARDED_BY(mutex_);
  double temperature_ GUARDED_BY(mutex_) = 1;
};

}  // namespace bough
