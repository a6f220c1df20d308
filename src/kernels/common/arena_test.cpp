#include "kernels/common/arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace bough {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

TEST(Arena, TakesTheFirstPartThatIsLargeEnoughAndMergesFreedOnes) {
  Arena arena(256 * kMiB);
  void* const a = arena.take(kMiB);
  void* const b = arena.take(kMiB);
  void* const c = arena.take(kMiB);
  void* const d = arena.take(1);
  EXPECT_EQ(arena.extent(), 3 * kMiB + Arena::kAlignment);
  arena.give_back(a, kMiB);
  arena.give_back(c, kMiB);
  EXPECT_EQ(arena.take(kMiB / 2), a);
  EXPECT_EQ(arena.take(kMiB), c) << "half of a's part is too small";
  arena.give_back(a, kMiB / 2);
  arena.give_back(b, kMiB);
  EXPECT_EQ(arena.take(2 * kMiB), a) << "a's part and b's are one";
  arena.check_integrity();
  arena.give_back(c, kMiB);
  arena.give_back(d, 1);
  EXPECT_EQ(arena.extent(), 2 * kMiB) << "c's part merged with d's, and both with what was never used";
  arena.give_back(a, 2 * kMiB);
  EXPECT_EQ(arena.extent(), 0u);
  EXPECT_EQ(arena.peak_extent(), 3 * kMiB + Arena::kAlignment);
  arena.discard();
  EXPECT_EQ(arena.peak_extent(), 0u);
  arena.check_integrity();
}

TEST(Arena, HasNoMoreThanItReserved) {
  Arena arena(4 * kMiB);
  void* const all = arena.take(4 * kMiB);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(arena.take(1), nullptr);
  EXPECT_EQ(arena.take(SIZE_MAX), nullptr);
  EXPECT_TRUE(arena.contains(static_cast<char*>(all) + 4 * kMiB - 1));
  EXPECT_FALSE(arena.contains(static_cast<char*>(all) + 4 * kMiB));
  int elsewhere = 0;
  EXPECT_FALSE(arena.contains(&elsewhere));
  arena.give_back(all, 4 * kMiB);
  EXPECT_EQ(arena.take(1), all);
}

TEST(Arena, ReservesLessIfTheSystemRefuses) {
  Arena arena(size_t{1} << 60);  // more than the address space of any processor
  void* const block = arena.take(kMiB);
  ASSERT_NE(block, nullptr);
  std::memset(block, 1, kMiB);
}

TEST(Arena, DiscardedPagesAreZeroAndLiveOnesKept) {
  Arena arena(64 * kMiB);
  auto* const freed = static_cast<unsigned char*>(arena.take(kMiB));
  auto* const live = static_cast<unsigned char*>(arena.take(kMiB));
  std::memset(freed, 1, kMiB);
  std::memset(live, 2, kMiB);
  arena.give_back(freed, kMiB);
  arena.discard();
  EXPECT_EQ(live[0], 2);
  EXPECT_EQ(live[kMiB - 1], 2);
  auto* const again = static_cast<unsigned char*>(arena.take(kMiB));
  EXPECT_EQ(again, freed);
  EXPECT_EQ(again[kMiB / 2], 0) << "the system gives pages of zeros";
}

// Each block holds its own pattern until it is given back, so an overlap of two blocks shows.
TEST(Arena, RandomBlocksKeepTheirContents) {
  struct Block {
    unsigned char* memory;
    size_t bytes;
    unsigned char value;
  };
  Arena arena(512 * kMiB);
  std::mt19937 random(7);
  std::vector<Block> blocks;
  size_t live = 0, most_live = 0;
  for (int i = 0; i < 20000; ++i) {
    if (blocks.size() < 100 && random() % 2 == 0) {
      const size_t bytes = 1 + random() % (size_t{1} << (6 + random() % 12));
      auto* const memory = static_cast<unsigned char*>(arena.take(bytes));
      ASSERT_NE(memory, nullptr);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(memory) % Arena::kAlignment, 0u);
      blocks.push_back({memory, bytes, static_cast<unsigned char>(i)});
      std::memset(memory, blocks.back().value, bytes);
      most_live = std::max(most_live, live += bytes);
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      const auto [memory, bytes, value] = blocks.back();
      ASSERT_EQ(memory[0], value);
      ASSERT_EQ(memory[bytes - 1], value);
      ASSERT_EQ(std::memcmp(memory, memory + 1, bytes - 1), 0);
      arena.give_back(memory, bytes);
      live -= bytes;
      blocks.pop_back();
    }
    if (i % 2500 == 0) arena.discard();
    arena.check_integrity();
  }
  EXPECT_LE(arena.peak_extent(), 2 * most_live);
  for (const Block& block : blocks) arena.give_back(block.memory, block.bytes);
  arena.check_integrity();
  EXPECT_EQ(arena.extent(), 0u);
}

}  // namespace
}  // namespace bough
