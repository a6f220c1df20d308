// Splits a model's output into reasoning, content and tool calls, in the format the model was trained on.
//
// One parser class serves whole texts and streams. feed() gets the next piece of text and returns what the
// piece adds to the parts (a delta). The concatenated deltas equal the parse of the whole text, wherever the
// text is split. Text is returned as soon as it cannot be part of a marker. A call is returned when it is
// complete.
//
// Only markers, and white space after a call, are dropped. A call that cannot be parsed is returned with its
// text and the reason, so that the caller can count it and send the reason to the model. In formats without a
// marker (llama3_json, pythonic), text that only resembles a call is content.
//
// Formats have the names of vLLM (--tool-call-parser, --reasoning-parser) and SGLang.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat_template_value.h"

namespace bough {

struct ToolCall {
  std::string name;
  std::string arguments;  // a JSON object, as Python's json.dumps writes it
  std::string id;         // empty unless the model writes one
  std::string text;       // the model's text, markers included
  std::string error;      // why the call could not be parsed; empty if it was parsed

  bool valid() const { return error.empty(); }
  bool operator==(const ToolCall&) const = default;
};

// The parts of a whole output, or what one piece of the text adds to them.
struct OutputParts {
  std::string reasoning;
  std::string content;
  std::vector<ToolCall> calls;

  void append(OutputParts more);
  bool operator==(const OutputParts&) const = default;
};

// The syntax of a format; the table is in output_formats.cpp.
struct ToolFormat;
struct ReasoningFormat;

// The start of the assistant's turn that the prompt already has.
struct OutputBegin {
  bool in_reasoning = false;  // the template opened the reasoning (opens_reasoning)
  std::string forced;         // text after the template's output that begins the turn (forced_call)
};

class OutputParser {
 public:
  // reasoning_parser, tool_call_parser: names of formats. If a name is empty, reasoning or calls stay in the
  // content. `tools`: null, or an array in OpenAI's format. Formats that write arguments as plain text need
  // it for the types of the arguments. begin.forced is parsed as if the output began with it. Throws
  // UserError if a name is unknown; the message lists the known names.
  OutputParser(const std::string& reasoning_parser, const std::string& tool_call_parser,
               OrderedJson tools = {}, OutputBegin begin = {});

  OutputParts feed(std::string_view text);
  // Ends the text and returns all text that was held back. The parser must not be used afterwards.
  OutputParts finish();

  // The output ends with its first valid call; all later text is dropped.
  void end_after_call() { ends_after_call_ = true; }
  bool is_over() const { return state_ == State::kOver; }

  // The part to which the last text belongs. kUndecided: later text decides.
  enum class Part { kUndecided, kReasoning, kOther };
  Part part() const;

  static OutputParts parse(OutputParser parser, std::string_view text);

 private:
  enum class State {
    kStart,
    kReasoning,
    kContentStart,
    kContent,
    kCall,
    kAfterCall,
    kHeader,
    kMessage,
    kOver
  };

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
  bool keep_first_call(OutputParts& out);
  void enter_content();

  const ReasoningFormat* reasoning_ = nullptr;
  const ToolFormat* format_ = nullptr;
  OrderedJson tools_;
  State state_ = State::kStart;
  bool in_reasoning_;
  bool ends_after_call_ = false;
  std::string buffer_;  // text without a decision; in a call, its text from the marker on

  // State of the search for the end of a call. scanned_: number of bytes of buffer_ that were searched.
  size_t scanned_ = 0;
  std::string open_;  // open brackets
  char quote_ = 0;
  bool escaped_ = false;
  size_t marker_ = 0;  // length of the marker with which the call began

  std::string channel_, recipient_;  // of the current message in gpt-oss's format (harmony)
};

// True if a prompt ends inside reasoning, because the template of a thinking model has begun the reasoning.
bool opens_reasoning(const std::string& reasoning_parser, std::string_view prompt);

// Returns the text that forces an output to be a tool call: the begin marker of the format. If in_reasoning,
// the end marker of reasoning comes first. The model writes the rest of the call, without constraints. Throws
// UserError if the format is unknown, or has no marker with which every call begins (gpt-oss).
std::string forced_call(const std::string& reasoning_parser, const std::string& tool_call_parser,
                        bool in_reasoning);

// Writes calls of a message in OpenAI's form, with arguments as objects, as the model writes them. Nullopt if
// the format does not write a call as one JSON object.
std::optional<std::string> written_calls(const std::string& tool_call_parser, const OrderedJson& calls);

// In settings: the format is the one whose markers the chat template has.
inline constexpr const char* kAutoParser = "auto";
// Returns the format of tool calls whose markers occur in the source of a chat template; empty if none do.
std::string tool_call_parser_of(std::string_view chat_template);

std::vector<std::string> tool_call_parser_names();
std::vector<std::string> reasoning_parser_names();

struct ReasoningFormat {
  const char* name;
  std::string_view begin, end;
  bool starts_inside = false;  // the output begins inside reasoning, without the begin marker
};

struct ToolFormat {
  enum class End {
    kMarker,       // the first `end` that is not inside a JSON string
    kPlainMarker,  // the first `end`
    kBracket,      // the bracket that closes the call's first bracket, in JSON or Python
  };
  const char* name;
  std::vector<std::string_view> begins;
  std::string_view end;
  End ending;
  // Parses the text between the markers. Throws jinja::Error with the reason if it contains no valid call.
  std::vector<ToolCall> (*read)(std::string_view body, const OrderedJson& tools);
  std::vector<std::string_view> dropped = {};  // markers around several calls
  std::string_view bare = {};                  // characters with which a call without a marker may begin
  std::string_view separators = {};            // between calls
  bool is_harmony = false;
};

const ToolFormat* find_tool_format(std::string_view name);
const ReasoningFormat* find_reasoning_format(std::string_view name);
ToolCall harmony_call(const std::string& recipient, std::string_view body);

}  // namespace bough
