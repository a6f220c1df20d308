#include "kernels/tree_attention/tree_attention_sparse.h"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <limits>

#include "kernels/common/kernel_test.h"
#include "kernels/parameter.h"
#include "kernels/tree_attention/random_case.h"

namespace bough {
namespace {

// Returns [T, P + T] for one key/value head: true if query i sees key j by the definition in
// sparse_policy.h and page_choice.h.
at::Tensor visible_keys(const TreeAttentionInput& in, const std::vector<uint8_t>& is_sampled, int64_t g,
                        const SparsePolicy& policy) {
  const int64_t block_tokens = policy.block_tokens;
  const int64_t P = in.k_stack_PGH.size(0), T = in.q_TNH.size(0), heads = in.q_TNH.size(1) / in.k_TGH.size(1);
  const at::Tensor k_JH = at::cat({in.k_stack_PGH, in.k_TGH}).select(1, g).to(at::kDouble);
  const auto* end = in.end_local.const_data_ptr<int32_t>();
  at::Tensor visible = at::zeros({T, P + T}, at::kBool);
  for (int64_t i = 0; i < T; ++i) {
    std::vector<int64_t> path;
    for (int64_t j = 0; j <= P + i; ++j)
      if (end[j] > i) path.push_back(j);
    const int64_t blocks = (std::ssize(path) + block_tokens - 1) / block_tokens;
    std::vector<bool> kept(static_cast<size_t>(blocks), true);
    if (is_sampled[static_cast<size_t>(i)] != 0 && blocks > policy.budget_blocks) {
      const at::Tensor q_H = in.q_TNH[i].narrow(0, g * heads, heads).to(at::kDouble).mean(0);
      std::vector<std::pair<double, int64_t>> ranked;
      for (int64_t block = policy.first_blocks; block < blocks - policy.last_blocks; ++block) {
        const auto begin = path.begin() + block * block_tokens;
        const at::Tensor keys =
            k_JH.index_select(0, at::tensor(std::vector<int64_t>(begin, begin + block_tokens)));
        const at::Tensor score = policy.summary == BlockSummary::kMean
                                     ? (q_H * keys.mean(0)).sum()
                                     : at::maximum(q_H * keys.amin(0), q_H * keys.amax(0)).sum();
        ranked.emplace_back(-score.item<double>(), block);
      }
      std::sort(ranked.begin(), ranked.end());
      const int64_t chosen = policy.budget_blocks - policy.first_blocks - policy.last_blocks;
      for (auto r = static_cast<size_t>(chosen); r < ranked.size(); ++r)
        kept[static_cast<size_t>(ranked[r].second)] = false;
    }
    for (size_t at = 0; at < path.size(); ++at)
      if (kept[at / static_cast<size_t>(block_tokens)])
        visible.mutable_data_ptr<bool>()[i * (P + T) + path[at]] = true;
  }
  return visible;
}

struct Reference {
  at::Tensor o_TNH, d_q, d_k, d_v, d_k_stack, d_v_stack;
  int64_t hidden = 0;  // keys that dense attention sees and the selection hides
};

Reference reference_of(const RandomAttention& r, const std::vector<uint8_t>& is_sampled,
                       const SparsePolicy& policy) {
  const auto leaf = [](const at::Tensor& x) { return x.detach().to(at::kDouble).requires_grad_(true); };
  const at::Tensor q = leaf(r.in.q_TNH), k = leaf(r.in.k_TGH), v = leaf(r.in.v_TGH),
                   k_stack = leaf(r.in.k_stack_PGH), v_stack = leaf(r.in.v_stack_PGH);
  const at::Tensor keys = at::cat({k_stack, k}), values = at::cat({v_stack, v});
  const int64_t G = k.size(1), heads = q.size(1) / G;
  Reference out;
  std::vector<at::Tensor> heads_o, visible_of_head;
  const at::Tensor all = visible_keys(r.in, std::vector<uint8_t>(is_sampled.size(), 0), 0, policy);
  for (int64_t g = 0; g < G; ++g) {
    visible_of_head.push_back(visible_keys(r.in, is_sampled, g, policy));
    out.hidden += all.sum().item<int64_t>() - visible_of_head.back().sum().item<int64_t>();
  }
  for (int64_t n = 0; n < q.size(1); ++n) {
    const int64_t g = n / heads;
    const at::Tensor& visible = visible_of_head[static_cast<size_t>(g)];
    const at::Tensor scores =
        (at::matmul(q.select(1, n), keys.select(1, g).t()) * r.in.scale)
            .masked_fill(visible.logical_not(), -std::numeric_limits<double>::infinity());
    heads_o.push_back(at::matmul(at::softmax(scores, -1), values.select(1, g)));
  }
  const at::Tensor o = at::stack(heads_o, 1);
  const auto gradients = torch::autograd::grad({o}, {q, k, v, k_stack, v_stack}, {r.d_o.to(at::kDouble)},
                                               std::nullopt, false, true);
  out.o_TNH = o.detach();
  out.d_q = gradients[0];
  out.d_k = gradients[1];
  out.d_v = gradients[2];
  out.d_k_stack = gradients[3];
  out.d_v_stack = gradients[4];
  return out;
}

double largest(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

TEST(SparseTreeAttention, IsSoftmaxOverTheChosenBlocksAndItsDerivative) {
  struct Case {
    AttentionCase shape;
    SparsePolicy policy;
  };
  const auto by_pages = [](BlockSummary summary) {
    return SparsePolicy{.budget_blocks = 5, .summary = summary};
  };
  const auto by_blocks = [](int64_t tokens, int64_t first, int64_t last, int64_t chosen) {
    return SparsePolicy{.budget_blocks = first + last + chosen,
                        .summary = tokens % 3 == 1 ? BlockSummary::kMean : BlockSummary::kMinMax,
                        .block_tokens = tokens,
                        .first_blocks = first,
                        .last_blocks = last};
  };
  const Case cases[] = {{{120, 90, 4, 2, 24}, by_pages(BlockSummary::kMean)},
                        {{0, 260, 3, 3, 16}, by_pages(BlockSummary::kMinMax)},
                        {{201, 70, 6, 1, 40}, by_pages(BlockSummary::kMinMax)},
                        {{33, 220, 4, 2, 32}, by_pages(BlockSummary::kMean)},
                        {{120, 90, 4, 2, 24}, by_blocks(4, 4, 8, 6)},
                        {{37, 220, 3, 3, 16}, by_blocks(8, 1, 1, 5)},
                        {{201, 70, 6, 2, 40}, by_blocks(16, 0, 1, 3)},
                        {{201, 170, 2, 1, 40}, by_blocks(32, 0, 2, 1)},
                        {{133, 280, 4, 2, 32}, by_blocks(64, 1, 1, 1)}};
  unsigned seed = 1;
  for (const auto& [shape, policy] : cases)
    for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
      const RandomAttention r = random_attention_case(shape, type, ++seed);
      std::mt19937 random(seed);
      std::vector<uint8_t> is_sampled;
      for (int64_t i = 0; i < shape.num_tokens; ++i) is_sampled.push_back(random() % 4 != 0);
      const TreePages pages(r.in.end_local, shape.num_stack, shape.num_groups);
      BlockChooser chooser(pages.segments(), is_sampled, policy, shape.num_groups);
      const SparseTreePass pass{pages, chooser};
      const BlockChooser::Lists chosen = choose_in_tree(r.in, fill_pages(r.in, pages), pass);
      const TreeAttentionOutput out =
          tree_attention_forward_sparse(r.in, fill_pages(r.in, pages), pass, chosen);
      const at::Tensor d_k_stack = r.d_k_stack.clone(), d_v_stack = r.d_v_stack.clone();
      const TreeAttentionGradient d =
          tree_attention_backward_sparse(r.in, out, r.d_o, d_k_stack, d_v_stack, pass, chosen);
      if (type == at::kBFloat16) {  // rounding may change the choice if scores are close
        EXPECT_TRUE(d.d_q_TNH.isfinite().all().item<bool>() && d_k_stack.isfinite().all().item<bool>());
        continue;
      }
      const Reference expected = reference_of(r, is_sampled, policy);
      EXPECT_GT(expected.hidden, 1000);
      const double tolerance = type == at::kDouble ? 1e-12 : 2e-4;
      EXPECT_LT(largest(out.o_TNH, expected.o_TNH), tolerance) << seed;
      EXPECT_LT(largest(d.d_q_TNH, expected.d_q), tolerance) << seed;
      EXPECT_LT(largest(d.d_k_TGH, expected.d_k), tolerance) << seed;
      EXPECT_LT(largest(d.d_v_TGH, expected.d_v), tolerance) << seed;
      if (shape.num_stack == 0) continue;
      EXPECT_LT(largest(d_k_stack - r.d_k_stack, expected.d_k_stack), tolerance) << seed;
      EXPECT_LT(largest(d_v_stack - r.d_v_stack, expected.d_v_stack), tolerance) << seed;
    }
}

// Compares bf16 with fp64 for the same inputs and the same selection.
TEST(SparseTreeAttention, Bf16GradientsAreCloseToFp64WithTheSameBlocks) {
  const AttentionCase cases[] = {
      {120, 90, 4, 2, 24}, {0, 300, 3, 3, 64}, {201, 170, 6, 2, 40}, {37, 400, 8, 1, 96}};
  const SparsePolicy policies[] = {
      {.budget_blocks = 5},
      {.budget_blocks = 16, .block_tokens = 4, .first_blocks = 4, .last_blocks = 8},
      {.budget_blocks = 9, .block_tokens = 8, .first_blocks = 0, .last_blocks = 1},
      {.budget_blocks = 4, .block_tokens = 32, .first_blocks = 1, .last_blocks = 1}};
  unsigned seed = 40;
  for (const AttentionCase& shape : cases) {
    const SparsePolicy& policy = policies[seed % 4];
    const RandomAttention r = random_attention_case(shape, at::kBFloat16, ++seed);
    std::mt19937 random(seed);
    std::vector<uint8_t> is_sampled;
    for (int64_t i = 0; i < shape.num_tokens; ++i) is_sampled.push_back(random() % 4 != 0);
    const TreePages pages(r.in.end_local, shape.num_stack, shape.num_groups);
    BlockChooser chooser(pages.segments(), is_sampled, policy, shape.num_groups);
    const SparseTreePass pass{pages, chooser};
    const BlockChooser::Lists chosen = choose_in_tree(r.in, fill_pages(r.in, pages), pass);
    const auto exactly = [](const at::Tensor& x) { return x.to(at::kDouble); };
    const TreeAttentionInput in{
        exactly(r.in.q_TNH),       exactly(r.in.k_TGH), exactly(r.in.v_TGH), exactly(r.in.k_stack_PGH),
        exactly(r.in.v_stack_PGH), r.in.end_local,      r.in.scale};
    const auto gradients = [&](const TreeAttentionInput& of, const at::Tensor& d_o) {
      const TreeAttentionOutput out = tree_attention_forward_sparse(of, fill_pages(of, pages), pass, chosen);
      const auto acc = d_o.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
      const at::Tensor d_k_stack = r.d_k_stack.to(acc, false, true),
                       d_v_stack = r.d_v_stack.to(acc, false, true);
      const TreeAttentionGradient d =
          tree_attention_backward_sparse(of, out, d_o, d_k_stack, d_v_stack, pass, chosen);
      return std::vector<at::Tensor>{d.d_q_TNH, d.d_k_TGH, d.d_v_TGH, d_k_stack, d_v_stack};
    };
    const auto got = gradients(r.in, r.d_o), expected = gradients(in, exactly(r.d_o));
    for (size_t i = 0; i < got.size(); ++i) {
      if (expected[i].numel() == 0) continue;
      EXPECT_LT(largest(got[i], expected[i]), 0.02 * expected[i].abs().max().item<double>())
          << "gradient " << i << " of case " << seed;
    }
  }
}

TEST(SparseTreeAttention, EqualsDenseAttentionWithinTheBudget) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    RandomAttention r = random_attention_case({120, 90, 4, 2, 24}, type, 3);
    const std::vector<uint8_t> is_sampled(90, 1);
    const TreePages pages(r.in.end_local, 120, 2);
    BlockChooser chooser(pages.segments(), is_sampled, {.budget_blocks = 100}, 2);
    EXPECT_FALSE(chooser.chooses());
    EXPECT_EQ(chooser.blocks_read(), chooser.blocks_in_context());
    const SparseTreePass pass{pages, chooser};
    const BlockChooser::Lists chosen;
    const TreeAttentionOutput dense = tree_attention_forward_paged(r.in, pages);
    const at::Tensor d_k_stack = r.d_k_stack.clone(), d_v_stack = r.d_v_stack.clone();
    const TreeAttentionGradient d =
        tree_attention_backward_sparse(r.in, dense, r.d_o, d_k_stack, d_v_stack, pass, chosen);
    const at::Tensor d_k_dense = r.d_k_stack.clone(), d_v_dense = r.d_v_stack.clone();
    const TreeAttentionGradient expected =
        tree_attention_backward_reference(r.in, dense, r.d_o, d_k_dense, d_v_dense);
    const double tolerance = type == at::kDouble ? 1e-12 : type == at::kFloat ? 1e-4 : 0.1;
    EXPECT_LT(largest(d.d_q_TNH, expected.d_q_TNH), tolerance);
    EXPECT_LT(largest(d.d_k_TGH, expected.d_k_TGH), tolerance);
    EXPECT_LT(largest(d_k_stack, d_k_dense), tolerance);
    EXPECT_LT(largest(d_v_stack, d_v_dense), tolerance);
  }
}

}  // namespace
}  // namespace bough
