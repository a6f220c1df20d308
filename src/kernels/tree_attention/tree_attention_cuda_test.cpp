#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"
#include "kernels/tree_attention/random_case.h"
#include "kernels/tree_attention/tree_attention_segments.h"

namespace bough {
namespace {

using CudaTreeAttention = OnCuda;

// d_q and d_k sum p (d_o·v - D) · scale times a key or a query. The terms d_o·v and D are of order 1 with
// rounding errors. Their difference may be small, and is 0 if a query sees a single key. The tolerance is
// therefore relative to at least 1.
void expect_score_gradient(const at::Tensor& got, const at::Tensor& expected, at::ScalarType type) {
  const double largest = std::max(1.0, expected.abs().max().item<double>());
  EXPECT_LE((got.to(at::kDouble) - expected).abs().max().item<double>(), tolerance(type) * largest);
}

// Compares attention with the reference's dense softmax in fp64, on the device.
void check_tree_attention(const AttentionCase& c, at::ScalarType type, unsigned seed) {
  SCOPED_TRACE(testing::Message() << c.num_stack << " + " << c.num_tokens << " tokens, " << c.num_heads
                                  << " heads of " << c.head_dim << " in " << c.num_groups << " groups, "
                                  << c10::toString(type));
  const auto host = random_attention_case(c, type, seed);
  const std::span<const int32_t> end_local(host.in.end_local.data_ptr<int32_t>(),
                                           static_cast<size_t>(host.in.end_local.numel()));
  const KeyEnds ends = upload_key_ends(end_local, c.num_stack, at::kCUDA);
  const auto input = [&](at::ScalarType as) {
    const auto move = [&](const at::Tensor& x) { return on_gpu(x).to(as); };
    return TreeAttentionInput{
        move(host.in.q_TNH),       move(host.in.k_TGH), move(host.in.v_TGH), move(host.in.k_stack_PGH),
        move(host.in.v_stack_PGH), ends.end_local,      host.in.scale,       ends.spans};
  };
  const auto in = input(type), in_fp64 = input(at::kDouble);
  const auto d_o = on_gpu(host.d_o), d_k_stack = on_gpu(host.d_k_stack), d_v_stack = on_gpu(host.d_v_stack);
  const auto expected = tree_attention_forward_reference(in_fp64);
  const auto d_k_expected = d_k_stack.to(at::kDouble, false, true),
             d_v_expected = d_v_stack.to(at::kDouble, false, true);
  const auto d_expected =
      tree_attention_backward_reference(in_fp64, expected, d_o.to(at::kDouble), d_k_expected, d_v_expected);
  TreeAttentionOutput out[2];
  TreeAttentionGradient d[2];
  at::Tensor d_k[2], d_v[2];
  for (int run = 0; run < 2; ++run) {
    out[run] = tree_attention_forward(in);
    d_k[run] = d_k_stack.clone();
    d_v[run] = d_v_stack.clone();
    d[run] = tree_attention_backward(in, out[run], d_o, d_k[run], d_v[run]);
  }
  EXPECT_CLOSE(out[0].o_TNH, expected.o_TNH, type);
  EXPECT_CLOSE(out[0].lse_TN, expected.lse_TN, accumulator_type(type));
  expect_score_gradient(d[0].d_q_TNH, d_expected.d_q_TNH, type);
  expect_score_gradient(d[0].d_k_TGH, d_expected.d_k_TGH, type);
  EXPECT_CLOSE(d[0].d_v_TGH, d_expected.d_v_TGH, type);
  EXPECT_CLOSE(d_k[0], d_k_expected, type);
  EXPECT_CLOSE(d_v[0], d_v_expected, type);
  EXPECT_SAME_BITS(out[0].o_TNH, out[1].o_TNH);
  EXPECT_SAME_BITS(out[0].lse_TN, out[1].lse_TN);
  EXPECT_SAME_BITS(d[0].d_q_TNH, d[1].d_q_TNH);
  EXPECT_SAME_BITS(d[0].d_k_TGH, d[1].d_k_TGH);
  EXPECT_SAME_BITS(d[0].d_v_TGH, d[1].d_v_TGH);
  EXPECT_SAME_BITS(d_k[0], d_k[1]);
  EXPECT_SAME_BITS(d_v[0], d_v[1]);
}

TEST_F(CudaTreeAttention, MatchesTheReferenceInFp64) {
  unsigned seed = 1;
  for (const auto type : kFloatTypes)
    for (const AttentionCase& c :
         {AttentionCase{0, 1, 2, 1, 8}, AttentionCase{1, 1, 2, 1, 8}, AttentionCase{5, 1, 4, 2, 16},
          AttentionCase{0, 70, 4, 4, 32}, AttentionCase{300, 40, 4, 2, 64}, AttentionCase{130, 300, 6, 2, 64},
          AttentionCase{17, 129, 8, 1, 128}, AttentionCase{64, 64, 2, 2, 128},  // whole tiles
          AttentionCase{63, 65, 2, 1, 64},                                      // one row less, one row more
          AttentionCase{90, 77, 4, 2, 80},                                      // narrower than a tile's rows
          AttentionCase{90, 77, 3, 1, 5},                                       // no 16-byte packs
          AttentionCase{40, 100, 2, 1, 256}, AttentionCase{130, 65, 4, 2, 256},
          AttentionCase{63, 97, 2, 2, 136}, AttentionCase{10, 20, 2, 1, 260}})  // too wide for the kernels
      check_tree_attention(c, type, ++seed);
}

TEST_F(CudaTreeAttention, MatchesTheReferenceInFp64OnLongPasses) {
  for (const auto type : kFloatTypes) check_tree_attention({200, 1000, 4, 2, 128}, type, 50);
  // These queries are enough for thread blocks of 8 warps in the forward kernel, on every existing GPU.
  for (const int64_t head_dim : {64, 128, 256})
    check_tree_attention({200, 2300, 16, 4, head_dim}, at::kBFloat16, 99);
}

// Key 1 has weight 1 and value -w, key 0 has weight and value w and 1, where w is exp(-1.1) in bf16. The
// tensor cores round weights to bf16, so their sum is 0. In plain arithmetic the weight has more digits.
TEST_F(CudaTreeAttention, Bf16HeadsOfAllWidthsRunOnTheTensorCores) {
  for (const int64_t head_dim : {8, 64, 128, 136, 256}) {
    const auto zeros = [&](int64_t rows) { return at::zeros({rows, 1, head_dim}, at::kBFloat16); };
    const at::Tensor q = zeros(2), k = zeros(2), v = zeros(2);
    q.fill_(1 / static_cast<double>(head_dim));
    k[0].fill_(-1.1);
    const double score = (q[0] * k[0]).to(at::kDouble).sum().item<double>();
    v[0].fill_(1);
    v[1].fill_(-std::exp(score));
    const KeyEnds ends = upload_key_ends(std::vector<int32_t>{2, 2}, 0, at::kCUDA);
    const TreeAttentionInput in{on_gpu(q),        on_gpu(k),      on_gpu(v), on_gpu(zeros(0)),
                                on_gpu(zeros(0)), ends.end_local, 1.0,       ends.spans};
    EXPECT_EQ(tree_attention_forward(in).o_TNH[1].abs().max().item<double>(), 0) << head_dim;
  }
}

// libtorch's FlashAttention-2 computes the runs (tree_attention_segments.h), and our kernel the other
// segments. The error against fp64 may be at most 1.5 times that of our kernel alone.
TEST_F(CudaTreeAttention, BySegmentsHasASimilarError) {
  unsigned seed = 900;
  for (const AttentionCase& c : {AttentionCase{0, 600, 4, 2, 128}, AttentionCase{700, 1300, 8, 2, 128},
                                 AttentionCase{33, 900, 4, 4, 64}, AttentionCase{512, 1024, 4, 1, 80}}) {
    ++seed;
    const auto host = random_attention_case(c, at::kBFloat16, seed);
    // Long chains: every end lies in the last part of the pass.
    std::vector<int32_t> ends(static_cast<size_t>(c.num_stack + c.num_tokens));
    for (int64_t j = 0; j < c.num_stack; ++j)
      ends[static_cast<size_t>(j)] =
          static_cast<int32_t>(j < c.num_stack / 2 ? c.num_tokens : c.num_tokens - 40);
    for (int64_t i = 0; i < c.num_tokens; ++i)
      ends[static_cast<size_t>(c.num_stack + i)] =
          static_cast<int32_t>(i < c.num_tokens - 40 ? c.num_tokens - 40 : c.num_tokens);
    const KeyEnds key_ends = upload_key_ends(ends, c.num_stack, at::kCUDA);
    auto segments = cut_into_segments(ends, c.num_stack);
    upload_segments(segments, at::kCUDA);
    ASSERT_EQ(segments.size(), 2U);
    const auto input = [&](at::ScalarType type) {
      const auto move = [&](const at::Tensor& x) { return on_gpu(x).to(type); };
      return TreeAttentionInput{
          move(host.in.q_TNH),       move(host.in.k_TGH), move(host.in.v_TGH), move(host.in.k_stack_PGH),
          move(host.in.v_stack_PGH), key_ends.end_local,  host.in.scale,       key_ends.spans};
    };
    const auto in = input(at::kBFloat16), exact = input(at::kDouble);
    const at::Tensor d_o = on_gpu(host.d_o);
    const auto zeros = [&](at::ScalarType type) {
      return at::zeros(in.k_stack_PGH.sizes(), in.k_stack_PGH.options().dtype(type));
    };
    const auto expected = tree_attention_forward_reference(exact);
    const at::Tensor d_k_expected = zeros(at::kDouble), d_v_expected = zeros(at::kDouble);
    const auto d_expected =
        tree_attention_backward_reference(exact, expected, d_o.to(at::kDouble), d_k_expected, d_v_expected);
    const auto own = tree_attention_forward(in);
    const at::Tensor d_k_own = zeros(at::kFloat), d_v_own = zeros(at::kFloat);
    const auto d_own = tree_attention_backward(in, own, d_o, d_k_own, d_v_own);
    TreeAttentionOutput out[2];
    TreeAttentionGradient d[2];
    at::Tensor d_k[2], d_v[2];
    for (int run = 0; run < 2; ++run) {
      out[run] = tree_attention_forward_by_segments(in, segments);
      d_k[run] = zeros(at::kFloat);
      d_v[run] = zeros(at::kFloat);
      d[run] = tree_attention_backward_by_segments(in, out[run], d_o, d_k[run], d_v[run], segments);
    }
    const auto no_worse = [](const at::Tensor& got, const at::Tensor& own_got, const at::Tensor& want) {
      const auto error = [&](const at::Tensor& x) {
        return x.to(at::kDouble).sub(want).norm().item<double>();
      };
      EXPECT_LE(error(got), 1.5 * error(own_got) + 1e-6 * want.norm().item<double>());
    };
    no_worse(out[0].o_TNH, own.o_TNH, expected.o_TNH);
    EXPECT_CLOSE(out[0].lse_TN, expected.lse_TN, at::kFloat);
    no_worse(d[0].d_q_TNH, d_own.d_q_TNH, d_expected.d_q_TNH);
    // A run's gradients of keys are rounded one time more than those of our kernel.
    EXPECT_CLOSE(d[0].d_k_TGH, d_expected.d_k_TGH, at::kBFloat16);
    EXPECT_CLOSE(d[0].d_v_TGH, d_expected.d_v_TGH, at::kBFloat16);
    EXPECT_CLOSE(d_k[0], d_k_expected, at::kBFloat16);
    EXPECT_CLOSE(d_v[0], d_v_expected, at::kBFloat16);
    EXPECT_SAME_BITS(out[0].o_TNH, out[1].o_TNH);
    // FlashAttention-2 adds d_q with atomics, so its last bits may differ (vendor_attends_runs()).
    EXPECT_SAME_BITS(d[0].d_k_TGH, d[1].d_k_TGH);
    EXPECT_SAME_BITS(d_k[0], d_k[1]);
  }
}

BOUGH_HAS_CUDA_KERNELS(TreeAttention, "tree_attention_forward", "tree_attention_backward")

}  // namespace
}  // namespace bough
