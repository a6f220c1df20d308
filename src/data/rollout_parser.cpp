#include "data/rollout_parser.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"

namespace bough {

namespace {

// A field, and the position in its list (-1: not in a list): where an error is.
struct Place {
  std::string_view field;
  int64_t position = -1;
};

class LineParser {
 public:
  LineParser(std::string_view line, const std::string& where, const RolloutReadOptions& options)
      : at_(line.data()),
        begin_(line.data()),
        end_(line.data() + line.size()),
        where_(where),
        options_(options) {
  }

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
    if (at_ != end_) fail_syntax("the end of the line: one object a line");
    check();
    return std::move(rollout_);
  }

 private:
  // ---- errors ----
  [[noreturn]] void fail(const Place& place, std::string_view got, const std::string& expected) const {
    const std::string position =
        place.position < 0 ? "" : str(", position ", place.position, " (counted from 0)");
    throw UserError(
        str(where_, ", field ", quoted(place.field), position, ": got ", got, "; expected ", expected));
  }
  [[noreturn]] void fail_syntax(const std::string& expected) const {
    throw UserError(
        str(where_, ", column ", at_ - begin_ + 1, ": not JSON: got ",
            at_ == end_ ? "the end of the line" : quoted(std::string_view{at_, size_t(end_ - at_)}, 20),
            "; expected ", expected, ". A rollout file holds one JSON object a line"));
  }
  // The text of a scalar at the cursor, up to a delimiter: what an error quotes.
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
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }
  void skip_space() {
    while (at_ != end_ && is_space(*at_)) ++at_;
  }
  bool take(char c) {
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }

  // Past the string that begins at the cursor; what it holds is checked by Json.
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

  // The extent of any value at the cursor, which then stands behind it.
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
  // JSON's grammar of a number; the empty text if the cursor is not at one. `integral`: no fraction and no
  // exponent.
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
    // Out of range: too large is an error, too small is zero (from_chars does not say which).
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
  void parse_list(std::string_view field, std::vector<T>& out, ParseOne parse_one) {
    if (!take('[')) fail({field}, got_here(), "a list");
    skip_space();
    if (take(']')) return;
    do {
      skip_space();
      out.push_back(parse_one(Place{field, int64_t(out.size())}));
      skip_space();
    } while (take(','));
    if (!take(']')) fail({field, int64_t(out.size())}, got_here(), "',' or ']'");
  }

  // ---- fields ----
  enum Field { kGroup, kIds, kMask, kLogprobs, kVersions, kTemperature, kReward, kAdvantage, kTrained, kNumFields };
  static constexpr const char* kNames[kNumFields] = {"group",    "input_ids",   "loss_mask", "logprobs",
                                                     "versions", "temperature", "reward",    "advantage", "trained"};

  void parse_field(const std::string& key) {
    int field = 0;
    while (field < kNumFields && key != kNames[field]) ++field;
    if (field == kNumFields ? rollout_.fields.contains(key) : seen_[field])
      fail({key}, "the field twice", "every field once");
    if (field == kNumFields) {
      rollout_.fields[key] = parse_value(skip_value(), key);
      return;
    }
    seen_[field] = true;
    constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
    switch (field) {
      case kGroup:
        if (at_ == end_ || *at_ != '"') fail({key}, got_here(), "a string");
        rollout_.group = parse_value(skip_value(), key).get<std::string>();
        break;
      case kIds: {
        const int64_t last = options_.vocab_size > 0 ? options_.vocab_size - 1 : kMaxInt;
        const char* expected = options_.vocab_size > 0 ? "an id of the model's vocabulary, an integer"
                                                       : "a token id, an integer";
        parse_list(key, rollout_.input_ids,
                   [&](const Place& place) { return int32_t(parse_integer(place, 0, last, expected)); });
        break;
      }
      case kMask:
        parse_list(key, rollout_.loss_mask,
                   [&](const Place& place) { return uint8_t(parse_integer(place, 0, 1, "an integer")); });
        break;
      case kLogprobs:
        parse_list(key, rollout_.logprobs, [&](const Place& place) { return parse_real<float>(place); });
        break;
      case kVersions:
        parse_list(key, rollout_.versions, [&](const Place& place) {
          return int32_t(parse_integer(place, -1, kMaxInt, "a weight version, an integer"));
        });
        break;
      case kTemperature: {
        const std::string got = got_here();
        rollout_.temperature = parse_real<double>({key});
        if (!(rollout_.temperature > 0))
          fail({key}, got, "a number above 0: log-probabilities are of logits / temperature");
        break;
      }
      case kReward: rollout_.reward = parse_real<double>({key}); break;
      case kAdvantage:
        if (at_ != end_ && *at_ == '[')
          parse_list(key, rollout_.advantage, [&](const Place& place) { return parse_real<float>(place); });
        else rollout_.advantage.push_back(parse_real<float>({key})), advantage_is_number_ = true;
        break;
      case kTrained: {
        const std::string got = got_here();
        const Json value = parse_value(skip_value(), key);
        if (!value.is_boolean()) fail({key}, got, "true or false");
        rollout_.trained = value.get<bool>();
        break;
      }
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
    if (seen_[kAdvantage] && !advantage_is_number_) {
      check_length(kAdvantage, rollout_.advantage.size(), length);
      // A list for no tokens says as much as any number, and Trajectory keeps "empty" for "not given".
      if (length == 0) rollout_.advantage.assign(1, 0.0f);
    }
    if (!seen_[kGroup] && !seen_[kAdvantage])
      fail({kNames[kGroup]}, "nothing",
           "a string that the sequences of one prompt share, or an 'advantage', which needs no group");
    if (options_.require_reward_or_advantage && !seen_[kReward] && !seen_[kAdvantage])
      fail({kNames[kReward]}, "nothing",
           str("a number, or an 'advantage': training needs one of them", near_miss("reward")));
  }
  void check_length(Field field, size_t got, size_t length) const {
    if (got == length) return;
    fail({kNames[field]}, str("a list of ", got, field == kAdvantage ? " numbers" : ""),
         str(length, field == kAdvantage ? ", one a token of 'input_ids' (or one number for the sequence)"
                                         : ", one a token of 'input_ids'"));
  }
  // " (it has 'logprob')" where an unknown field looks like the missing one.
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

// ---- writing ----
template <class T>
void append_number(std::string& out, T value) {
  char text[32];
  const auto result = std::to_chars(text, text + sizeof text, value);
  out.append(text, result.ptr);
}

template <class T>
void append_list(std::string& out, const char* name, const std::vector<T>& values) {
  ((out += ", \"") += name) += "\": [";
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out += ", ";
    if constexpr (std::is_floating_point_v<T>)
      BOUGH_CHECK(std::isfinite(values[i]), name, "[", i, "] = ", values[i]);
    append_number(out, values[i]);
  }
  out += ']';
}

}  // namespace

Trajectory parse_rollout_line(std::string_view line, const std::string& where,
                           const RolloutReadOptions& options) {
  return LineParser(line, where, options).parse();
}

void append_rollout_line(std::string& out, const Trajectory& rollout) {
  const size_t length = rollout.input_ids.size();
  BOUGH_CHECK(rollout.loss_mask.size() == length && rollout.logprobs.size() == length, "a rollout of ",
              length, " tokens has loss_mask of ", rollout.loss_mask.size(), ", logprobs of ",
              rollout.logprobs.size());
  BOUGH_CHECK(rollout.versions.empty() || rollout.versions.size() == length, rollout.versions.size(),
              " versions of ", length, " tokens");
  BOUGH_CHECK(rollout.advantage.size() <= 1 || rollout.advantage.size() == length, rollout.advantage.size(),
              " advantages of ", length, " tokens");
  BOUGH_CHECK(std::isfinite(rollout.temperature) && std::isfinite(rollout.reward.value_or(0)), "temperature ",
              rollout.temperature, ", reward ", rollout.reward.value_or(0));
  (out += "{\"group\": ") += dump_line(rollout.group);
  append_list(out, "input_ids", rollout.input_ids);
  append_list(out, "loss_mask", rollout.loss_mask);
  append_list(out, "logprobs", rollout.logprobs);
  out += ", \"temperature\": ";
  append_number(out, rollout.temperature);
  if (!rollout.versions.empty()) append_list(out, "versions", rollout.versions);
  if (rollout.reward) append_number(out += ", \"reward\": ", *rollout.reward);
  if (rollout.advantage.size() == 1) {
    BOUGH_CHECK(std::isfinite(rollout.advantage[0]), "advantage ", rollout.advantage[0]);
    append_number(out += ", \"advantage\": ", rollout.advantage[0]);
  } else if (!rollout.advantage.empty()) {
    append_list(out, "advantage", rollout.advantage);
  }
  if (rollout.fields.is_object())
    for (auto it = rollout.fields.begin(); it != rollout.fields.end(); ++it)
      (((out += ", ") += dump_line(Json(it.key()))) += ": ") += dump_line(it.value());
  if (!rollout.trained) out += ", \"trained\": false";
  out += '}';
}

}  // namespace bough
