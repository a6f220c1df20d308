// Checks that tests of several modules use.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

namespace bough {

// Expects that an error's message contains every word.
inline void expect_names(const std::string& message, std::initializer_list<std::string> words) {
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << "no <" << word << "> in: " << message;
}

}  // namespace bough
