#include "base/json.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/file.h"

namespace bough {
namespace {

// Builds the value from the parser's events. nlohmann's own builder accepts duplicate keys and any depth, and
// does not show the digits of a number.
template <class AnyJson>
class StrictBuilder final : public nlohmann::json_sax<AnyJson> {
 public:
  using typename nlohmann::json_sax<AnyJson>::number_integer_t;
  using typename nlohmann::json_sax<AnyJson>::number_unsigned_t;
  using typename nlohmann::json_sax<AnyJson>::number_float_t;
  using typename nlohmann::json_sax<AnyJson>::string_t;
  using typename nlohmann::json_sax<AnyJson>::binary_t;

  // Called with each number that is not a whole number of 64 bits. False: the number is an error.
  std::function<bool(bool is_of_root, const std::string& key, const std::string& text)> check_number;

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t& text) override {
    if (check_number && !check_number(stack_.size() == 1 && root.is_object(), key_, text))
      return fail(str("the whole number ", quoted(text, 40), " exceeds 64 bits; write it as a text"));
    return put(value);
  }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(AnyJson::object()); }
  bool start_array(std::size_t) override { return open(AnyJson::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    auto [slot, inserted] = stack_.back()->emplace(name, nullptr);
    if (!inserted) return fail(str("key ", quoted(name), " is given twice in one object"));
    slot_ = &slot.value();
    key_ = name;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception& error) override {
    if (problem.empty()) {
      // The message is "[json.exception.parse_error.101] parse error at line 1, column 8: syntax error …;
      // last read: '…'". Only the text after the column and before "; last read" is used, because the quoted
      // input may be of any length.
      std::string_view what = error.what();
      what = what.substr(0, what.find("; last read"));
      const size_t column = what.find("column ");
      const size_t begin = column == std::string_view::npos ? what.find("] ") : what.find(": ", column);
      problem = begin == std::string_view::npos ? what : what.substr(begin + 2);
    }
    problem_position = position;
    return false;
  }

  AnyJson root;
  std::string problem;
  std::size_t problem_position = 0;  // bytes read so far

 private:
  bool fail(std::string message) {
    problem = std::move(message);
    return false;
  }
  template <class T>
  AnyJson* place(T&& value) {
    if (stack_.empty()) return &(root = AnyJson(std::forward<T>(value)));
    if (stack_.back()->is_array()) return &stack_.back()->emplace_back(std::forward<T>(value));
    return &(*slot_ = AnyJson(std::forward<T>(value)));
  }
  template <class T>
  bool put(T&& value) {
    place(std::forward<T>(value));
    return true;
  }
  bool open(AnyJson container) {
    if (stack_.size() >= static_cast<size_t>(kMaxJsonDepth))
      return fail(str("nested deeper than ", kMaxJsonDepth, " levels"));
    stack_.push_back(place(std::move(container)));
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }

  std::vector<AnyJson*>
      stack_;                // the open containers; only the innermost one grows, so the pointers stay valid
  AnyJson* slot_ = nullptr;  // where the value of the last key is stored
  std::string key_;          // the last key
};

template <class AnyJson>
AnyJson build(StrictBuilder<AnyJson>& builder, std::string_view text, const std::string& source,
              int64_t first_line) {
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos)
    throw UserError(str(source, ":", first_line, ": the text is empty, expected a JSON value"));
  if (text.starts_with("PAR1"))
    throw UserError(str(source,
                        ": a Parquet file, expected JSON. In Python, pandas.read_parquet(FILE).to_json(OUT, "
                        "orient=\"records\", lines=True) converts it to JSON Lines"));
  if (AnyJson::sax_parse(text, &builder)) return std::move(builder.root);
  // The parser reports the position of its own errors. The builder's errors (duplicate keys, depth) have no
  // position, so the message gets a line number only if the text is one line.
  std::string place = source;
  if (builder.problem_position > 0) {
    const std::string_view before = text.substr(0, std::min(builder.problem_position, text.size()));
    const auto line = first_line + std::count(before.begin(), before.end(), '\n');
    place += str(":", line, ":", before.size() - (before.rfind('\n') + 1));  // npos + 1 is 0
    constexpr size_t kShown = 30;
    const std::string_view rest = text.substr(before.size() - std::min<size_t>(before.size(), 1));
    if (rest.starts_with("NaN") || rest.starts_with("Infinity"))
      builder.problem = "NaN and Infinity are no JSON; write null, or a text";
    builder.problem += ", after " + quoted(before.substr(before.size() - std::min(before.size(), kShown)));
  } else if (text.find('\n') == std::string_view::npos) {
    place += str(":", first_line);
  }
  throw UserError(str(place, ": not valid JSON: ", builder.problem));
}

}  // namespace

Json parse_json(std::string_view text, const std::string& source, int64_t first_line) {
  StrictBuilder<Json> builder;
  return build(builder, text, source, first_line);
}

OrderedJson parse_ordered_json(std::string_view text, const std::string& source, int64_t first_line,
                               std::map<std::string, std::string>* lost_digits) {
  StrictBuilder<OrderedJson> builder;
  builder.check_number = [&](bool is_of_root, const std::string& key, const std::string& number) {
    const bool is_whole = number.find_first_of(".eE") == std::string::npos;
    if (!lost_digits || !is_of_root) return !is_whole;
    const size_t first = std::min(number.find_first_of("123456789"), number.size());
    const auto digits = std::count_if(number.begin() + static_cast<std::ptrdiff_t>(first), number.end(),
                                      [](char c) { return c >= '0' && c <= '9'; });
    if (is_whole || digits > std::numeric_limits<double>::max_digits10) (*lost_digits)[key] = number;
    return true;
  };
  return build(builder, text, source, first_line);
}

Json read_json(const std::filesystem::path& path) {
  return parse_json(read_file(path), path.string());
}

void for_each_line(std::string_view text,
                   const std::function<void(std::string_view line, int64_t number)>& use) {
  int64_t line_number = 0;
  while (!text.empty()) {
    const size_t length = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, length);
    text.remove_prefix(std::min(length + 1, text.size()));
    ++line_number;
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) use(line, line_number);
  }
}

void for_each_json_line(std::string_view text, const std::string& source,
                        const std::function<void(Json value, int64_t line)>& use) {
  for_each_line(
      text, [&](std::string_view line, int64_t number) { use(parse_json(line, source, number), number); });
}

std::string dump_line(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string dump_ordered(const OrderedJson& value) {
  return value.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

std::string dump_pretty(const Json& value) {
  return value.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace bough
