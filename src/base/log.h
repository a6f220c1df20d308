// The log: lines on stderr and, if set, in a file. Any thread may call these functions.
//
// The log also manages the last lines of a terminal. There, a progress bar or a live table can be shown as
// the status block. Log lines appear above the status block.
#pragma once

#include <filesystem>
#include <string>

namespace bough {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kSilent };

void log_debug(const std::string& message);
void log_info(const std::string& message);
void log_warning(const std::string& message);
void log_error(const std::string& message);

// Sets the lowest level that is written to stderr; kInfo at start. A log file gets all levels.
void set_log_level(LogLevel level);
LogLevel parse_log_level(const std::string& name);  // debug | info | warning | error | silent; else UserError

// From now on, also appends lines with date, time and level to `path` (a run's log.txt). "" closes the file.
// Throws UserError or IoError if the file cannot be opened.
void set_log_file(const std::filesystem::path& path);

// True when stderr is a terminal that can move its cursor (TERM is neither unset nor "dumb").
bool stderr_is_terminal();

// Columns of the terminal behind stderr; 80 if unknown.
int terminal_columns();

// Shows `block` as the last lines of the terminal, in place of the previous status block. Lines are separated
// by \n; none may be longer than terminal_columns(). "" removes the block. No effect without a terminal.
void show_status(const std::string& block);

// Writes one line to stderr above the status block, without date or level.
void print_line(const std::string& line);

}  // namespace bough
