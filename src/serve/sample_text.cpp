#include "serve/sample_text.h"

#include <algorithm>
#include <string_view>

namespace bough {

SampleText::SampleText(const Tokenizer& tokenizer, OutputParser parser, const SamplingParameters* sampling,
                       bool skip_special_tokens)
    : decoder_(tokenizer, skip_special_tokens), parser_(std::move(parser)), sampling_(sampling) {}

OutputParts SampleText::push(int32_t token) {
  ++num_tokens_;
  ++num_undecided_;
  const OutputParser::Part before = parser_.part();
  OutputParts parts = take(decoder_.push(token), false);
  count_reasoning(before, parts);
  return parts;
}

OutputParts SampleText::finish(std::optional<int32_t> last_token, FinishReason reason) {
  std::string text;
  end_.reason = reason;
  if (last_token && reason == FinishReason::kStop) end_.stop_token = last_token;
  else if (last_token) text = decoder_.push(*last_token);
  ++num_tokens_;
  text += decoder_.finish();
  if (last_token) ++num_undecided_;
  const OutputParser::Part before = parser_.part();
  OutputParts parts = take(text, true);
  count_reasoning(before, parts);
  if (end_.stop) end_.reason = FinishReason::kStopString;
  else if (is_over()) end_.reason = FinishReason::kStop;
  return parts;
}

// A token that ends the reasoning, and tokens that turned out to begin it, count.
void SampleText::count_reasoning(OutputParser::Part before, const OutputParts& parts) {
  using Part = OutputParser::Part;
  if (before == Part::kReasoning || parser_.part() == Part::kReasoning || !parts.reasoning.empty())
    end_.reasoning_tokens += num_undecided_;
  else if (parser_.part() == Part::kUndecided) return;
  num_undecided_ = 0;
}

// Looks for stop strings as the engine does: a match counts only if its last token comes at or after
// min_new_tokens.
OutputParts SampleText::take(const std::string& text, bool is_last) {
  if (has_stopped_) return is_last ? readable(parser_.finish()) : OutputParts{};
  const std::vector<std::string>& stops = sampling_->stop;
  if (stops.empty()) {
    OutputParts parts = parser_.feed(text);
    if (is_last) parts.append(parser_.finish());
    return readable(std::move(parts));
  }
  const size_t old_size = held_.size();
  held_ += text;
  size_t cut = std::string::npos;
  if (num_tokens_ >= sampling_->min_new_tokens) {
    for (const std::string& stop : stops) {
      const size_t from = old_size + 1 > stop.size() ? old_size + 1 - stop.size() : 0;
      const size_t found = held_.find(stop, from);
      if (found >= cut) continue;
      cut = found;
      end_.stop = stop;
    }
  }
  has_stopped_ = cut != std::string::npos;
  size_t length = has_stopped_ ? cut : held_.size();
  if (!has_stopped_ && !is_last) {
    size_t kept = 0;
    for (const std::string& stop : stops)
      for (size_t n = std::min(stop.size() - 1, held_.size()); n > kept; --n)
        if (std::string_view(held_).ends_with(std::string_view(stop).substr(0, n))) kept = n;
    length -= kept;
  }
  OutputParts parts = parser_.feed(std::string_view(held_).substr(0, length));
  held_.erase(0, length);
  if (is_last) parts.append(parser_.finish());
  return readable(std::move(parts));
}

OutputParts SampleText::readable(OutputParts parts) {
  std::vector<ToolCall> calls;
  for (ToolCall& call : parts.calls) {
    if (call.valid()) {
      calls.push_back(std::move(call));
      continue;
    }
    ++malformed_calls_;
    parts.content += call.text;
  }
  parts.calls = std::move(calls);
  return parts;
}

bool has_special_markers(const Tokenizer& tokenizer, const std::string& reasoning_parser,
                         const std::string& tool_call_parser) {
  std::string all;
  if (const ReasoningFormat* format = find_reasoning_format(reasoning_parser)) {
    if (format->begin.empty()) return true;  // gpt-oss: its markers are special tokens
    all.append(format->begin).append(format->end);
  }
  if (const ToolFormat* format = find_tool_format(tool_call_parser)) {
    if (format->is_harmony) return true;
    for (const std::string_view marker : format->begins) all += marker;
    for (const std::string_view marker : format->dropped) all += marker;
    all += format->end;
  }
  const std::vector<int32_t> ids = tokenizer.encode_continuation(all);
  return std::any_of(ids.begin(), ids.end(), [&](int32_t id) { return tokenizer.is_special(id); });
}

}  // namespace bough
