// One row of the batch of a conversation: token ids as given and sampled, never text that was tokenised
// again.
//
// A row consists of segments, each with the text that the chat template shows for it: input of the model
// (mask 0), and the model's turns (mask 1). A longer text that begins with the texts of the first k segments
// continues from their exact tokens. Only the rest of the longer text is encoded.
//
// A turn counts as shown if the template writes the same reasoning, content and calls. White space and the
// order of a call's keys do not matter. After the template has shown a turn once, the turn is settled: its
// text is the one that the template wrote. If a turn ended with a stop string or a limit, its end cannot be
// found in a longer text. So a longer text never continues from the tokens of such a turn.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/trajectory.h"
#include "engine/engine.h"
#include "text/chat_template.h"
#include "text/output_parser.h"

namespace bough {

// Converts between conversations, texts and the model's tokens (prompt_encoder.h).
class ChatCodec {
 public:
  virtual ~ChatCodec() = default;
  // Applies the model's chat template. Throws UserError if there is none, or if it refuses the conversation.
  virtual std::string render(const Conversation& conversation) const = 0;
  // The format of tool calls by the template's markers; empty if it is unknown or there is no template.
  virtual std::string tool_call_parser() const = 0;
  // `continues`: the text follows another text, which was encoded before.
  virtual std::vector<int32_t> encode_chat(std::string_view text, bool continues) const = 0;
  virtual std::string text_of(std::span<const int32_t> ids) const = 0;  // special tokens are shown
};

struct ConversationRow {
  struct Segment {
    std::string text;             // as the template shows it; for a turn, once it has been shown
    size_t begin = 0, end = 0;    // token range in the row
    std::optional<int64_t> turn;  // number of the model's turn; nullopt: input
    bool is_settled = true;       // its text is known
    OutputBegin begun;            // for a turn: output that its prompt has begun, such as reasoning
    std::string stop;             // text of the token that ended the turn
    std::string sampled;          // text of the turn, without `stop`
    OutputParts parts;
  };
  std::vector<int32_t> ids, versions, turns;
  std::vector<uint8_t> loss_mask;
  std::vector<uint8_t> sampled;  // 1: the policy sampled the token, also if an earlier row trains it
  std::vector<float> logprobs;
  std::vector<double> raw_logprobs, sampling_logprobs;  // only of tokens with mask 1
  // As in Trajectory, but they may be shorter than the row. Empty if the engine reports no top-k tokens.
  std::vector<std::vector<int32_t>> top_ids;
  std::vector<std::vector<float>> top_logprobs;
  PageChoices page_choices;
  RoutedExperts routed_experts;  // of the tokens up to the last turn's last but one
  std::vector<Segment> segments;

  void append_text(const ChatCodec& codec, std::string_view text);
  void append_ids(const ChatCodec& codec,
                  std::span<const int32_t> added);  // the segment's text is what they decode to
  // Appends, with mask 0, what `longer` has after this row. `longer` must begin with this row.
  void append_rest(const ConversationRow& longer);
  // `stop`: the strings that end a turn. The caller fills in the segment's parts.
  Segment& append_turn(const ChatCodec& codec, const GeneratedSample& sample, int64_t turn, OutputBegin begun,
                       const std::vector<std::string>& stop);
  // Called when the conversation has ended. Drops the last segment if it is input and not the only segment,
  // because no turn follows this input and it trains nothing.
  void drop_unanswered();
  // Returns a new row of this row's first `num_segments` segments. All its masks are 0, because this row
  // trains the tokens.
  ConversationRow prefix(size_t num_segments) const;
  bool trains() const;

  // The part of the row that a text begins with.
  struct Shown {
    size_t segments = 0, end = 0;    // how many; where the last one ends in the text
    std::vector<std::string> texts;  // of these segments, those not settled yet
  };
  // Parses a turn's text; `begun` as in the segment.
  using Parse = std::function<OutputParts(std::string_view text, const OutputBegin& begun)>;
  Shown shown_by(std::string_view text, const Parse& parse) const;

  // Found by settle(): the number of turns that the template writes with other characters than were sampled,
  // and the turns whose written text would be encoded to other tokens than were sampled, each with the
  // position of the first different token in the row.
  struct Differences {
    struct RetokenizedToken {
      int64_t turn = 0, row = 0, position = 0;
    };
    int64_t shown_otherwise = 0;
    std::vector<RetokenizedToken> retokenized;
  };
  // Settles the turns that shown_by() found, and adds their differences to `found`. `row`: this row's index.
  void settle(const Shown& shown, const ChatCodec& codec, int64_t row, Differences& found);

  // Sets tokens, masks, log-probabilities, top-k tokens, versions, texts and the first turn. The caller sets
  // the rest.
  Trajectory trajectory(const ChatCodec& codec, bool all_logprobs) const;
  void check_integrity() const;

 private:
  void append(Segment segment, std::span<const int32_t> added);
};

}  // namespace bough
