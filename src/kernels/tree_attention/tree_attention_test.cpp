#include "base/error.h"

#include "kernels/common/kernel_test.h"
#include "kernels/common/op.h"
#include "kernels/tree_attention/key_spans.h"
#include "kernels/tree_attention/random_case.h"
#include "kernels/tree_attention/tree_attention_paged.h"
#include "kernels/tree_attention/tree_attention_segments.h"

namespace bough {
namespace {

TEST(TreeAttention, MatchesReferenceInEveryDtype) {
  unsigned seed = 1;
  for (const auto type : kFloatTypes)
    for (const AttentionCase& c :
         {AttentionCase{0, 1, 2, 1, 8}, AttentionCase{5, 1, 4, 2, 16}, AttentionCase{0, 70, 4, 4, 32},
          AttentionCase{300, 40, 4, 2, 64}, AttentionCase{130, 300, 6, 2, 64},
          AttentionCase{17, 129, 8, 1, 128}, AttentionCase{300, 290, 3, 1, 40}}) {
      auto r = random_attention_case(c, type, ++seed);
      const auto out = tree_attention_forward(r.in);
      const auto expected = tree_attention_forward_reference(r.in);
      EXPECT_CLOSE(out.o_TNH, expected.o_TNH, type);
      EXPECT_CLOSE(out.lse_TN, expected.lse_TN, type);
      auto d_k_stack = r.d_k_stack.clone(), d_v_stack = r.d_v_stack.clone();
      const auto d = tree_attention_backward(r.in, out, r.d_o, r.d_k_stack, r.d_v_stack);
      const auto d_expected = tree_attention_backward_reference(r.in, expected, r.d_o, d_k_stack, d_v_stack);
      EXPECT_CLOSE(d.d_q_TNH, d_expected.d_q_TNH, type);
      EXPECT_CLOSE(d.d_k_TGH, d_expected.d_k_TGH, type);
      EXPECT_CLOSE(d.d_v_TGH, d_expected.d_v_TGH, type);
      EXPECT_CLOSE(r.d_k_stack, d_k_stack, type);
      EXPECT_CLOSE(r.d_v_stack, d_v_stack, type);
    }
}

// Later keys have scores far above those of the first keys, so the running maxima rise. The first visible key
// differs between the queries of one block of 32.
TEST(TreeAttention, ScoresThatGrowAlongThePath) {
  for (const auto type : kFloatTypes) {
    auto r = random_attention_case({300, 400, 4, 2, 64}, type, 31);
    for (const auto& [k, first] : {std::pair{r.in.k_stack_PGH, 270}, std::pair{r.in.k_TGH, 200}})
      k.narrow(0, first, k.size(0) - first).mul_(20);
    const auto out = tree_attention_forward(r.in);
    const auto expected = tree_attention_forward_reference(r.in);
    EXPECT_CLOSE(out.o_TNH, expected.o_TNH, type);
    EXPECT_CLOSE(out.lse_TN, expected.lse_TN, type);
  }
}

// The reference is compared with autograd of a softmax over explicitly listed visible keys.
TEST(TreeAttention, ReferenceIsSoftmaxOverVisibleKeysAndItsDerivative) {
  auto r = random_attention_case({6, 9, 4, 2, 4}, at::kDouble, 77);
  const auto keys = at::cat({r.in.k_stack_PGH, r.in.k_TGH}).requires_grad_(true);
  const auto values = at::cat({r.in.v_stack_PGH, r.in.v_TGH}).requires_grad_(true);
  const auto q = r.in.q_TNH.clone().requires_grad_(true);
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < 9; ++i)
    for (int64_t n = 0; n < 4; ++n) {
      std::vector<int64_t> visible;
      for (int64_t j = 0; j < 15; ++j)
        if (j - 6 <= i && i < r.in.end_local[j].item<int>()) visible.push_back(j);
      const auto index = at::tensor(visible, at::kLong);
      const auto scores = at::mv(keys.index_select(0, index).select(1, n / 2), q[i][n]) * r.in.scale;
      rows.push_back(at::mv(values.index_select(0, index).select(1, n / 2).t(), scores.softmax(0)));
    }
  const auto o = at::stack(rows).view({9, 4, 4});
  o.backward(r.d_o);
  const auto out = tree_attention_forward_reference(r.in);
  EXPECT_CLOSE(out.o_TNH, o, at::kDouble);
  auto d_k_stack = at::zeros_like(r.d_k_stack), d_v_stack = at::zeros_like(r.d_v_stack);
  const auto d = tree_attention_backward_reference(r.in, out, r.d_o, d_k_stack, d_v_stack);
  EXPECT_CLOSE(d.d_q_TNH, q.grad(), at::kDouble);
  EXPECT_CLOSE(at::cat({d_k_stack, d.d_k_TGH}), keys.grad(), at::kDouble);
  EXPECT_CLOSE(at::cat({d_v_stack, d.d_v_TGH}), values.grad(), at::kDouble);
}

std::vector<int32_t> ends_of(const TreeAttentionInput& in) {
  return {in.end_local.data_ptr<int32_t>(), in.end_local.data_ptr<int32_t>() + in.end_local.numel()};
}

// The GPU kernels use the smallest and largest end of a tile to find out whether a query sees all keys of the
// tile, some or none.
TEST(TreeAttention, KeySpansHoldTheLeastAndLargestEndOfEachTile) {
  std::mt19937 random(6);
  for (int round = 0; round < 200; ++round) {
    const int64_t num_stack = random() % 300, num_tokens = 1 + random() % 300;
    const auto ends = random_ends(num_stack, num_tokens, random);
    const auto spans = key_spans(ends, num_stack);
    ASSERT_EQ(std::ssize(spans), key_spans_size(num_stack, num_tokens));
    for (const int64_t size : {kPlainTile, kTensorTile}) {
      const int32_t* span = spans.data() + key_spans_begin(num_stack, num_tokens, size);
      for (const auto& [first, last] :
           {std::pair{int64_t{0}, num_stack}, {num_stack, num_stack + num_tokens}})
        for (int64_t begin = first; begin < last; begin += size, span += 2) {
          int32_t least = INT32_MAX, largest = 0;
          for (int64_t j = begin; j < begin + size; ++j) {
            const int32_t end = j < last ? ends[static_cast<size_t>(j)] : 0;
            least = std::min(least, end);
            largest = std::max(largest, end);
          }
          ASSERT_EQ(span[0], least) << "keys from " << begin << " of tiles of " << size;
          ASSERT_EQ(span[1], largest) << "keys from " << begin << " of tiles of " << size;
        }
      ASSERT_EQ(span - spans.data(),
                size == kPlainTile ? key_spans_begin(num_stack, num_tokens, kTensorTile) : std::ssize(spans));
    }
    const at::Tensor by_op = find_op<at::Tensor(const at::Tensor&, int64_t)>("bough::key_spans")
                                 .call(at::tensor(ends, at::kInt), num_stack);
    ASSERT_TRUE(by_op.equal(at::tensor(spans, at::kInt)));
  }
}

TEST(TreeAttention, ARunSeesAllKeysOfItsPathAndSegmentsCoverThePass) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const int64_t num_stack = random() % 40, num_tokens = 1 + random() % 120, least_run = 1 + random() % 20;
    const auto ends = random_ends(num_stack, num_tokens, random);
    const auto sees = [&](int64_t i, int64_t j) {
      return j - num_stack <= i && i < ends[static_cast<size_t>(j)];
    };
    const auto segments = cut_into_segments(ends, num_stack, least_run);
    int64_t next = 0;
    for (const QuerySegment& segment : segments) {
      ASSERT_EQ(segment.begin, next);
      next = segment.end;
      std::vector<int> among(static_cast<size_t>(num_stack + num_tokens));
      for (const auto& [begin, end] : segment.earlier)
        for (int64_t j = begin; j < end; ++j) among[static_cast<size_t>(j)] = 1;
      EXPECT_TRUE(!segment.is_run || segment.end - segment.begin >= least_run);
      for (int64_t i = segment.begin; i < segment.end; ++i) {
        for (int64_t j = 0; j < num_stack + segment.begin; ++j)
          ASSERT_TRUE(sees(i, j) == (among[static_cast<size_t>(j)] == 1) || (!segment.is_run && !sees(i, j)));
        for (int64_t j = segment.begin; j <= i && segment.is_run; ++j) ASSERT_TRUE(sees(i, num_stack + j));
      }
    }
    EXPECT_TRUE(segments.empty() || next == num_tokens);
    EXPECT_TRUE(least_run > 1 || !segments.empty());
  }
}

TEST(TreeAttention, TheVendorsKernelIsLeftOutWhereSameBitsAreWanted) {
  const at::Device gpu(at::kCUDA);
  EXPECT_TRUE(vendor_attends_runs(gpu, at::kBFloat16, 128, /*same_bits=*/false));
  EXPECT_FALSE(vendor_attends_runs(gpu, at::kBFloat16, 128, /*same_bits=*/true));
  EXPECT_FALSE(vendor_attends_runs(at::kCPU, at::kBFloat16, 128, /*same_bits=*/false));
}

TEST(TreeAttention, BySegmentsMatchesReference) {
  unsigned seed = 400;
  int num_runs = 0, num_others = 0;
  for (const AttentionCase& c : {AttentionCase{0, 70, 4, 4, 32}, AttentionCase{300, 140, 4, 2, 64},
                                 AttentionCase{130, 300, 6, 2, 16}, AttentionCase{17, 129, 8, 1, 128}})
    for (const int64_t least_run : {1, 6, 20}) {
      auto r = random_attention_case(c, at::kDouble, ++seed);
      auto segments = cut_into_segments(ends_of(r.in), c.num_stack, least_run);
      upload_segments(segments, at::kCPU);
      for (const QuerySegment& segment : segments) ++(segment.is_run ? num_runs : num_others);
      if (segments.empty()) continue;
      const auto out = tree_attention_forward_by_segments(r.in, segments);
      const auto expected = tree_attention_forward_reference(r.in);
      EXPECT_CLOSE(out.o_TNH, expected.o_TNH, at::kDouble);
      EXPECT_CLOSE(out.lse_TN, expected.lse_TN, at::kDouble);
      auto d_k_stack = r.d_k_stack.clone(), d_v_stack = r.d_v_stack.clone();
      const auto d =
          tree_attention_backward_by_segments(r.in, out, r.d_o, r.d_k_stack, r.d_v_stack, segments);
      const auto d_expected = tree_attention_backward_reference(r.in, expected, r.d_o, d_k_stack, d_v_stack);
      EXPECT_CLOSE(d.d_q_TNH, d_expected.d_q_TNH, at::kDouble);
      EXPECT_CLOSE(d.d_k_TGH, d_expected.d_k_TGH, at::kDouble);
      EXPECT_CLOSE(d.d_v_TGH, d_expected.d_v_TGH, at::kDouble);
      EXPECT_CLOSE(r.d_k_stack, d_k_stack, at::kDouble);
      EXPECT_CLOSE(r.d_v_stack, d_v_stack, at::kDouble);
    }
  EXPECT_GT(num_runs, 10);
  EXPECT_GT(num_others, 10);
}

TEST(TreeAttention, WrongShapesAreNamed) {
  auto r = random_attention_case({6, 9, 4, 2, 4}, at::kFloat, 3);
  r.in.end_local = r.in.end_local.narrow(0, 0, 14);
  EXPECT_THROW(tree_attention_forward(r.in), InternalError);
}

TEST(TreeAttention, PagedMatchesReferenceAndDoesNotDependOnThePlan) {
  unsigned seed = 200;
  for (const auto type : kFloatTypes)
    for (const AttentionCase& c : {AttentionCase{0, 1, 2, 1, 8}, AttentionCase{5, 1, 4, 2, 16},
                                   AttentionCase{0, 70, 4, 4, 32}, AttentionCase{300, 40, 4, 2, 64},
                                   AttentionCase{130, 300, 6, 2, 20}, AttentionCase{17, 129, 8, 1, 7}}) {
      const auto r = random_attention_case(c, type, ++seed);
      const auto& in = r.in;
      const auto out = tree_attention_forward_paged(in, TreePages(in.end_local, c.num_stack, c.num_groups));
      const auto expected = tree_attention_forward_reference(in);
      EXPECT_CLOSE(out.o_TNH, expected.o_TNH, type);
      EXPECT_CLOSE(out.lse_TN, expected.lse_TN, type);
      // A token and its path, computed alone with all keys in the pass and an empty stack, give the same
      // bits.
      const auto k = at::cat({in.k_stack_PGH, in.k_TGH}), v = at::cat({in.v_stack_PGH, in.v_TGH});
      for (int64_t i = 0; i < c.num_tokens; i += 7) {
        std::vector<int64_t> path;
        for (int64_t j = 0; j <= c.num_stack + i; ++j)
          if (i < in.end_local[j].item<int>()) path.push_back(j);
        const auto index = at::tensor(path, at::kLong);
        const auto length = static_cast<int64_t>(path.size());
        const auto none = at::empty({0, c.num_groups, c.head_dim}, k.options());
        const TreeAttentionInput alone{in.q_TNH[i].expand({length, -1, -1}).contiguous(),
                                       k.index_select(0, index),
                                       v.index_select(0, index),
                                       none,
                                       none,
                                       at::full({length}, length, at::kInt),
                                       in.scale};
        const auto got = tree_attention_forward_paged(alone, TreePages(alone.end_local, 0, c.num_groups));
        ASSERT_TRUE(at::equal(got.o_TNH[length - 1], out.o_TNH[i])) << "query " << i << ", " << type;
        ASSERT_TRUE(at::equal(got.lse_TN[length - 1], out.lse_TN[i])) << "query " << i << ", " << type;
      }
    }
}

}  // namespace
}  // namespace bough
