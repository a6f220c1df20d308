// A row of a conversation: tokens as they were given and sampled, never a text that was tokenised again.
//
// It is made of segments, each with the text that the chat template shows for it: what the model is shown,
// mask 0, and its turns, mask 1. A longer text that begins with the texts of the first k segments goes on
// from their exact tokens; only the rest of it is encoded. A turn counts as shown where the template writes
// the same reasoning, content and calls, whatever the white space or the order of a call's keys; once it has
// been shown it is settled: its text is the one that was written. Of a turn that ended with a stop string or
// a limit nobody knows where its text ends in another one: nothing goes on from it.
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

// Between conversations, texts and the model's tokens (prompt_encoder.h).
class ChatCodec {
 public:
  virtual ~ChatCodec() = default;
  // By the model's chat template. UserError: it has none, or refuses the conversation.
  virtual std::string render(const Conversation& conversation) const = 0;
  // `continues`: behind other text, which was encoded before.
  virtual std::vector<int32_t> encode_chat(std::string_view text, bool continues) const = 0;
  virtual std::string text_of(std::span<const int32_t> ids) const = 0;  // special tokens are shown
};

struct ConversationRow {
  struct Segment {
    std::string text;             // as the template shows it; of a turn, once it has been shown
    size_t begin = 0, end = 0;    // tokens of the row
    std::optional<int64_t> turn;  // of the model; none: what is shown to it
    bool is_settled = true;       // its text is known
    OutputBegin begun;            // by the prompt, of a turn
    std::string stop;             // text of the token that ended the turn
    std::string sampled;          // text of the turn, without that
    OutputParts parts;
  };
  std::vector<int32_t> ids, versions, turns;
  std::vector<uint8_t> loss_mask;
  std::vector<float> logprobs;
  std::vector<double> raw_logprobs, truncated_logprobs;  // of tokens of mask 1
  PageChoices page_choices;
  std::vector<Segment> segments;

  void append_text(const ChatCodec& codec, std::string_view text);
  void append_ids(const ChatCodec& codec,
                  std::span<const int32_t> added);  // their text is what they decode to
  // What `longer`, which begins with this row, has beyond it, mask 0.
  void append_rest(const ConversationRow& longer);
  // `stop`: the strings that end a turn. Its segment's parts are for the caller to fill in.
  Segment& append_turn(const ChatCodec& codec, const GeneratedSample& sample, int64_t turn, OutputBegin begun,
                       const std::vector<std::string>& stop);
  // Drops the last segment where nothing was sampled after it: it teaches nothing.
  void drop_unanswered();
  // The first segments, of which nothing is trained: another row has trained them.
  ConversationRow prefix(size_t num_segments) const;
  bool trains() const;

  // What of the row `text` begins with.
  struct Shown {
    size_t segments = 0, end = 0;    // how many, and where the text of the last one ends
    std::vector<std::string> texts;  // of those that are not settled yet, in order
  };
  // Takes a turn's text apart; `begun` as in the segment.
  using Parse = std::function<OutputParts(std::string_view text, const OutputBegin& begun)>;
  Shown shown_by(std::string_view text, const Parse& parse) const;

  // What settle() finds: turns that are written with other characters than they were sampled with, and those
  // whose text would have been other tokens, with the position of the first.
  struct Differences {
    struct Place {
      int64_t turn = 0, row = 0, position = 0;
    };
    int64_t shown_otherwise = 0;
    std::vector<Place> retokenized;
  };
  // Of what shown_by() returned; `row`: the number of this one.
  void settle(const Shown& shown, const ChatCodec& codec, int64_t row, Differences& found);

  // Tokens, masks, labels, texts and the first turn; the rest is the caller's.
  Trajectory trajectory(const ChatCodec& codec, bool all_logprobs) const;
  void check_integrity() const;

 private:
  void append(Segment segment, std::span<const int32_t> added);
};

}  // namespace bough
