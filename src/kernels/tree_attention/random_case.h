// Random passes over a prefix KV stack, used by the tests of tree attention and by the self-test.
#pragma once

#include <cmath>
#include <random>

#include "kernels/common/closeness.h"
#include "kernels/parameter.h"
#include "kernels/tree_attention/tree_attention.h"

namespace bough {

// Returns end_local [P + T] of a random forest over a stack of P keys. Before each token, the innermost
// unfinished subtree ends with probability 1/16; if it ends, the next outer one is tried in the same way.
// This gives long chains and wide branching. Each new root continues a random prefix of the stack.
inline std::vector<int32_t> random_ends(int64_t num_stack, int64_t num_tokens, std::mt19937& random) {
  std::vector<int32_t> end(num_stack + num_tokens, static_cast<int32_t>(num_tokens));
  std::vector<int64_t> open;  // tokens whose subtree has not ended
  int64_t stack_visible = num_stack;
  for (int64_t i = 0; i < num_tokens; ++i) {
    while (!open.empty() && random() % 16 == 0) {
      end[num_stack + open.back()] = static_cast<int32_t>(i);
      open.pop_back();
    }
    if (open.empty() && i > 0 && stack_visible > 0) {  // the new root's parent is an earlier stack token
      const int64_t visible = random() % (stack_visible + 1);
      for (int64_t j = visible; j < stack_visible; ++j) end[j] = static_cast<int32_t>(i);
      stack_visible = visible;
    }
    open.push_back(i);
  }
  return end;
}

struct AttentionCase {
  int64_t num_stack, num_tokens, num_heads, num_groups, head_dim;
};

struct RandomAttention {
  TreeAttentionInput in;
  at::Tensor d_o, d_k_stack, d_v_stack;
};

inline RandomAttention random_attention_case(const AttentionCase& c, at::ScalarType type, unsigned seed) {
  std::mt19937 random(seed);
  const auto ends = random_ends(c.num_stack, c.num_tokens, random);
  const auto tensor = [&](at::IntArrayRef sizes, uint64_t s) {
    return random_tensor(sizes, type, seed * 10 + s);
  };
  RandomAttention r;
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

}  // namespace bough
