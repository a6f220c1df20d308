#include "text/output_parser.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"

namespace bough {
namespace {

using Markers = std::vector<std::string_view>;

bool is_blank(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

size_t skip_blanks(std::string_view text, size_t from = 0) {
  while (from < text.size() && is_blank(text[from])) ++from;
  return from;
}

// kPerhaps: `text` is too short to decide. More text may make it begin with `marker`.
enum class Begins { kNo, kPerhaps, kYes };
Begins begins_with(std::string_view text, std::string_view marker) {
  if (text.starts_with(marker)) return Begins::kYes;
  return marker.starts_with(text) ? Begins::kPerhaps : Begins::kNo;
}

struct Found {
  size_t position = std::string_view::npos;
  std::string_view marker;
};
Found find_first(std::string_view text, const Markers& markers) {
  Found found;
  for (const std::string_view marker : markers) {
    const size_t position = text.find(marker);
    if (position < found.position) found = {position, marker};
  }
  return found;
}

// Returns how many bytes at the start of `text` cannot be part of a marker that later text completes.
size_t decided(std::string_view text, const Markers& markers) {
  size_t held = 0;
  for (const std::string_view marker : markers)
    for (size_t length = std::min(marker.size() - 1, text.size()); length > held; --length)
      if (text.ends_with(marker.substr(0, length))) held = length;
  return text.size() - held;
}

const Markers& harmony_ends() {
  static const Markers markers = {"<|end|>", "<|return|>", "<|call|>", "<|start|>"};
  return markers;
}

}  // namespace

void OutputParts::append(OutputParts more) {
  reasoning += more.reasoning;
  content += more.content;
  calls.insert(calls.end(), std::make_move_iterator(more.calls.begin()),
               std::make_move_iterator(more.calls.end()));
}

OutputParser::OutputParser(const std::string& reasoning_parser, const std::string& tool_call_parser,
                           OrderedJson tools, OutputBegin begin)
    : tools_(std::move(tools)), in_reasoning_(begin.in_reasoning), buffer_(std::move(begin.forced)) {
  const auto unknown = [](const char* setting, const std::string& name,
                          const std::vector<std::string>& names) {
    std::string all;
    for (const std::string& each : names) all += (all.empty() ? "" : ", ") + each;
    return UserError(str(setting, ": unknown parser ", quoted(name), "; the parsers are ", all));
  };
  if (!reasoning_parser.empty() && !(reasoning_ = find_reasoning_format(reasoning_parser)))
    throw unknown("reasoning_parser", reasoning_parser, reasoning_parser_names());
  if (!tool_call_parser.empty() && !(format_ = find_tool_format(tool_call_parser)))
    throw unknown("tool_call_parser", tool_call_parser, tool_call_parser_names());
  // gpt-oss writes reasoning, content and calls in one format (harmony). Its name as the reasoning format or
  // as the tool format turns it on.
  const bool harmony = (reasoning_ && reasoning_->begin.empty()) || (format_ && format_->is_harmony);
  if (harmony) state_ = State::kHeader;
}

OutputParts OutputParser::parse(OutputParser parser, std::string_view text) {
  OutputParts parts = parser.feed(text);
  parts.append(parser.finish());
  return parts;
}

OutputParts OutputParser::feed(std::string_view text) {
  OutputParts out;
  buffer_ += text;
  while (step(false, out)) {
  }
  return out;
}

OutputParser::Part OutputParser::part() const {
  if (state_ == State::kStart || state_ == State::kHeader) return Part::kUndecided;
  const bool is_message = state_ == State::kMessage && recipient_.empty() && channel_ == "analysis";
  return state_ == State::kReasoning || is_message ? Part::kReasoning : Part::kOther;
}

OutputParts OutputParser::finish() {
  OutputParts out;
  while (step(true, out)) {
  }
  return out;
}

// Decides what the next part of the buffer is. Returns false if this needs more text. `final`: no more text
// will come. If `final` is false, only decisions that hold for any later text are made, so that every split
// of the text gives the same result.
bool OutputParser::step(bool final, OutputParts& out) {
  switch (state_) {
    case State::kStart: return start(final);
    case State::kReasoning: return reasoning(final, out);
    case State::kContentStart: return content_start(final);
    case State::kContent: return content(final, out);
    case State::kCall: return call(final, out);
    case State::kAfterCall: return after_call(final, out);
    case State::kHeader: return header(final, out);
    case State::kMessage: return message(final, out);
    case State::kOver: return buffer_.clear(), false;
  }
  return false;
}

void OutputParser::enter_content() {
  state_ = format_ && !format_->bare.empty() ? State::kContentStart : State::kContent;
}

// Reasoning begins with its marker, unless the prompt has already begun the reasoning.
bool OutputParser::start(bool final) {
  if (!reasoning_) return enter_content(), true;
  const bool inside = in_reasoning_ || reasoning_->starts_inside;
  const size_t blanks = skip_blanks(buffer_);
  const Begins begins = begins_with(std::string_view(buffer_).substr(blanks), reasoning_->begin);
  if (begins == Begins::kPerhaps && !final) return false;
  if (begins == Begins::kYes) buffer_.erase(0, blanks + reasoning_->begin.size());
  if (inside || begins == Begins::kYes) state_ = State::kReasoning;
  else enter_content();
  return true;
}

bool OutputParser::reasoning(bool final, OutputParts& out) {
  const Markers end = {reasoning_->end};
  const size_t position = buffer_.find(reasoning_->end);
  const size_t length = position != std::string::npos ? position
                        : final                       ? buffer_.size()
                                                      : decided(buffer_, end);
  out.reasoning.append(buffer_, 0, length);
  buffer_.erase(0, length);
  if (position == std::string::npos) return false;
  buffer_.erase(0, reasoning_->end.size());
  enter_content();
  return true;
}

// Handles the start of content in formats in which a call may begin without a marker.
bool OutputParser::content_start(bool final) {
  const size_t blanks = skip_blanks(buffer_);
  if (blanks == buffer_.size() && !final) return false;
  state_ = State::kContent;
  if (blanks < buffer_.size() && format_->bare.find(buffer_[blanks]) != std::string_view::npos) {
    state_ = State::kCall;
    marker_ = 0;
    scanned_ = 0;
  }
  return true;
}

bool OutputParser::content(bool final, OutputParts& out) {
  Markers markers;
  if (format_) {
    markers = format_->begins;
    markers.insert(markers.end(), format_->dropped.begin(), format_->dropped.end());
  }
  const Found found = find_first(buffer_, markers);
  const bool none = found.position == std::string_view::npos;
  const size_t length = !none ? found.position : final ? buffer_.size() : decided(buffer_, markers);
  out.content.append(buffer_, 0, length);
  buffer_.erase(0, length);
  if (none) return false;
  const auto& begins = format_->begins;
  if (std::find(begins.begin(), begins.end(), found.marker) == begins.end()) {
    buffer_.erase(0, found.marker.size());
    state_ = State::kAfterCall;
    return true;
  }
  state_ = State::kCall;
  marker_ = scanned_ = found.marker.size() - found.marker.ends_with("s[");  // "[" is part of the call
  return true;
}

// Looks for the end of the call that begins at the start of the buffer.
bool OutputParser::call(bool final, OutputParts& out) {
  using End = ToolFormat::End;
  const std::string_view view = buffer_;
  const bool bracket = format_->ending == End::kBracket;
  for (; scanned_ < view.size(); ++scanned_) {
    const char c = view[scanned_];
    if (quote_ != 0) {
      if (escaped_) escaped_ = false;
      else if (c == '\\') escaped_ = true;
      else if (c == quote_) quote_ = 0;
      continue;
    }
    if (!bracket) {
      const Begins ends = begins_with(view.substr(scanned_), format_->end);
      if (ends == Begins::kPerhaps && !final) return false;
      if (ends == Begins::kYes) return close_call(scanned_ + format_->end.size(), out), true;
    }
    if (format_->ending == End::kPlainMarker) continue;
    if (c == '"' || (bracket && c == '\'' && format_->bare == "[")) {
      if (!bracket || !open_.empty()) quote_ = c;
    } else if (bracket && (c == '{' || c == '[' || c == '(')) {
      // Mistral's [ARGS] and [CALL_ID] open no bracket.
      if (open_.empty() && (view.substr(scanned_, 6) == "[ARGS]" || view.substr(scanned_, 9) == "[CALL_ID]"))
        continue;
      if (open_.empty() && !final && c == '[' && view.size() - scanned_ < 9 &&
          (begins_with(view.substr(scanned_), "[ARGS]") == Begins::kPerhaps ||
           begins_with(view.substr(scanned_), "[CALL_ID]") == Begins::kPerhaps))
        return false;
      open_ += c;
    } else if (bracket && !open_.empty() && (c == '}' || c == ']' || c == ')')) {
      open_.pop_back();
      if (open_.empty()) return close_call(scanned_ + 1, out), true;
    }
  }
  if (!final) return false;
  // If a JSON string in the call is not closed, its end marker counts as a part of the string. Then the call
  // ends at the first end marker, and the text after it is parsed again.
  const size_t end = bracket ? std::string::npos : buffer_.find(format_->end, marker_);
  close_call(end == std::string::npos ? buffer_.size() : end + format_->end.size(), out);
  return true;
}

void OutputParser::close_call(size_t end, OutputParts& out) {
  const std::string text = buffer_.substr(0, end);
  std::string_view body = std::string_view(text).substr(marker_);
  if (!format_->end.empty() && body.ends_with(format_->end)) body.remove_suffix(format_->end.size());
  buffer_.erase(0, end);
  scanned_ = 0;
  open_.clear();
  quote_ = 0;
  escaped_ = false;
  state_ = State::kAfterCall;
  try {
    std::vector<ToolCall> calls = format_->read(body, tools_);
    for (ToolCall& call : calls) {
      call.text = text;
      out.calls.push_back(std::move(call));
    }
    keep_first_call(out);
  } catch (const jinja::Error& error) {
    if (marker_ > 0) {
      out.calls.push_back({"", "", "", text, error.what});
    } else {
      out.content += text;
      state_ = State::kContent;
    }
  }
}

// Returns whether the output is over.
bool OutputParser::keep_first_call(OutputParts& out) {
  if (!ends_after_call_ || out.calls.empty() || !out.calls.back().valid()) return false;
  const auto first =
      std::find_if(out.calls.begin(), out.calls.end(), [](const ToolCall& c) { return c.valid(); });
  out.calls.erase(first + 1, out.calls.end());
  state_ = State::kOver;
  return true;
}

// Drops white space, separators and a repeated end marker after a call.
bool OutputParser::after_call(bool final, OutputParts& out) {
  size_t length = 0;
  while (length < buffer_.size() &&
         (is_blank(buffer_[length]) || format_->separators.find(buffer_[length]) != std::string_view::npos))
    ++length;
  buffer_.erase(0, length);
  if (buffer_.empty()) return false;
  if (format_->bare.find(buffer_[0]) != std::string_view::npos && !format_->separators.empty()) {
    state_ = State::kCall;
    marker_ = scanned_ = 0;
    return true;
  }
  state_ = State::kContent;
  return true;
}

// Reads gpt-oss: <|start|>role<|channel|>name to=recipient <|constrain|>json<|message|>text<|end|>.
bool OutputParser::header(bool final, OutputParts& out) {
  const size_t end = buffer_.find("<|message|>");
  if (end == std::string::npos) {
    if (final && !buffer_.empty()) {
      // Text without a header is content. A header without a message after it is dropped.
      if (buffer_.find("<|channel|>") == std::string::npos && !buffer_.starts_with("<|start|>"))
        out.content += buffer_;
      buffer_.clear();
    }
    return false;
  }
  const std::string_view head = std::string_view(buffer_).substr(0, end);
  const auto word_after = [&](std::string_view marker) {
    const size_t at = head.find(marker);
    if (at == std::string_view::npos) return std::string();
    const size_t begin = skip_blanks(head, at + marker.size());
    return std::string(head.substr(begin, head.find_first_of(" \n\t<", begin) - begin));
  };
  channel_ = word_after("<|channel|>");
  recipient_ = word_after("to=");
  marker_ = end + 11;
  state_ = State::kMessage;
  if (recipient_.empty()) {
    buffer_.erase(0, marker_);
    marker_ = 0;
  }
  return true;
}

bool OutputParser::message(bool final, OutputParts& out) {
  const Found found = find_first(std::string_view(buffer_).substr(marker_), harmony_ends());
  const bool none = found.position == std::string_view::npos;
  if (none && !recipient_.empty() && !final) return false;
  const size_t end =
      none ? (final ? buffer_.size() : decided(buffer_, harmony_ends())) : marker_ + found.position;
  if (!recipient_.empty()) {
    ToolCall read = harmony_call(recipient_, std::string_view(buffer_).substr(marker_, end - marker_));
    read.text = buffer_.substr(0, end);
    out.calls.push_back(std::move(read));
    if (keep_first_call(out)) return true;
  } else {
    (channel_ == "analysis" ? out.reasoning : out.content).append(buffer_, 0, end);
  }
  buffer_.erase(0, end);
  marker_ = 0;
  if (none) {
    if (final) state_ = State::kHeader;
    return false;
  }
  if (found.marker != "<|start|>") buffer_.erase(0, found.marker.size());
  state_ = State::kHeader;
  return true;
}

bool opens_reasoning(const std::string& reasoning_parser, std::string_view prompt) {
  const ReasoningFormat* format = find_reasoning_format(reasoning_parser);
  if (!format || format->begin.empty()) return false;
  while (!prompt.empty() && is_blank(prompt.back())) prompt.remove_suffix(1);
  return prompt.ends_with(format->begin);
}

std::string forced_call(const std::string& reasoning_parser, const std::string& tool_call_parser,
                        bool in_reasoning) {
  const ToolFormat* format = find_tool_format(tool_call_parser);
  if (!format || format->is_harmony)
    throw UserError(str("a tool call cannot be forced with the parser ", quoted(tool_call_parser),
                        ": its format has no marker at the start of a call"));
  std::string text;
  const ReasoningFormat* reasoning = find_reasoning_format(reasoning_parser);
  if (reasoning && (in_reasoning || reasoning->starts_inside)) text = str(reasoning->end, "\n\n");
  if (!format->bare.empty()) return text + format->bare.front();
  if (format->dropped.size() == 2) text += format->dropped.front();  // the marker around all calls
  return text + std::string(format->begins.front());
}

}  // namespace bough
