// Writes a Trajectory as one line of a rollout file. rollout_parser.cpp is the inverse.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "data/rollout_file.h"

namespace bough {

namespace {

template <class T>
void append_number(std::string& out, T value) {
  char text[32];
  const auto result = std::to_chars(text, text + sizeof text, value);
  out.append(text, result.ptr);
}

// Writes one line. Throws if the parser would refuse the line.
class LineWriter {
 public:
  LineWriter(std::string& out, size_t num_tokens) : out_(out), num_tokens_(num_tokens) {}

  template <class T>
  void number(const char* name, T value) {
    begin(name);
    append(name, value);
  }
  template <class T>
  void list(const std::string& name, const std::vector<T>& values) {
    begin(name);
    append(name, values);
  }
  // A list with one value per token; omitted if empty.
  template <class T>
  void by_token(const char* name, const std::vector<T>& values) {
    if (values.empty()) return;
    BOUGH_CHECK(values.size() == num_tokens_, name, " has ", values.size(), " values for ", num_tokens_,
                " tokens");
    list(name, values);
  }
  void routed_experts(const char* name, const RoutedExperts& routed) {
    const auto rows = static_cast<size_t>(routed.num_rows());
    if (rows == 0) return;
    BOUGH_CHECK(rows == num_tokens_ || rows + 1 == num_tokens_, name, " has ", rows, " rows for ",
                num_tokens_, " tokens");
    begin(name);
    for (size_t i = 0; i < routed.experts.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      const bool starts_layer = at % routed.num_chosen == 0, starts_row = at % routed.row_size() == 0;
      out_ += i == 0 ? "[[[" : starts_row ? "]], [[" : starts_layer ? "], [" : ", ";
      append_number(out_, routed.experts[i]);
    }
    out_ += "]]]";
  }
  void json(const std::string& name, const Json& value) {
    begin(name);
    out_ += dump_line(value);
  }
  bool has(std::string_view name) const {
    return std::find(names_.begin(), names_.end(), name) != names_.end();
  }

 private:
  void begin(const std::string& name) {
    out_ += names_.empty() ? "{" : ", ";
    (out_ += dump_line(Json(name))) += ": ";
    names_.push_back(name);
  }
  template <class T>
  void append(const std::string& name, const std::vector<T>& values) {
    out_ += '[';
    for (size_t i = 0; i < values.size(); ++i) {
      if (i > 0) out_ += ", ";
      append(name, values[i]);
    }
    out_ += ']';
  }
  template <class T>
  void append(const std::string& name, T value) {
    if constexpr (std::is_floating_point_v<T>) BOUGH_CHECK(std::isfinite(value), name, " = ", value);
    append_number(out_, value);
  }

  std::string& out_;
  size_t num_tokens_;
  std::vector<std::string> names_;
};

}  // namespace

void append_rollout_line(std::string& out, const Trajectory& rollout) {
  const size_t length = rollout.input_ids.size();
  BOUGH_CHECK(rollout.loss_mask.size() == length && rollout.logprobs.size() == length, "a rollout of ",
              length, " tokens has loss_mask of ", rollout.loss_mask.size(), ", logprobs of ",
              rollout.logprobs.size());
  LineWriter line(out, length);
  line.json("group", rollout.group);
  if (!rollout.trajectory.empty()) line.json("trajectory", rollout.trajectory);
  if (rollout.turn) line.number("turn", *rollout.turn);
  line.list("input_ids", rollout.input_ids);
  line.list("loss_mask", rollout.loss_mask);
  line.list("logprobs", rollout.logprobs);
  line.number("temperature", rollout.temperature);
  line.by_token("versions", rollout.versions);
  line.by_token("turns", rollout.turns);
  line.by_token("top_ids", rollout.top_ids);
  line.by_token("top_logprobs", rollout.top_logprobs);
  line.routed_experts("routed_experts", rollout.routed_experts);
  if (rollout.reward) line.number("reward", *rollout.reward);
  for (const auto& [name, value] : rollout.rewards)
    BOUGH_CHECK(std::isfinite(value), "rewards.", name, " = ", value);
  if (!rollout.rewards.empty()) line.json("rewards", rollout.rewards);
  if (!rollout.turn_rewards.empty()) line.list("turn_rewards", rollout.turn_rewards);
  if (rollout.advantage.size() == 1) line.number("advantage", rollout.advantage[0]);
  else line.by_token("advantage", rollout.advantage);
  for (const TrajectoryText& text : kTrajectoryTexts)
    if (const auto& value = rollout.*(text.member)) line.json(text.name, *value);
  for (const auto& [name, values] : rollout.columns) {
    BOUGH_CHECK(values.size() == length || static_cast<int64_t>(values.size()) == rollout.num_generated(),
                name, " has ", values.size(), " values for ", length, " tokens");
    line.list(name, values);
  }
  // An unknown field is left out if a field of this name was written above.
  if (rollout.fields.is_object())
    for (auto it = rollout.fields.begin(); it != rollout.fields.end(); ++it)
      if (!line.has(it.key())) line.json(it.key(), it.value());
  if (!rollout.valid) line.json("valid", false);
  if (!rollout.trained) line.json("trained", false);
  if (rollout.baseline) line.json("baseline", true);
  out += '}';
}

Json to_json(const PageChoices& choices) {
  return {{"positions", choices.positions}, {"begin", choices.begin}, {"pages", choices.pages}};
}

PageChoices page_choices_from_json(const Json& json) {
  PageChoices choices;
  json.at("positions").get_to(choices.positions);
  json.at("begin").get_to(choices.begin);
  json.at("pages").get_to(choices.pages);
  return choices;
}

Json to_json(const RoutedExperts& routed) {
  return {{"layers", routed.num_layers}, {"chosen", routed.num_chosen}, {"experts", routed.experts}};
}

RoutedExperts routed_experts_from_json(const Json& json) {
  RoutedExperts routed;
  json.at("layers").get_to(routed.num_layers);
  json.at("chosen").get_to(routed.num_chosen);
  json.at("experts").get_to(routed.experts);
  return routed;
}

}  // namespace bough
