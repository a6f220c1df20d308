// Compares every op of libbough_cuda.so with its reference, in every dtype, on a GPU. The tests are skipped
// if there is no GPU. page_choice_test.cpp, paged_attention_test.cpp and rollout/sampler_test.cpp test the
// ops of generation.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <limits>
#include <vector>

#include "kernels/adamw/adamw.h"
#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"
#include "kernels/embedding/embedding.h"
#include "kernels/log_prob/log_prob.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary.h"
#include "kernels/quantized_product/quantized_product.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/swiglu/swiglu.h"
#include "kernels/tree_attention/random_case.h"
#include "kernels/tree_attention/tree_attention_segments.h"

namespace bough {
namespace {

// Two runs on the same input must give the same bits, because sums have a fixed order.
#define EXPECT_SAME_BITS(a, b) EXPECT_TRUE((a).equal(b))

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!kCuda->reason().empty()) GTEST_SKIP() << kCuda->reason();
  }
};

at::Tensor on_gpu(const at::Tensor& x) {
  return x.defined() ? x.to(at::kCUDA) : x;
}

Parameter on_gpu(const Parameter& parameter) {
  return {.value = on_gpu(parameter.value), .main_grad = on_gpu(parameter.main_grad), .parts = {}};
}

// Some widths allow 16-byte packs, others do not. Some shapes have fewer rows than the first stage has parts,
// others more. In one shape, the sums of one row do not fit in shared memory.
const std::vector<std::pair<int64_t, int64_t>> kShapes = {{1, 5},     {3, 7},     {65, 64},  {130, 512},
                                                          {9000, 48}, {70, 1023}, {3, 16384}};

TEST_F(Cuda, RmsNorm) {
  for (const auto type : kFloatTypes)
    for (const auto& [rows, width] : kShapes) {
      const double offset = width % 2;  // weight_offset
      const NormSettings norm{1e-6, offset};
      const auto x = random_tensor({rows, width}, type, 1), d_y = random_tensor({rows, width}, type, 3);
      const Parameter weight = random_parameter({width}, type, 2);
      const auto [y, rstd] = rms_norm_forward_reference(x, weight.value, norm);
      auto d_weight = weight.main_grad.clone();
      const auto d_x = rms_norm_backward_reference({d_y, x, weight.value, rstd, {}, d_weight, {}, offset});
      std::vector<at::Tensor> gradients;
      for (int run = 0; run < 2; ++run) {
        const Parameter weight_gpu = on_gpu(weight);
        auto x_gpu = on_gpu(x).requires_grad_(true);
        const auto y_gpu = rms_norm(x_gpu, weight_gpu, norm);
        y_gpu.backward(on_gpu(d_y));
        EXPECT_CLOSE(y_gpu.cpu(), y, type);
        EXPECT_CLOSE(x_gpu.grad().cpu(), d_x, type);
        EXPECT_CLOSE(weight_gpu.main_grad.cpu(), d_weight, type);
        gradients.push_back(weight_gpu.main_grad);
      }
      EXPECT_SAME_BITS(gradients[0], gradients[1]);
      // Backward with a residual also recomputes the output, in d_y's memory.
      const auto residual = random_tensor({rows, width}, type, 4);
      const auto again = on_gpu(d_y);
      const auto d_x_gpu = rms_norm_backward({again, on_gpu(x), on_gpu(weight.value), on_gpu(rstd),
                                              on_gpu(residual), on_gpu(weight.main_grad), again, offset});
      EXPECT_CLOSE(d_x_gpu.cpu(), d_x.to(at::kDouble) + residual.to(at::kDouble), type);
      EXPECT_CLOSE(again.cpu(), y, type);
    }
}

TEST_F(Cuda, Swiglu) {
  for (const auto activation : {GateActivation::kSilu, GateActivation::kGeluTanh})
    for (const auto type : kFloatTypes)
      for (const auto& [rows, width] : kShapes) {
        const auto x = random_tensor({rows, 2 * width}, type, 1) * 5,
                   d_y = random_tensor({rows, width}, type, 2);
        const auto y = at::empty_like(d_y), d_x = at::empty_like(x);
        swiglu_backward_reference(d_y, x, y, d_x, activation);
        const auto x_gpu = on_gpu(x), d_y_gpu = on_gpu(d_y);
        EXPECT_CLOSE(swiglu_forward(x_gpu, activation).cpu(), y, type);
        swiglu_backward(d_y_gpu, x_gpu, d_y_gpu, x_gpu, activation);
        EXPECT_CLOSE(d_y_gpu.cpu(), y, type);
        EXPECT_CLOSE(x_gpu.cpu(), d_x, type);
      }
}

void check_qk_norm_rotary(at::ScalarType type, const QkvLayout& layout, int64_t num_tokens, bool with_norm,
                          std::optional<int64_t> turned = {}) {
  const NormSettings norm_settings{1e-6, turned ? 1.0 : 0.0};
  using Optional = std::optional<at::Tensor>;
  const int64_t n = layout.num_heads, g = layout.num_kv_heads, h = layout.head_dim;
  const auto rotary = make_rotary_table(at::arange(num_tokens, at::kLong) * 3 + 1, turned.value_or(h), 1e4,
                                        accumulator_type(type));
  const auto qkv = random_tensor({num_tokens, layout.width()}, type, 1);
  const Parameter q_norm = random_parameter({h}, type, 2), k_norm = random_parameter({h}, type, 3);
  const auto norm = [&](const Parameter& p) { return with_norm ? Optional(p.value) : std::nullopt; };
  const auto d_q = random_tensor({num_tokens, n, h}, type, 4),
             d_k = random_tensor({num_tokens, g, h}, type, 5),
             d_v = random_tensor({num_tokens, g, h}, type, 6);
  const auto [q, k, v] = qk_norm_rotary_forward_reference(qkv, rotary.cos, rotary.sin, norm(q_norm),
                                                          norm(k_norm), n, g, norm_settings);
  auto d_q_norm = at::zeros_like(q_norm.main_grad), d_k_norm = at::zeros_like(k_norm.main_grad);
  const auto d_qkv =
      qk_norm_rotary_backward_reference(d_q, d_k, d_v, qkv, rotary.cos, rotary.sin, norm(q_norm),
                                        norm(k_norm), Optional(d_q_norm), Optional(d_k_norm), norm_settings);

  const Parameter q_norm_gpu = on_gpu(q_norm), k_norm_gpu = on_gpu(k_norm);
  auto qkv_gpu = on_gpu(qkv).requires_grad_(true);
  const auto [q_gpu, k_gpu, v_gpu] =
      qk_norm_rotary(qkv_gpu, layout, {on_gpu(rotary.cos), on_gpu(rotary.sin)},
                     with_norm ? &q_norm_gpu : nullptr, with_norm ? &k_norm_gpu : nullptr, norm_settings);
  torch::autograd::backward({q_gpu, k_gpu, v_gpu}, {on_gpu(d_q), on_gpu(d_k), on_gpu(d_v)});
  EXPECT_CLOSE(q_gpu.cpu(), q, type);
  EXPECT_CLOSE(k_gpu.cpu(), k, type);
  EXPECT_CLOSE(v_gpu.cpu(), v, type);
  EXPECT_CLOSE(qkv_gpu.grad().cpu(), d_qkv, type);
  EXPECT_CLOSE(q_norm_gpu.main_grad.cpu(), d_q_norm, type);
  EXPECT_CLOSE(k_norm_gpu.main_grad.cpu(), d_k_norm, type);
}

TEST_F(Cuda, QkNormRotary) {
  for (const auto type : kFloatTypes)
    for (const bool with_norm : {false, true}) {
      check_qk_norm_rotary(type, {4, 2, 16}, 70, with_norm);
      check_qk_norm_rotary(type, {3, 1, 6}, 5, with_norm);       // halves of odd size
      check_qk_norm_rotary(type, {16, 8, 128}, 600, with_norm);  // all parts of the first stage
      check_qk_norm_rotary(type, {2, 1, 1024}, 33, with_norm);   // fewer warps per block
      for (const int64_t turned : {96, 94, 0})  // only a part of each head is rotated, or none
        check_qk_norm_rotary(type, {4, 2, 128}, 70, with_norm, turned);
    }
}

TEST_F(Cuda, LogProb) {
  for (const auto type : kFloatTypes)
    for (const double temperature : {0.7, 1.0, 1.3})
      for (const auto& [rows, width] :
           std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {5, 33}, {40, 4096}, {3, 50001}}) {
        const auto acc = accumulator_type(type);
        const auto logits = random_tensor({rows, width}, type, 5);
        const auto labels = (at::arange(rows, at::kLong) * 7 + 3).remainder(width);
        const auto d_log_probs = random_tensor({rows}, acc, 6), d_entropies = random_tensor({rows}, acc, 7);
        const auto expected = log_prob_forward_reference(logits, labels, temperature);
        const auto d_expected = logits.clone();
        log_prob_backward_reference_(d_expected, labels, expected, d_log_probs, d_entropies, temperature);
        const auto d_gpu = on_gpu(logits), labels_gpu = on_gpu(labels);
        const auto out = log_prob_forward(d_gpu, labels_gpu, temperature);
        EXPECT_CLOSE(out.log_probs_R.cpu(), expected.log_probs_R, acc);
        EXPECT_CLOSE(out.lse_R.cpu(), expected.lse_R, acc);
        EXPECT_CLOSE(out.entropies_R.cpu(), expected.entropies_R, acc);
        EXPECT_SAME_BITS(log_prob_forward(d_gpu, labels_gpu, temperature).lse_R, out.lse_R);
        log_prob_backward_(d_gpu, labels_gpu, out, on_gpu(d_log_probs), on_gpu(d_entropies), temperature);
        EXPECT_CLOSE(d_gpu.cpu(), d_expected, type);
      }
}

TEST_F(Cuda, ConfidentAndHopelessRowsStayFinite) {
  const auto logits = on_gpu(at::tensor({100.0f, -100.0f, 0.0f, -100.0f, 100.0f, 0.0f}).view({2, 3}));
  const auto labels = on_gpu(at::zeros({2}, at::kLong)), ones = on_gpu(at::ones({2}));
  const auto out = log_prob_forward(logits, labels, 1.0);
  EXPECT_FLOAT_EQ(out.log_probs_R[0].item<float>(), 0.0f);
  EXPECT_FLOAT_EQ(out.log_probs_R[1].item<float>(), -200.0f);
  log_prob_backward_(logits, labels, out, ones, ones, 1.0);
  EXPECT_TRUE(logits.isfinite().all().item<bool>());
  EXPECT_FLOAT_EQ(logits[1][0].item<float>(), 1.0f);
}

TEST_F(Cuda, EmbeddingGradient) {
  for (const auto type : kFloatTypes)
    for (const auto& [rows, width] : kShapes) {
      // There are few distinct tokens, so many occur often.
      const auto tokens = at::randint(11, {rows}, at::kLong);
      const auto d_y = random_tensor({rows, width}, type, 1);
      const auto start = random_tensor({11, width}, accumulator_type(type), 2), expected = start.clone();
      add_embedding_gradient_reference_(expected, tokens, d_y);
      std::vector<at::Tensor> sums;
      for (int run = 0; run < 2; ++run) {
        sums.push_back(start.to(at::kCUDA));
        add_embedding_gradient_(sums.back(), on_gpu(tokens), on_gpu(d_y));
        EXPECT_CLOSE(sums.back().cpu(), expected, accumulator_type(type));
      }
      EXPECT_SAME_BITS(sums[0], sums[1]);
    }
}

TEST_F(Cuda, SumOfSquares) {
  for (const auto type : kFloatTypes)
    for (const int64_t size :
         {int64_t{0}, int64_t{1}, int64_t{37}, kSumOfSquaresBlock, 3 * kSumOfSquaresBlock + 5,
          1100 * kSumOfSquaresBlock}) {  // more parts than the last block has threads
      const auto x = random_tensor({size}, type, 7);
      const auto sum = sum_of_squares(on_gpu(x));
      EXPECT_NEAR(sum.item<double>(), sum_of_squares_reference(x).item<double>(),
                  1e-13 * static_cast<double>(size));
      EXPECT_SAME_BITS(sum_of_squares(on_gpu(x)), sum);
    }
}

TEST_F(Cuda, Adamw) {
  constexpr AdamwStep kStep{.lr = 0.01,
                            .beta1 = 0.9,
                            .beta2 = 0.99,
                            .eps = 1e-8,
                            .weight_decay = 0.1,
                            .gradient_scale = 0.7,
                            .step = 3};
  for (const auto type : kFloatTypes)
    for (const int64_t size : {1, 17, 40'000}) {
      const auto acc = accumulator_type(type);
      const AdamwState expected{.value = random_tensor({size}, type, 1),
                                .master = type == acc ? at::Tensor() : random_tensor({size}, acc, 1),
                                .exp_avg = random_tensor({size}, acc, 2),
                                .exp_avg_sq = random_tensor({size}, acc, 3).square(),
                                .gradient = random_tensor({size}, acc, 4)};
      const AdamwState got{on_gpu(expected.value), on_gpu(expected.master), on_gpu(expected.exp_avg),
                           on_gpu(expected.exp_avg_sq), on_gpu(expected.gradient)};
      adamw_reference(expected, kStep);
      adamw(got, kStep);
      EXPECT_CLOSE(got.exp_avg.cpu(), expected.exp_avg, acc);
      EXPECT_CLOSE(got.exp_avg_sq.cpu(), expected.exp_avg_sq, acc);
      EXPECT_CLOSE(got.value.cpu(), expected.value, type);
      EXPECT_EQ(got.gradient.count_nonzero().item<int64_t>(), 0);
      if (type == acc) continue;
      EXPECT_CLOSE(got.master.cpu(), expected.master, acc);
      EXPECT_TRUE(got.value.equal(got.master.to(type)));
    }
}

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

TEST_F(Cuda, TreeAttention) {
  unsigned seed = 1;
  for (const auto type : kFloatTypes)
    for (const AttentionCase& c :
         {AttentionCase{0, 1, 2, 1, 8}, AttentionCase{1, 1, 2, 1, 8}, AttentionCase{5, 1, 4, 2, 16},
          AttentionCase{0, 70, 4, 4, 32}, AttentionCase{300, 40, 4, 2, 64}, AttentionCase{130, 300, 6, 2, 64},
          AttentionCase{17, 129, 8, 1, 128}, AttentionCase{64, 64, 2, 2, 128},  // whole tiles
          AttentionCase{63, 65, 2, 1, 64},                                      // one row less, one row more
          AttentionCase{200, 1000, 4, 2, 128},
          AttentionCase{90, 77, 4, 2, 80},  // narrower than a tile's rows
          AttentionCase{90, 77, 3, 1, 5},   // no 16-byte packs
          AttentionCase{40, 100, 2, 1, 256}, AttentionCase{10, 20, 2, 1, 260}})  // too wide for the kernels
      check_tree_attention(c, type, ++seed);
  // The queries are enough for the wider blocks of the forward kernel on every existing GPU.
  for (const int64_t head_dim : {64, 128})
    check_tree_attention({200, 2300, 16, 4, head_dim}, at::kBFloat16, 99);
}

// The vendor's kernel computes runs, and our kernel computes the queries between them. The error against fp64
// may be at most 1.5 times that of our kernel alone.
TEST_F(Cuda, TreeAttentionBySegments) {
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
      d[run] = tree_attention_backward_by_segments(in, out[run], d_o, d_k[run], d_v[run], segments, true);
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
    EXPECT_SAME_BITS(d[0].d_q_TNH, d[1].d_q_TNH);
    EXPECT_SAME_BITS(d[0].d_k_TGH, d[1].d_k_TGH);
    EXPECT_SAME_BITS(d_k[0], d_k[1]);
  }
}

TEST_F(Cuda, MatrixProduct) {
  struct Shape {
    int64_t m, n, k;
  };
  for (const auto type : kFloatTypes)
    for (const Shape& shape :
         {Shape{64, 64, 64}, Shape{1, 96, 64}, Shape{33, 31, 32}, Shape{45, 65, 130}, Shape{1, 1, 1},
          Shape{300, 200, 7}, Shape{5, 1000, 96}, Shape{64, 48, 5000}, Shape{3, 4, 0}})
      for (const bool a_turned : {false, true})
        for (const bool b_turned : {false, true}) {
          SCOPED_TRACE(testing::Message() << shape.m << " x " << shape.n << " x " << shape.k
                                          << (a_turned ? " a turned" : "") << (b_turned ? " b turned" : ""));
          const auto a = a_turned ? random_tensor({shape.k, shape.m}, type, 1).t()
                                  : random_tensor({shape.m, shape.k}, type, 1);
          const auto b = b_turned ? random_tensor({shape.n, shape.k}, type, 2).t()
                                  : random_tensor({shape.k, shape.n}, type, 2);
          const auto bias = random_tensor({shape.n}, type, 3);
          const auto c = random_tensor({shape.m, shape.n}, accumulator_type(type), 4);
          const auto product = at::mm(a.to(at::kDouble), b.to(at::kDouble));
          EXPECT_CLOSE(matrix_product(on_gpu(a), on_gpu(b)).cpu(), product, type);
          EXPECT_CLOSE(matrix_product(on_gpu(a), on_gpu(b), on_gpu(bias)).cpu(),
                       product + bias.to(at::kDouble), type);
          const auto residual = random_tensor({shape.m, shape.n}, type, 5);
          EXPECT_CLOSE(matrix_product(on_gpu(a), on_gpu(b), {}, on_gpu(residual)).cpu(),
                       product + residual.to(at::kDouble), type);
          EXPECT_CLOSE(matrix_product(on_gpu(a), on_gpu(b), on_gpu(bias), on_gpu(residual)).cpu(),
                       product + bias.to(at::kDouble) + residual.to(at::kDouble), type);
          const auto c_gpu = on_gpu(c);
          add_matrix_product_(c_gpu, on_gpu(a), on_gpu(b));
          EXPECT_CLOSE(c_gpu.cpu(), product + c.to(at::kDouble), c.scalar_type());
          const auto apart = on_gpu(at::cat({residual, residual}, 1)).narrow(1, 0, shape.n);
          add_matrix_product_(apart, on_gpu(a), on_gpu(b));
          EXPECT_CLOSE(apart.cpu(), product + residual.to(at::kDouble), type);
        }
}

// The shapes have fewer and more rows than the kernel accepts, depths that its warps share unevenly, and
// widths that it does not accept.
TEST_F(Cuda, QuantizedProduct) {
  struct Shape {
    int64_t rows, outputs, inputs;
  };
  for (const auto type : kFloatTypes)
    for (const Shape& shape : {Shape{1, 96, 64}, Shape{1, 1, 16}, Shape{7, 33, 48}, Shape{16, 40, 528},
                               Shape{31, 1000, 1024}, Shape{70, 47, 1536}, Shape{256, 64, 2048},
                               Shape{257, 64, 512}, Shape{5, 31, 33}, Shape{0, 4, 16}, Shape{3, 4, 0}}) {
      SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.outputs << " x " << shape.inputs << ", "
                                      << c10::toString(type));
      const auto w = on_gpu(random_tensor({shape.outputs, shape.inputs}, type, 1));
      const auto weight = at::empty(w.sizes(), w.options().dtype(at::kChar));
      const auto scale = at::empty({shape.outputs}, w.options().dtype(at::kFloat));
      quantize_rows_(weight, scale, w);
      const auto expected_weight = at::empty_like(weight), expected_scale = at::empty_like(scale);
      quantize_rows_reference_(expected_weight, expected_scale, w);
      EXPECT_SAME_BITS(scale, expected_scale);
      EXPECT_TRUE((weight.to(at::kInt) - expected_weight.to(at::kInt)).abs().le(1).all().item<bool>());
      const auto x = on_gpu(random_tensor({shape.rows, shape.inputs}, type, 2));
      const auto bias = on_gpu(random_tensor({shape.outputs}, type, 3));
      const auto residual = on_gpu(random_tensor({shape.rows, shape.outputs}, type, 4));
      const auto product =
          at::mm(x.to(at::kDouble), (weight.to(at::kDouble) * scale.to(at::kDouble).unsqueeze(1)).t());
      const auto all = product + bias.to(at::kDouble) + residual.to(at::kDouble);
      EXPECT_CLOSE(quantized_product(x, weight, scale), product, type);
      const auto got = quantized_product(x, weight, scale, bias, residual);
      EXPECT_CLOSE(got, all, type);
      EXPECT_SAME_BITS(quantized_product(x, weight, scale, bias, residual), got);
    }
}

// One row is all zeros, one has an infinity, and one has a NaN.
TEST_F(Cuda, QuantizedRowsWithoutAScale) {
  auto w = random_tensor({4, 40}, at::kBFloat16, 1);
  w[1].zero_();
  w[2][17] = std::numeric_limits<double>::infinity();
  w[3][39] = std::numeric_limits<double>::quiet_NaN();
  const auto weight = on_gpu(at::empty({4, 40}, at::kChar)), scale = on_gpu(at::empty({4}, at::kFloat));
  quantize_rows_(weight, scale, on_gpu(w));
  EXPECT_EQ(scale[1].item<float>(), 0);
  EXPECT_TRUE(scale.isnan().cpu().equal(at::tensor({false, false, true, true})));
  EXPECT_EQ(weight.narrow(0, 1, 3).count_nonzero().item<int64_t>(), 0);
}

TEST_F(Cuda, AGraphRunsItsWorkAgainAtEachReplay) {
  const auto x = on_gpu(at::zeros({1000})), step = on_gpu(at::ones({1000}));
  const auto graphs = make_device_graphs();
  ASSERT_TRUE(graphs);
  const auto graph = graphs->capture([&] { x.add_(step); });
  EXPECT_EQ(x[999].item<float>(), 1) << "once, to set up";
  step.fill_(10);
  graph->replay();
  graph->replay();
  EXPECT_EQ(x[999].item<float>(), 21);
}

// Engines are created and destroyed like this in one process.
TEST_F(Cuda, GraphsAreRecordedAfterAnotherOwnersAreGone) {
  for (int owner = 0; owner < 3; ++owner) {
    const auto x = on_gpu(at::zeros({1000}));
    const auto graphs = make_device_graphs();
    const auto graph = graphs->capture([&] { x.copy_(x + 1); });
    graph->replay();
    EXPECT_EQ(x[999].item<float>(), 2);
  }
}

// If a tensor was left on the host, the op throws an error that names the tensor. The device does not read
// the tensor.
TEST_F(Cuda, TensorsOfTwoDevicesAreRefused) {
  const auto x = on_gpu(random_tensor({4, 8}, at::kFloat, 1));
  EXPECT_THROW(rms_norm(x, random_parameter({8}, at::kFloat, 2), 1e-6), InternalError);
}

// The test needs no GPU: the library opens, registers its kernels, and reports the missing GPU.
TEST(CudaLibrary, OpensWithoutAGpu) {
  if (find_cuda_library().empty()) GTEST_SKIP() << "libbough_cuda.so was not built";
  try {
    open_cuda_library();
    EXPECT_TRUE(at::hasCUDA());
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("no GPU"), std::string::npos) << error.what();
  }
  for (const char* name : {"rms_norm_forward",       "rms_norm_backward",
                           "swiglu_forward",         "swiglu_backward",
                           "qk_norm_rotary_forward", "qk_norm_rotary_backward",
                           "log_prob_forward",       "log_prob_backward_",
                           "sum_of_squares",         "adamw_",
                           "tree_attention_forward", "tree_attention_backward",
                           "matrix_product",         "add_matrix_product_",
                           "paged_attention_",       "draw_token",
                           "quantize_rows_",         "quantized_product",
                           "summarise_pages_",       "choose_pages"}) {
    const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow((std::string("bough::") + name).c_str(), "");
    EXPECT_TRUE(op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) << name;
  }
}

}  // namespace
}  // namespace bough
