// Turns a sample's tokens into the text that a client sees, without stop token and stop string, split into
// reasoning, content and tool calls. Streamed and unstreamed answers are made of the same pieces.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace bough {

// How a sample ended.
struct SampleEnd {
  FinishReason reason = FinishReason::kLength;
  std::optional<std::string> stop;  // the stop string that ended it
  std::optional<int32_t> stop_token;
  int64_t reasoning_tokens = 0;  // sampled tokens of the reasoning and its markers
};

class SampleText {
 public:
  // `sampling` gives stop strings and min_new_tokens, and must outlive this object. skip_special_tokens must
  // be false if the parser's markers are special tokens (has_special_markers).
  SampleText(const Tokenizer& tokenizer, OutputParser parser, const SamplingParameters* sampling,
             bool skip_special_tokens);

  // Returns the output that is certain after this token: never a part of a character, of a marker or of a
  // stop string. Do not push a sample's last token: finish() takes it, and knows whether it is a stop token.
  OutputParts push(int32_t token);
  OutputParts finish(std::optional<int32_t> last_token, FinishReason reason);
  const SampleEnd& end() const { return end_; }
  bool is_over() const { return parser_.is_over(); }  // later tokens add nothing
  // Number of tool calls that could not be parsed. Their text is part of the content.
  int64_t malformed_calls() const { return malformed_calls_; }

 private:
  OutputParts take(const std::string& text, bool is_last);
  void count_reasoning(OutputParser::Part before, const OutputParts& parts);
  OutputParts readable(OutputParts parts);

  StreamDecoder decoder_;
  OutputParser parser_;
  const SamplingParameters* sampling_;
  std::string held_;  // text that may begin a stop string
  int64_t num_tokens_ = 0, malformed_calls_ = 0;
  int64_t num_undecided_ = 0;  // last tokens that may turn out to be reasoning
  bool has_stopped_ = false;
  SampleEnd end_;
};

// Returns whether markers of these parsers contain special tokens. If so, special tokens must be decoded. An
// unknown parser has no markers.
bool has_special_markers(const Tokenizer& tokenizer, const std::string& reasoning_parser,
                         const std::string& tool_call_parser);

}  // namespace bough
