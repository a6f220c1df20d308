// Formats numbers for people: logs, tables, the report.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace bough {

std::string format_bytes(double num_bytes);   // "512 B", "1.5 KiB", "40 GiB"
std::string format_duration(double seconds);  // "85 µs", "12 ms", "3.2 s", "4:07", "1:02:09", "2 d 03:15"
std::string format_count(double count);       // "987", "12.3k", "4.1M": tokens, parameters
std::string format_thousands(int64_t value);  // "1,234,567"
std::string format_significant(double value, int digits = 4);  // "0.03125", "1.2e-05", "nan"

// Text for use in a file name: lower-case letters, digits and single dashes, at most 120 characters.
std::string file_name_part(std::string_view text);

// The shortest text that reads back as exactly `value` ("1e-05", "0.1"); "nan", "inf", "-inf".
std::string format_shortest(double value);

// "a, b or c".
std::string format_choices(std::span<const std::string_view> names);

// Columns that a terminal needs for UTF-8 text: one per code point, 0 for combining marks, 2 for wide East
// Asian characters.
int display_width(std::string_view text);

// The longest start of UTF-8 text that fits into `columns` terminal columns. Ends in "…" if text was cut.
std::string fit(std::string_view text, int columns);

}  // namespace bough
