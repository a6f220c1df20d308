// Parses one line of a rollout file into a Trajectory. rollout_writer.cpp is the inverse.
//
// Lists of numbers are nearly all of a file. They are parsed directly from the text (350 MB/s). A JSON
// library would build a node of 16 bytes per number (90 MB/s), and could not tell which number of a list is
// out of range. All other fields are parsed by Json.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/ascii.h"
#include "base/error.h"
#include "data/rollout_file.h"

namespace bough {

namespace {

// Location of an error: the field, the index in the field's list, and, if that element is a list too, the
// index in this inner list (-1: none).
struct Place {
  std::string_view field;
  int64_t position = -1;
  int64_t inner = -1;

  Place element(size_t index) const {
    const auto at = static_cast<int64_t>(index);
    return position < 0 ? Place{field, at} : Place{field, position, at};
  }
};

class LineParser {
 public:
  LineParser(std::string_view line, const std::string& where, const RolloutReadOptions& options)
      : at_(line.data()),
        begin_(line.data()),
        end_(line.data() + line.size()),
        where_(where),
        options_(options) {}

  Trajectory parse() {
    skip_space();
    if (!take('{')) fail_syntax("an object, '{'");
    skip_space();
    if (!take('}')) {
      do {
        skip_space();
        const std::string key = parse_key();
        skip_space();
        if (!take(':')) fail_syntax("':' after the field's name");
        skip_space();
        parse_field(key);
        skip_space();
      } while (take(','));
      if (!take('}')) fail_syntax("',' or '}'");
    }
    skip_space();
    if (at_ != end_) fail_syntax("the end of the line: one object per line");
    check();
    return std::move(rollout_);
  }

 private:
  // ---- errors ----
  [[noreturn]] void fail(const Place& place, std::string_view got, const std::string& expected) const {
    const std::string inner = place.inner < 0 ? "" : str(", ", place.inner);
    const std::string position =
        place.position < 0 ? "" : str(", position ", place.position, inner, " (counted from 0)");
    throw UserError(
        str(where_, ", field ", quoted(place.field), position, ": got ", got, "; expected ", expected));
  }
  [[noreturn]] void fail_syntax(const std::string& expected) const {
    throw UserError(
        str(where_, ", column ", at_ - begin_ + 1, ": not JSON: got ",
            at_ == end_ ? "the end of the line" : quoted(std::string_view{at_, size_t(end_ - at_)}, 20),
            "; expected ", expected, ". A rollout file has one JSON object per line"));
  }
  // The text at the cursor, up to the next delimiter, for error messages.
  std::string got_here() const {
    if (at_ == end_) return "the end of the line";
    const char* stop = at_;
    if (*at_ == '"' || *at_ == '[' || *at_ == '{') stop = std::min(end_, at_ + 40);
    else
      while (stop != end_ && *stop != ',' && *stop != ']' && *stop != '}' && !is_space(*stop)) ++stop;
    if (stop == at_) return "nothing";
    return quoted(std::string_view{at_, size_t(stop - at_)}, 40);
  }

  // ---- text ----
  static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }
  void skip_space() {
    while (at_ != end_ && is_space(*at_)) ++at_;
  }
  bool take(char c) {
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }

  // Moves past the string that begins at the cursor. Json checks the string's content later.
  void skip_string() {
    const char* start = at_++;
    while (at_ != end_ && *at_ != '"') at_ += (*at_ == '\\' && at_ + 1 != end_) ? 2 : 1;
    if (!take('"')) {
      at_ = start;
      fail_syntax("a string that ends on this line");
    }
  }

  std::string parse_key() {
    if (at_ == end_ || *at_ != '"') fail_syntax("a field's name in double quotes");
    const char* start = at_;
    skip_string();
    const Json key = parse_value({start, size_t(at_ - start)}, "a field's name");
    return key.get<std::string>();
  }

  // Returns the text of the value at the cursor and moves the cursor behind it.
  std::string_view skip_value() {
    const char* start = at_;
    int depth = 0;
    do {
      if (at_ == end_) fail_syntax("a value");
      if (*at_ == '"') {
        skip_string();
      } else if (*at_ == '{' || *at_ == '[') {
        if (++depth > kMaxJsonDepth) fail_syntax(str("values nested at most ", kMaxJsonDepth, " deep"));
        ++at_;
      } else if (*at_ == '}' || *at_ == ']') {
        if (--depth < 0) fail_syntax("a value");
        ++at_;
      } else if (depth == 0) {
        while (at_ != end_ && *at_ != ',' && *at_ != '}' && *at_ != ']' && !is_space(*at_)) ++at_;
      } else {
        ++at_;
      }
    } while (depth > 0);
    return {start, size_t(at_ - start)};
  }

  Json parse_value(std::string_view text, std::string_view field) const {
    try {
      return Json::parse(text.begin(), text.end());
    } catch (const Json::exception&) {
      fail({field}, quoted(text, 40), "a JSON value (numbers finite and within the range of doubles)");
    }
  }

  // ---- numbers ----
  // Reads a number by JSON's grammar. Returns "" if there is no number at the cursor. Sets `integral` to
  // whether the number has no fraction and no exponent.
  std::string_view take_number(bool& integral) {
    const char* p = at_;
    integral = true;
    if (p != end_ && *p == '-') ++p;
    if (p == end_ || !is_digit(*p)) return {};
    if (*p == '0') ++p;
    else
      while (p != end_ && is_digit(*p)) ++p;
    if (p != end_ && *p == '.') {
      integral = false;
      const char* digits = ++p;
      while (p != end_ && is_digit(*p)) ++p;
      if (p == digits) return {};
    }
    if (p != end_ && (*p == 'e' || *p == 'E')) {
      integral = false;
      ++p;
      if (p != end_ && (*p == '+' || *p == '-')) ++p;
      const char* digits = p;
      while (p != end_ && is_digit(*p)) ++p;
      if (p == digits) return {};
    }
    if (p != end_ && *p != ',' && *p != ']' && *p != '}' && !is_space(*p)) return {};
    const std::string_view text(at_, size_t(p - at_));
    at_ = p;
    return text;
  }

  int64_t parse_integer(const Place& place, int64_t low, int64_t high, const char* expected) {
    const char* start = at_;
    bool integral = false;
    const std::string_view text = take_number(integral);
    int64_t value = 0;
    const bool ok = integral && !text.empty() &&
                    std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc();
    if (!ok || value < low || value > high) {
      at_ = start;
      fail(place, got_here(), str(expected, " from ", low, " to ", high));
    }
    return value;
  }

  template <class T>
  T parse_real(const Place& place) {
    const char* start = at_;
    bool integral = false;
    const std::string_view text = take_number(integral);
    T value = 0;
    if (text.empty()) fail(place, got_here(), "a finite number (JSON has no NaN and no Infinity)");
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec == std::errc()) return value;
    // Out of range: a number that is too large is an error, one that is too small becomes zero. from_chars
    // does not tell which of the two happened.
    double wide = std::numeric_limits<double>::infinity();
    try {
      wide = Json::parse(text.begin(), text.end()).template get<double>();
    } catch (const Json::exception&) {
    }
    if (!(std::abs(wide) < 1.0)) {
      at_ = start;
      fail(place, got_here(),
           str("a number that fits ", sizeof(T) == 4 ? "a float (at most 3.4e38)" : "a double"));
    }
    return static_cast<T>(wide);
  }

  template <class T, class ParseOne>
  void parse_list(const Place& list, std::vector<T>& out, ParseOne parse_one) {
    if (!take('[')) fail(list, got_here(), "a list");
    skip_space();
    if (take(']')) return;
    do {
      skip_space();
      out.push_back(parse_one(list.element(out.size())));
      skip_space();
    } while (take(','));
    if (!take(']')) fail(list.element(out.size()), got_here(), "',' or ']'");
  }

  template <class T>
  void parse_reals(const Place& list, std::vector<T>& out) {
    parse_list(list, out, [&](const Place& place) { return parse_real<T>(place); });
  }

  // Integers in [low, high].
  template <class T>
  void parse_integers(const Place& list, std::vector<T>& out, int64_t low, int64_t high,
                      const char* expected) {
    parse_list(list, out,
               [&](const Place& place) { return static_cast<T>(parse_integer(place, low, high, expected)); });
  }

  // ---- fields ----
  enum Field {
    kGroup,
    kTrajectory,
    kTurn,
    kIds,
    kMask,
    kLogprobs,
    kVersions,
    kTurns,
    kTopIds,
    kTopLogprobs,
    kRoutedExperts,
    kTemperature,
    kReward,
    kRewards,
    kTurnRewards,
    kAdvantage,
    kValid,
    kTrained,
    kBaseline,
    kNumFields
  };
  static constexpr const char* kNames[kNumFields] = {
      "group",        "trajectory", "turn",         "input_ids",      "loss_mask",   "logprobs", "versions",
      "turns",        "top_ids",    "top_logprobs", "routed_experts", "temperature", "reward",   "rewards",
      "turn_rewards", "advantage",  "valid",        "trained",        "baseline"};

  void parse_field(const std::string& key) {
    int field = 0;
    while (field < kNumFields && key != kNames[field]) ++field;
    if (field == kNumFields) {
      parse_other(key);
      return;
    }
    if (std::exchange(seen_[field], true)) fail_twice(key);
    parse_known(static_cast<Field>(field), key);
  }

  [[noreturn]] void fail_twice(const std::string& key) const {
    fail({key}, "the field twice", "every field once");
  }

  // Parses fields with texts for people, columns that the options name, and unknown fields.
  void parse_other(const std::string& key) {
    if (rollout_.fields.contains(key) || rollout_.columns.contains(key)) fail_twice(key);
    if (std::find(options_.columns.begin(), options_.columns.end(), key) != options_.columns.end()) {
      parse_reals({key}, rollout_.columns[key]);
      return;
    }
    const auto text = std::find_if(std::begin(kTrajectoryTexts), std::end(kTrajectoryTexts),
                                   [&](const TrajectoryText& t) { return key == t.name; });
    if (text != std::end(kTrajectoryTexts) && rollout_.*(text->member)) fail_twice(key);
    Json value = parse_value(skip_value(), key);
    if (text != std::end(kTrajectoryTexts) && value.is_string())
      rollout_.*(text->member) = value.get<std::string>();
    else rollout_.fields[key] = std::move(value);
  }

  std::string parse_string(const std::string& key) {
    if (at_ == end_ || *at_ != '"') fail({key}, got_here(), "a string");
    return parse_value(skip_value(), key).get<std::string>();
  }

  bool parse_bool(const std::string& key) {
    const std::string got = got_here();
    const Json value = parse_value(skip_value(), key);
    if (!value.is_boolean()) fail({key}, got, "true or false");
    return value.get<bool>();
  }

  // {"name": number, ...}
  void parse_named_reals(const std::string& key, std::map<std::string, double>& out) {
    if (!take('{')) fail({key}, got_here(), "an object of numbers, {\"name\": 0.5}");
    skip_space();
    if (take('}')) return;
    do {
      skip_space();
      const std::string name = parse_key(), full = str(key, ".", name);
      skip_space();
      if (!take(':')) fail_syntax("':' after the name");
      skip_space();
      if (!out.emplace(name, parse_real<double>({full})).second) fail_twice(full);
      skip_space();
    } while (take(','));
    if (!take('}')) fail({key}, got_here(), "',' or '}'");
  }

  // [[[expert, ...] for each layer] for each token]. All rows have the same layers and experts per layer.
  void parse_routed_experts(const Place& here) {
    RoutedExperts& routed = rollout_.routed_experts;
    std::vector<char> rows;
    parse_list(here, rows, [&](const Place& row) {
      std::vector<char> layers;
      parse_list(row, layers, [&](const Place& layer) {
        std::vector<uint16_t> experts;
        parse_integers(layer, experts, 0, std::numeric_limits<uint16_t>::max(),
                       "an expert's number, an integer");
        if (routed.num_chosen == 0) routed.num_chosen = std::ssize(experts);
        if (experts.empty() || std::ssize(experts) != routed.num_chosen)
          fail(layer, str("a list of ", experts.size()),
               str("a list of ", std::max<int64_t>(1, routed.num_chosen), " experts, as in the first row"));
        for (size_t i = 0; i < experts.size(); ++i)
          if (std::find(experts.begin(), experts.begin() + std::ptrdiff_t(i), experts[i]) !=
              experts.begin() + std::ptrdiff_t(i))
            fail(layer, str("expert ", experts[i], " twice"), "different experts");
        routed.experts.insert(routed.experts.end(), experts.begin(), experts.end());
        return '\0';
      });
      if (routed.num_layers == 0) routed.num_layers = std::ssize(layers);
      if (layers.empty() || std::ssize(layers) != routed.num_layers)
        fail(row, str("a list of ", layers.size(), " layers"),
             str(std::max<int64_t>(1, routed.num_layers), ", as in the first row"));
      return '\0';
    });
  }

  void parse_known(Field field, const std::string& key) {
    constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
    const int64_t last_id = options_.vocab_size > 0 ? options_.vocab_size - 1 : kMaxInt;
    const char* an_id =
        options_.vocab_size > 0 ? "an id of the model's vocabulary, an integer" : "a token id, an integer";
    const Place here{key};
    switch (field) {
      case kGroup: rollout_.group = parse_string(key); break;
      case kTrajectory: rollout_.trajectory = parse_string(key); break;
      case kTurn: rollout_.turn = parse_integer(here, 0, kMaxInt, "the number of a turn, an integer"); break;
      case kIds: parse_integers(here, rollout_.input_ids, 0, last_id, an_id); break;
      case kMask: parse_integers(here, rollout_.loss_mask, 0, 1, "an integer"); break;
      case kLogprobs: parse_reals(here, rollout_.logprobs); break;
      case kVersions:
        parse_integers(here, rollout_.versions, -1, kMaxInt, "a weight version, an integer");
        break;
      case kTurns:
        parse_integers(here, rollout_.turns, -1, kMaxInt, "the number of a turn, an integer");
        break;
      case kTopIds:
        parse_list(here, rollout_.top_ids, [&](const Place& place) {
          std::vector<int32_t> ids;
          parse_integers(place, ids, 0, last_id, an_id);
          return ids;
        });
        break;
      case kTopLogprobs:
        parse_list(here, rollout_.top_logprobs, [&](const Place& place) {
          std::vector<float> values;
          parse_reals(place, values);
          return values;
        });
        break;
      case kRoutedExperts: parse_routed_experts(here); break;
      case kTemperature: {
        const std::string got = got_here();
        rollout_.temperature = parse_real<double>(here);
        if (!(rollout_.temperature > 0) && !(options_.allow_greedy && rollout_.temperature == 0))
          fail(here, got, "a number above 0, because log-probabilities use logits / temperature");
        break;
      }
      case kReward: rollout_.reward = parse_real<double>(here); break;
      case kRewards: parse_named_reals(key, rollout_.rewards); break;
      case kTurnRewards: parse_reals(here, rollout_.turn_rewards); break;
      case kAdvantage:
        if (at_ != end_ && *at_ == '[') parse_reals(here, rollout_.advantage);
        else rollout_.advantage.push_back(parse_real<float>(here)), advantage_is_number_ = true;
        break;
      case kValid: rollout_.valid = parse_bool(key); break;
      case kTrained: rollout_.trained = parse_bool(key); break;
      case kBaseline: rollout_.baseline = parse_bool(key); break;
      case kNumFields: break;
    }
  }

  // ---- the whole ----
  void check() {
    for (int field : {kIds, kMask, kLogprobs})
      if (!seen_[field])
        fail({kNames[field]}, "nothing", str("a list: every rollout needs it", near_miss(kNames[field])));
    const size_t length = rollout_.input_ids.size();
    check_length(kMask, rollout_.loss_mask.size(), length);
    check_length(kLogprobs, rollout_.logprobs.size(), length);
    if (seen_[kVersions]) check_length(kVersions, rollout_.versions.size(), length);
    if (seen_[kTurns]) check_length(kTurns, rollout_.turns.size(), length);
    check_top(length);
    check_routed_experts(length);
    check_columns(length);
    if (seen_[kAdvantage] && !advantage_is_number_) {
      check_length(kAdvantage, rollout_.advantage.size(), length);
      // An advantage for zero tokens has no value. One 0 is stored: an empty list means "not given".
      if (length == 0) rollout_.advantage.assign(1, 0.0f);
    }
    if (!seen_[kGroup] && !seen_[kAdvantage])
      fail({kNames[kGroup]}, "nothing",
           "a string, the same for all sequences of one prompt (not needed with an 'advantage')");
    if (options_.require_reward_or_advantage && rollout_.valid && !seen_[kReward] && !seen_[kAdvantage])
      fail({kNames[kReward]}, "nothing",
           str("a number, or an 'advantage': training needs one of them", near_miss("reward")));
  }
  void check_length(Field field, size_t got, size_t length) const {
    if (got == length) return;
    fail({kNames[field]}, str("a list of ", got, field == kAdvantage ? " numbers" : ""),
         str(length, field == kAdvantage ? ", one per token of 'input_ids' (or one number for the sequence)"
                                         : ", one per token of 'input_ids'"));
  }
  void check_top(size_t length) const {
    if (seen_[kTopIds]) check_length(kTopIds, rollout_.top_ids.size(), length);
    if (seen_[kTopLogprobs]) check_length(kTopLogprobs, rollout_.top_logprobs.size(), length);
    if (!seen_[kTopIds] || !seen_[kTopLogprobs]) return;
    for (size_t i = 0; i < length; ++i)
      if (const size_t ids = rollout_.top_ids[i].size(), got = rollout_.top_logprobs[i].size(); ids != got)
        fail(Place{kNames[kTopLogprobs]}.element(i), str("a list of ", got),
             str(ids, ", one per id of 'top_ids' at this position"));
  }
  void check_routed_experts(size_t length) const {
    const auto rows = static_cast<size_t>(rollout_.routed_experts.num_rows());
    if (!seen_[kRoutedExperts] || rows == length || rows + 1 == length) return;
    fail({kNames[kRoutedExperts]}, str("a list of ", rows),
         str(length - (length > 0), ", one per token of 'input_ids' except the last (or ", length, ")"));
  }
  void check_columns(size_t length) const {
    for (const auto& [name, values] : rollout_.columns) {
      const auto generated = static_cast<size_t>(rollout_.num_generated());
      if (values.size() == length || values.size() == generated) continue;
      fail({name}, str("a list of ", values.size(), " numbers"),
           str(length, ", one per token of 'input_ids', or ", generated, ", one per token with loss_mask 1"));
    }
  }
  // Returns " (it has 'logprob')" if the name of an unknown field is similar to the missing one, else "".
  std::string near_miss(const char* missing) const {
    for (auto it = rollout_.fields.begin(); it != rollout_.fields.end(); ++it)
      if (!nearest(it.key(), &missing, &missing + 1).empty()) return str(" (it has ", quoted(it.key()), ")");
    return "";
  }

  const char* at_;
  const char* begin_;
  const char* end_;
  const std::string& where_;
  const RolloutReadOptions& options_;
  Trajectory rollout_;
  bool seen_[kNumFields] = {};
  bool advantage_is_number_ = false;
};

}  // namespace

Trajectory parse_rollout_line(std::string_view line, const std::string& where,
                              const RolloutReadOptions& options) {
  return LineParser(line, where, options).parse();
}

}  // namespace bough
