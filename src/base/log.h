// The log: lines on stderr and, when asked, in a file. Safe to call from any thread.
//
// Also the owner of the last lines of a terminal: a progress bar or a live table is a status block that log
// lines push down instead of tearing apart.
#pragma once

#include <filesystem>
#include <string>

namespace bough {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kSilent };

void log_debug(const std::string& message);
void log_info(const std::string& message);
void log_warning(const std::string& message);
void log_error(const std::string& message);

// What reaches stderr; kInfo at start. A log file gets everything from kDebug on.
void set_log_level(LogLevel level);
LogLevel parse_log_level(const std::string& name);  // debug | info | warning | error | silent; else UserError

// Appends to `path` from now on (a run's log.txt), with date, time and level; "" closes it.
// UserError/IoError when it cannot be opened.
void set_log_file(const std::filesystem::path& path);

// True when stderr is a terminal that can move its cursor (TERM is neither unset nor "dumb").
bool stderr_is_terminal();

// Columns of the terminal behind stderr; 80 where that is not known.
int terminal_columns();

// Shows `block` (lines separated by \n, none longer than terminal_columns()) as the last lines of the
// terminal, in place of the block before; "" removes it. Does nothing when stderr is not a terminal.
void show_status(const std::string& block);

// Writes one plain line to stderr above the status block, without date or level.
void print_line(const std::string& line);

}  // namespace bough
