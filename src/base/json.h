// JSON for the whole system: nlohmann's value type, a strict reader, and a one-line writer.
//
// The reader refuses two things that nlohmann accepts: duplicate keys in an object, and nesting deeper than
// kMaxJsonDepth (recursion over such a value would overflow the stack). nlohmann itself refuses numbers
// outside the range of double (1e999), NaN and invalid UTF-8.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace bough {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;  // objects keep the order of their keys

inline constexpr int kMaxJsonDepth = 200;

// Parses one JSON value. Throws UserError "<source>:<line>: ...". `first_line` is the number of the first
// line of `text` in its source (JSON Lines: the line of the file that is parsed).
Json parse_json(std::string_view text, const std::string& source, int64_t first_line = 1);

// Like parse_json, but objects keep the order of their keys. A whole number of more than 64 bits is an error,
// because a double would have other digits. If `lost_digits` is given, the numbers of the root object whose
// digits a value does not hold go there by their key, as written, and are no error.
OrderedJson parse_ordered_json(std::string_view text, const std::string& source, int64_t first_line = 1,
                               std::map<std::string, std::string>* lost_digits = nullptr);

// Reads and parses a whole file. Throws UserError if it is missing, a directory, empty or malformed.
Json read_json(const std::filesystem::path& path);

// Calls `use` for every line of JSON Lines text that is not blank, with the line or its value; lines count
// from 1.
void for_each_line(std::string_view text,
                   const std::function<void(std::string_view line, int64_t number)>& use);
void for_each_json_line(std::string_view text, const std::string& source,
                        const std::function<void(Json value, int64_t line)>& use);

// Writes JSON as one line, without a line break at its end. Bytes that are not UTF-8 become U+FFFD. NaN and
// infinities, which JSON cannot express, become null. Never throws because of the content.
std::string dump_line(const Json& value);
std::string dump_ordered(const OrderedJson& value);

// Writes JSON for people: several lines, indented by two spaces, with a line break at the end.
std::string dump_pretty(const Json& value);

}  // namespace bough
