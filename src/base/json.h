// JSON as the whole system sees it: nlohmann's value type, a strict reader and a safe one-line writer.
//
// The reader refuses what nlohmann lets pass: duplicate keys in one object and nesting deeper than
// kMaxJsonDepth (walking such a value would overflow the stack). Numbers that no double holds (1e999), NaN
// and invalid UTF-8 are errors of the parser itself.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace bough {

using Json = nlohmann::json;

inline constexpr int kMaxJsonDepth = 200;

// Parses one JSON value. UserError: "<source>:<line>: ...", the first line of `text` being `first_line`; for
// JSON Lines give the number of the line in its file.
Json parse_json(std::string_view text, const std::string& source, int64_t first_line = 1);

// Reads and parses a whole file. UserError: missing, a directory, empty, malformed.
Json read_json(const std::filesystem::path& path);

// Calls `use(value, line_number)` for every line of JSON Lines text that is not blank; lines count from 1.
void for_each_json_line(std::string_view text, const std::string& source,
                        const std::function<void(Json value, int64_t line)>& use);

// JSON as one line without a line break at its end. Bytes that are not UTF-8 become U+FFFD; NaN and
// infinities, for which JSON has no form, become null. Never throws on content.
std::string dump_line(const Json& value);

// JSON over several lines, indented by two spaces, with a line break at the end: for files that people read.
std::string dump_pretty(const Json& value);

}  // namespace bough
