// What a model writes, taken apart: reasoning, content and tool calls, in the format it was trained on.
//
// One parser serves whole texts and streams: pieces of a text give deltas whose concatenation is the parse of
// the whole text, wherever it is split. Text is given out as soon as it cannot belong to a marker any more; a
// call is given out whole, when it is complete.
//
// Nothing is dropped but the markers, and white space behind a call. A call that cannot be read is given out
// as such, with its text and the reason, so that the caller may count it and answer the model with it. Where
// a format has no marker (llama3_json, pythonic), what only looks like a call is content.
//
// Formats go by the names that vLLM (--tool-call-parser, --reasoning-parser) and SGLang know.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/chat_template_value.h"

namespace bough {

struct ToolCall {
  std::string name;
  std::string arguments;  // a JSON object, as Python's json.dumps writes it
  std::string id;         // where the model writes one
  std::string text;       // what the model wrote, markers included
  std::string error;      // why it could not be read; empty: it could

  bool valid() const { return error.empty(); }
  bool operator==(const ToolCall&) const = default;
};

// A whole output, or what a piece of it adds.
struct OutputParts {
  std::string reasoning;
  std::string content;
  std::vector<ToolCall> calls;

  void append(OutputParts more);
  bool operator==(const OutputParts&) const = default;
};

// How a format's calls are told from text; the table is in output_formats.cpp.
struct ToolFormat;
struct ReasoningFormat;

// How far a prompt has begun the output that follows it.
struct OutputBegin {
  bool in_reasoning = false;  // the template opened it (opens_reasoning)
  std::string forced;         // text behind the template's that is the output's beginning (forced_call)
};

class OutputParser {
 public:
  // Names of parsers; empty: none, the text is content. `tools` (null, or an array as OpenAI has it) tells
  // the types of arguments in formats that write them as plain text. What `begin` forces is parsed as if the
  // output had begun with it. UserError: an unknown name, with those that exist.
  OutputParser(const std::string& reasoning_parser, const std::string& tool_call_parser,
               OrderedJson tools = {}, OutputBegin begin = {});

  OutputParts feed(std::string_view text);
  // The text has ended: gives out what was held back. The parser is then done.
  OutputParts finish();

  static OutputParts parse(OutputParser parser, std::string_view text);

 private:
  enum class State { kStart, kReasoning, kContentStart, kContent, kCall, kAfterCall, kHeader, kMessage };

  bool step(bool final, OutputParts& out);
  bool start(bool final);
  bool reasoning(bool final, OutputParts& out);
  bool content_start(bool final);
  bool content(bool final, OutputParts& out);
  bool call(bool final, OutputParts& out);
  bool after_call(bool final, OutputParts& out);
  bool header(bool final, OutputParts& out);
  bool message(bool final, OutputParts& out);
  void close_call(size_t end, OutputParts& out);
  void enter_content();

  const ReasoningFormat* reasoning_ = nullptr;
  const ToolFormat* format_ = nullptr;
  OrderedJson tools_;
  State state_ = State::kStart;
  bool in_reasoning_;
  std::string buffer_;  // what is not decided yet; a call's text from its marker on

  // How far the end of a call has been looked for.
  size_t scanned_ = 0;
  std::string open_;  // brackets
  char quote_ = 0;
  bool escaped_ = false;
  size_t marker_ = 0;  // length of the marker that the call began with

  std::string channel_, recipient_;  // of a message in gpt-oss's format
};

// Whether the text of a prompt ends inside reasoning, as templates of thinking models leave it.
bool opens_reasoning(const std::string& reasoning_parser, std::string_view prompt);

// With what an output must begin to be a tool call: the format's marker, behind the end of reasoning where
// the output would begin with it. What follows is the model's: its arguments are not constrained. UserError:
// in this format the call's name stands in front.
std::string forced_call(const std::string& reasoning_parser, const std::string& tool_call_parser,
                        bool in_reasoning);

std::vector<std::string> tool_call_parser_names();
std::vector<std::string> reasoning_parser_names();

// The formats themselves.
struct ReasoningFormat {
  const char* name;
  std::string_view begin, end;
  bool starts_inside = false;  // the model writes no begin
};

struct ToolFormat {
  enum class End {
    kMarker,       // the first `end` that is not inside a JSON string
    kPlainMarker,  // the first `end`
    kBracket,      // the bracket that closes the first one, in JSON or Python
  };
  const char* name;
  std::vector<std::string_view> begins;
  std::string_view end;
  End ending;
  // The calls in what stands between the markers. Error: why there are none.
  std::vector<ToolCall> (*read)(std::string_view body, const OrderedJson& tools);
  std::vector<std::string_view> dropped = {};  // markers around several calls
  std::string_view bare = {};        // first characters of an output that begins with a call without a marker
  std::string_view separators = {};  // between calls
  bool is_harmony = false;
};

const ToolFormat* find_tool_format(std::string_view name);
const ReasoningFormat* find_reasoning_format(std::string_view name);
ToolCall harmony_call(const std::string& recipient, std::string_view body);

}  // namespace bough
