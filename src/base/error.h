// Errors of the whole system.
//
// UserError    bad input or settings; nothing was changed. The message says what, where (file, line, key),
//              got, expected, remedy. Exit code 2.
// IoError      the same call may succeed later (disk full, connection refused). A caller that retries must
//              limit the number of tries. Exit code 3.
// Interrupted  the user asked to stop (Ctrl-C, SIGTERM); a checkpoint was written. Exit code 130.
// BOUGH_CHECK  throws InternalError if its condition is false, which is a bug of Bough. The message has the
//              condition, the values and the source line. Exit code 3.
//
// Only the module cli exits and prints errors. All other modules throw.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace bough {

struct UserError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct IoError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct InternalError : std::logic_error {
  using std::logic_error::logic_error;
};

// Concatenates its arguments with operator<<. It exists because g++ 12 has no <format>, and torch and spdlog
// ship different versions of fmt.
template <class... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

// Makes untrusted text safe to quote in an error message: at most `max_length` characters, on one line, with
// control characters and invalid UTF-8 escaped.
std::string quoted(std::string_view text, size_t max_length = 80);
// Overloads for std::string. Without them, argument-dependent lookup would prefer std::quoted of <iomanip>.
inline std::string quoted(const std::string& text, size_t max_length = 80) {
  return quoted(std::string_view(text), max_length);
}
inline std::string quoted(std::string& text, size_t max_length = 80) {
  return quoted(std::string_view(text), max_length);
}

// The candidate nearest to `name` by edit distance, or "" if none is near enough to be a typing error.
std::string nearest(std::string_view name, const char* const* begin, const char* const* end);

namespace internal {
[[noreturn]] void check_failed(const char* condition, const char* file, int line, const std::string& message);
}
}  // namespace bough

// BOUGH_CHECK(a == b, "a=", a, " b=", b)
#define BOUGH_CHECK(condition, ...)                                                               \
  do {                                                                                            \
    if (!(condition))                                                                             \
      ::bough::internal::check_failed(#condition, __FILE__, __LINE__, ::bough::str(__VA_ARGS__)); \
  } while (0)
