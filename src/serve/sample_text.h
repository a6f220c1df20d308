// A sample's tokens to what its reader sees: text without stop token and stop string, taken apart into
// reasoning, content and tool calls. Streamed and whole answers come from the same pieces, token by token.
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
};

class SampleText {
 public:
  // `sampling`, for stop strings and min_new_tokens, must outlive this object. skip_special_tokens: false
  // where the parser's markers are special tokens.
  SampleText(const Tokenizer& tokenizer, OutputParser parser, const SamplingParameters* sampling,
             bool skip_special_tokens);

  // What the next token adds for certain: never a part of a character, of a marker or of a stop string. The
  // last token of a sample is given to finish() alone, which knows whether it is a stop token.
  OutputParts push(int32_t token);
  OutputParts finish(std::optional<int32_t> last_token, FinishReason reason);
  const SampleEnd& end() const { return end_; }
  // Calls that could not be read; their text is content.
  int64_t malformed_calls() const { return malformed_calls_; }

 private:
  OutputParts take(const std::string& text, bool is_last);
  OutputParts readable(OutputParts parts);

  StreamDecoder decoder_;
  OutputParser parser_;
  const SamplingParameters* sampling_;
  std::string held_;  // may be the beginning of a stop string
  int64_t num_tokens_ = 0, malformed_calls_ = 0;
  bool has_stopped_ = false;
  SampleEnd end_;
};

// Whether texts that these parsers look for hold special tokens, which must then be decoded. An unknown name
// is none.
bool has_special_markers(const Tokenizer& tokenizer, const std::string& reasoning_parser,
                         const std::string& tool_call_parser);

}  // namespace bough
