#include "base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace bough {
namespace {

TEST(ParallelFor, CallsEachIndexOnce) {
  std::vector<std::atomic<int>> calls(1000);
  parallel_for(calls.size(), [&](size_t i) { ++calls[i]; });
  for (const auto& count : calls) EXPECT_EQ(count, 1);
  parallel_for(0, [](size_t) { FAIL(); });
}

TEST(ParallelFor, RethrowsTheErrorOfTheLowestIndex) {
  for (int i = 0; i < 50; ++i) {
    try {
      parallel_for(100, [](size_t k) {
        if (k % 10 == 7) throw std::runtime_error(std::to_string(k));
      });
      FAIL();
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "7");
    }
  }
}

}  // namespace
}  // namespace bough
