#include "kernels/tree_attention/tree_attention_cost.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/common/cpu_allocator.h"
#include "kernels/common/kernel_test.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/tree_attention/random_case.h"

namespace bough {
namespace {

using Kind = DeviceKernels::Attention;

DeviceKernels of(Kind kind, int64_t threads) {
  return {.attention = kind, .threads = threads};
}

int64_t pad(int64_t rows) {
  return (rows + 31) / 32 * 32;
}

// Repeats the kernel's loops, share by share, for one path over a stack. Returns the (query, key) pairs of
// the busiest thread times the number of threads.
double computed(int64_t threads, int64_t queries, int64_t stack, int64_t groups) {
  double pairs = 0;
  for (int64_t first = 0; first < queries; first += 32)
    pairs += static_cast<double>(32 * (pad(stack) + pad(std::min(queries, first + 32))));
  // If there are enough blocks of queries, all key/value heads have a multiple of `threads` shares.
  int64_t shares = 1;
  while (shares * groups % threads != 0) ++shares;
  shares = std::min(shares, pad(queries) / 32);
  const int64_t of_a_thread = (shares * groups + threads - 1) / threads;
  return pairs * static_cast<double>(of_a_thread * threads) / static_cast<double>(shares * groups);
}

TEST(AttentionWork, EqualsTheWorkOfTheBusiestThread) {
  for (const int64_t threads : {1, 2, 3, 8, 64})
    for (const int64_t groups : {1, 2, 4, 8})
      for (const int64_t queries : {1, 16, 31, 64, 99, 128, 130, 256, 500, 2048})
        for (const int64_t stack : {0, 1, 100, 1000})
          for (const Kind kind : {Kind::kTiles, Kind::kBf16Tiles})
            EXPECT_DOUBLE_EQ(attention_work(of(kind, threads), {queries, static_cast<double>(stack),
                                                                (queries + 1) / 2.0, 1, groups}),
                             computed(threads, queries, stack, groups))
                << threads << " threads, " << groups << " groups, " << queries << " queries, stack " << stack;
}

TEST(AttentionWork, GroupsAreSharedAmongThreads) {
  const auto work = [](int64_t threads, int64_t groups) {
    return attention_work(of(Kind::kTiles, threads), {32, 1024, 16.5, 1, groups});
  };
  const double even = 32 * (32 + 1024);
  EXPECT_EQ(work(1, 4), even);
  EXPECT_EQ(work(2, 4), even);
  EXPECT_EQ(work(2, 1), even * 2);      // one block of queries cannot be divided
  EXPECT_EQ(work(2, 3), even * 4 / 3);  // three tasks for two threads
}

TEST(AttentionWork, PiecesSeeLessThanAPathAndMoreThanTheirPairs) {
  const AttentionPass path{2048, 0, 1024.5, 1, 4}, pieces{2048, 0, 25.5, 41, 4};
  const double work = attention_work(of(Kind::kTiles, 2), pieces);
  EXPECT_LT(work, attention_work(of(Kind::kTiles, 2), path) / 4);
  EXPECT_GT(work, 2048 * 25.5);
}

TEST(AttentionWork, ReferenceAndFused) {
  EXPECT_EQ(attention_work(of(Kind::kReference, 2), {10, 5, 5.5, 1, 4}), 10 * 15);
  EXPECT_EQ(attention_work(of(Kind::kFused, 1), {10, 5, 5.5, 1, 4}), 10 * (5 + 5.5 + 64));
  EXPECT_EQ(attention_work(of(Kind::kTiles, 2), {}), 0);
  EXPECT_EQ(attention_rows(Kind::kTiles, 130), 160);
  EXPECT_EQ(attention_rows(Kind::kFused, 130), 130);
}

// The estimate for backward is compared with the allocator's peak, without the returned gradients.
TEST(AttentionBytes, EqualTheBytesThatBackwardHolds) {
  install_cpu_allocator();
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const bool bf16 = type == at::kBFloat16;
    if (!has_tiles(type) || copies_to_fp32(type)) continue;
    const DeviceKernels kernels = of(bf16 ? Kind::kBf16Tiles : Kind::kTiles, at::get_num_threads());
    for (const int64_t head_dim : {64, 40})
      for (const int64_t stack : {0, 100})
        for (const int64_t tokens : {30, 200}) {
          SCOPED_TRACE(testing::Message() << tokens << " tokens, stack " << stack << (bf16 ? " bf16" : ""));
          const auto c = random_attention_case({stack, tokens, 8, 2, head_dim}, type, 1);
          const auto out = tree_attention_forward(c.in);
          const int64_t before = cpu_allocated_bytes();
          reset_cpu_peak_bytes();
          const auto d = tree_attention_backward(c.in, out, c.d_o, c.d_k_stack, c.d_v_stack);
          const auto gradients =
              static_cast<int64_t>(d.d_q_TNH.nbytes() + d.d_k_TGH.nbytes() + d.d_v_TGH.nbytes());
          EXPECT_EQ(tree_attention_bytes(kernels, {bf16 ? 2 : 4, 4}, {8, 2, head_dim}, tokens, stack),
                    cpu_peak_bytes() - before - gradients);
        }
  }
}

}  // namespace
}  // namespace bough
