#include "kernels/tree_attention/tree_attention.h"

#include <random>

#include "base/error.h"

#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

// A pass of random forests below a stack of P keys: parents are drawn so that long chains and wide branching both
// occur; each root of the pass hangs off a random stack token.
std::vector<int32_t> random_ends(int64_t num_stack, int64_t num_tokens, std::mt19937& random) {
  std::vector<int32_t> end(num_stack + num_tokens, static_cast<int32_t>(num_tokens));
  std::vector<int64_t> open;  // tokens whose subtree is still open
  int64_t stack_visible = num_stack;
  for (int64_t i = 0; i < num_tokens; ++i) {
    while (!open.empty() && random() % 16 == 0) {
      end[num_stack + open.back()] = static_cast<int32_t>(i);
      open.pop_back();
    }
    if (open.empty() && i > 0 && stack_visible > 0) {  // a new root hangs off an earlier stack token
      const int64_t visible = random() % (stack_visible + 1);
      for (int64_t j = visible; j < stack_visible; ++j) end[j] = static_cast<int32_t>(i);
      stack_visible = visible;
    }
    open.push_back(i);
  }
  return end;
}

struct Case {
  int64_t num_stack, num_tokens, num_heads, num_groups, head_dim;
};

struct Random {
  TreeAttentionInput in;
  at::Tensor d_o, d_k_stack, d_v_stack;
};

Random random_case(const Case& c, at::ScalarType type, unsigned seed) {
  std::mt19937 random(seed);
  const auto ends = random_ends(c.num_stack, c.num_tokens, random);
  const auto tensor = [&](at::IntArrayRef sizes, uint64_t s) {
    return random_tensor(sizes, type, seed * 10 + s);
  };
  Random r;
  r.in = {tensor({c.num_tokens, c.num_heads, c.head_dim}, 1),
          tensor({c.num_tokens, c.num_groups, c.head_dim}, 2),
          tensor({c.num_tokens, c.num_groups, c.head_dim}, 3),
          tensor({c.num_stack, c.num_groups, c.head_dim}, 4),
          tensor({c.num_stack, c.num_groups, c.head_dim}, 5),
          at::tensor(ends, at::kInt),
          1 / std::sqrt(double(c.head_dim))};
  r.d_o = tensor({c.num_tokens, c.num_heads, c.head_dim}, 6);
  r.d_k_stack = random_tensor(r.in.k_stack_PGH.sizes(), accumulator_type(type), 7);
  r.d_v_stack = random_tensor(r.in.k_stack_PGH.sizes(), accumulator_type(type), 8);
  return r;
}

TEST(TreeAttention, MatchesReferenceInEveryDtype) {
  unsigned seed = 1;
  for (const auto type : kFloatTypes)
    for (const Case& c : {Case{0, 1, 2, 1, 8}, Case{5, 1, 4, 2, 16}, Case{0, 70, 4, 4, 32},
                          Case{300, 40, 4, 2, 64}, Case{130, 300, 6, 2, 64}, Case{17, 129, 8, 1, 128}}) {
      auto r = random_case(c, type, ++seed);
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

// The reference against autograd of a softmax over explicitly listed visible keys.
TEST(TreeAttention, ReferenceIsSoftmaxOverVisibleKeysAndItsDerivative) {
  auto r = random_case({6, 9, 4, 2, 4}, at::kDouble, 77);
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

TEST(TreeAttention, WrongShapesAreNamed) {
  auto r = random_case({6, 9, 4, 2, 4}, at::kFloat, 3);
  r.in.end_local = r.in.end_local.narrow(0, 0, 14);
  EXPECT_THROW(tree_attention_forward(r.in), InternalError);
}

}  // namespace
}  // namespace bough
