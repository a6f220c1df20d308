#include "control/conversation_row.h"

#include <algorithm>
#include <utility>

#include "base/ascii.h"
#include "base/error.h"

namespace bough {

namespace {

// Whether the parts of two texts of a turn are equal, except for white space around them and JSON formatting.
bool same_parts(const OutputParts& a, const OutputParts& b) {
  const auto same_call = [](const ToolCall& left, const ToolCall& right) {
    if (left.valid() != right.valid()) return false;
    if (!left.valid()) return trimmed(left.text) == trimmed(right.text);
    return left.name == right.name && Json::parse(left.arguments) == Json::parse(right.arguments);
  };
  return trimmed(a.reasoning) == trimmed(b.reasoning) && trimmed(a.content) == trimmed(b.content) &&
         std::equal(a.calls.begin(), a.calls.end(), b.calls.begin(), b.calls.end(), same_call);
}

}  // namespace

void ConversationRow::append(Segment segment, std::span<const int32_t> added) {
  segment.begin = ids.size();
  ids.insert(ids.end(), added.begin(), added.end());
  segment.end = ids.size();
  loss_mask.resize(segment.end, 0);
  sampled.resize(segment.end, 0);
  logprobs.resize(segment.end, 0.0f);
  versions.resize(segment.end, -1);
  turns.resize(segment.end, -1);
  segments.push_back(std::move(segment));
}

void ConversationRow::append_text(const ChatCodec& codec, std::string_view text) {
  append({.text = std::string(text)}, codec.encode_chat(text, /*continues=*/!ids.empty()));
}

void ConversationRow::append_ids(const ChatCodec& codec, std::span<const int32_t> added) {
  if (!added.empty()) append({.text = codec.text_of(added)}, added);
}

void ConversationRow::append_rest(const ConversationRow& longer) {
  for (size_t i = segments.size(); i < longer.segments.size(); ++i) {
    const Segment& next = longer.segments[i];
    append(next, std::span(longer.ids).subspan(next.begin, next.end - next.begin));
  }
}

ConversationRow::Segment& ConversationRow::append_turn(const ChatCodec& codec, const GeneratedSample& sample,
                                                       int64_t turn, OutputBegin begun,
                                                       const std::vector<std::string>& stop) {
  Segment segment{.begin = ids.size(), .turn = turn, .is_settled = false, .begun = std::move(begun)};
  ids.insert(ids.end(), sample.token_ids.begin(), sample.token_ids.end());
  segment.end = ids.size();
  loss_mask.resize(segment.end, 1);
  sampled.resize(segment.end, 1);
  for (const double log_prob : sample.logprobs) logprobs.push_back(static_cast<float>(log_prob));
  versions.insert(versions.end(), sample.versions.begin(), sample.versions.end());
  turns.resize(segment.end, static_cast<int32_t>(turn));
  if (!sample.top_ids.empty()) {
    top_ids.resize(segment.begin);
    top_ids.insert(top_ids.end(), sample.top_ids.begin(), sample.top_ids.end());
    top_logprobs.resize(segment.begin);
    top_logprobs.insert(top_logprobs.end(), sample.top_logprobs.begin(), sample.top_logprobs.end());
  }
  // The last turn's records include those of all earlier turns.
  page_choices = sample.page_choices;
  routed_experts = sample.routed_experts;
  raw_logprobs.insert(raw_logprobs.end(), sample.raw_logprobs.begin(), sample.raw_logprobs.end());
  sampling_logprobs.insert(sampling_logprobs.end(), sample.sampling_logprobs.begin(),
                           sample.sampling_logprobs.end());
  std::span<const int32_t> sampled_ids(sample.token_ids);
  if (sample.finish_reason == FinishReason::kStop) {
    segment.stop = codec.text_of(sampled_ids.last(1));
    sampled_ids = sampled_ids.first(sampled_ids.size() - 1);
  }
  segment.sampled = codec.text_of(sampled_ids);
  if (sample.finish_reason == FinishReason::kStopString) {
    size_t end = segment.sampled.size();
    for (const std::string& each : stop) end = std::min(end, segment.sampled.find(each));
    segment.sampled.resize(end);
  }
  return segments.emplace_back(std::move(segment));
}

void ConversationRow::drop_unanswered() {
  if (segments.size() < 2 || segments.back().turn) return;
  const size_t length = segments.back().begin;
  segments.pop_back();
  ids.resize(length);
  loss_mask.resize(length);
  sampled.resize(length);
  logprobs.resize(length);
  versions.resize(length);
  turns.resize(length);
  routed_experts.truncate(static_cast<int64_t>(length));
}

ConversationRow ConversationRow::prefix(size_t num_segments) const {
  ConversationRow row;
  if (num_segments == 0) return row;
  const size_t length = segments[num_segments - 1].end;
  row.ids.assign(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(length));
  row.loss_mask.assign(length, 0);
  row.sampled.assign(sampled.begin(), sampled.begin() + static_cast<std::ptrdiff_t>(length));
  row.logprobs.assign(length, 0.0f);
  row.versions.assign(length, -1);
  row.turns.assign(length, -1);
  row.routed_experts = routed_experts;
  row.routed_experts.truncate(static_cast<int64_t>(length));
  row.segments.assign(segments.begin(), segments.begin() + static_cast<std::ptrdiff_t>(num_segments));
  return row;
}

bool ConversationRow::trains() const {
  return std::find(loss_mask.begin(), loss_mask.end(), 1) != loss_mask.end();
}

ConversationRow::Shown ConversationRow::shown_by(std::string_view text, const Parse& parse) const {
  Shown shown;
  for (const Segment& segment : segments) {
    const std::string_view rest = text.substr(shown.end);
    if (segment.is_settled) {
      if (!rest.starts_with(segment.text)) break;
      shown.end += segment.text.size();
    } else {
      if (segment.stop.empty()) break;
      const size_t stop = rest.find(segment.stop);
      if (stop == std::string_view::npos) break;
      const std::string_view turn = rest.substr(0, stop);
      if (turn != segment.sampled && !same_parts(segment.parts, parse(turn, segment.begun))) break;
      shown.texts.push_back(str(turn, segment.stop));
      shown.end += stop + segment.stop.size();
    }
    ++shown.segments;
  }
  return shown;
}

void ConversationRow::settle(const Shown& shown, const ChatCodec& codec, int64_t row, Differences& found) {
  auto text = shown.texts.begin();
  for (size_t i = 0; i < shown.segments; ++i) {
    Segment& segment = segments[i];
    if (segment.is_settled) continue;
    segment.text = *text++;
    segment.is_settled = true;
    found.shown_otherwise += segment.text != segment.sampled + segment.stop;
    const std::vector<int32_t> again = codec.encode_chat(segment.text, /*continues=*/true);
    const std::span<const int32_t> sampled_ids(ids.data() + segment.begin, segment.end - segment.begin);
    const auto [different, other] =
        std::mismatch(sampled_ids.begin(), sampled_ids.end(), again.begin(), again.end());
    if (different == sampled_ids.end() && other == again.end()) continue;
    found.retokenized.push_back(
        {*segment.turn, row, static_cast<int64_t>(segment.begin) + (different - sampled_ids.begin())});
  }
}

Trajectory ConversationRow::trajectory(const ChatCodec& codec, bool all_logprobs) const {
  Trajectory out;
  out.input_ids = ids;
  out.loss_mask = loss_mask;
  out.logprobs = logprobs;
  out.versions = versions;
  out.turns = turns;
  out.page_choices = page_choices;
  out.routed_experts = routed_experts;
  if (!top_ids.empty()) {
    out.top_ids = top_ids;
    out.top_ids.resize(ids.size());
    out.top_logprobs = top_logprobs;
    out.top_logprobs.resize(ids.size());
  }
  if (sampled != loss_mask) out.columns[kSampledColumn].assign(sampled.begin(), sampled.end());
  for (const Segment& segment : segments)
    if (segment.turn && loss_mask[segment.begin] && !out.turn) out.turn = *segment.turn;
  if (all_logprobs) {
    out.columns["raw_logprobs"] = raw_logprobs;
    out.columns["truncated_logprobs"] = sampling_logprobs;
  }
  out.prompt = segments.empty() ? "" : segments.front().text;
  out.completion = segments.empty() ? "" : codec.text_of(std::span(ids).subspan(segments.front().end));
  return out;
}

void ConversationRow::check_integrity() const {
  const size_t length = ids.size();
  BOUGH_CHECK(loss_mask.size() == length && sampled.size() == length && logprobs.size() == length &&
                  versions.size() == length && turns.size() == length,
              "a row of ", length, " tokens has lists of another length");
  size_t at = 0;
  for (const Segment& segment : segments) {
    BOUGH_CHECK(segment.begin == at && segment.end >= at, "a segment begins at ", segment.begin,
                ", expected ", at);
    at = segment.end;
  }
  BOUGH_CHECK(at == length, "segments cover ", at, " of ", length, " tokens");
}

}  // namespace bough
