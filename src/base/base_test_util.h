// Checks that tests of several modules use.
#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <initializer_list>
#include <string>

namespace bough {

// Expects that an error's message contains every word.
inline void expect_names(const std::string& message, std::initializer_list<std::string> words) {
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << "no <" << word << "> in: " << message;
}

// While this object lives, writes beyond `num_bytes` fail with EFBIG. It simulates a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t num_bytes) {
    old_handler_ = ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const struct rlimit limit = {num_bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    ::signal(SIGXFSZ, old_handler_);
  }

 private:
  struct rlimit old_;
  void (*old_handler_)(int);
};

}  // namespace bough
