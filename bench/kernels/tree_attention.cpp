// Attention over the prefix KV stack and the pass, with the heads of `small` and of Qwen3-0.6B. A pass of
// 1,024 tokens:
//   path    one path, no stack
//   stack   one path after 1,024 rows of the stack
//   forest  16 pieces of 64 tokens after 1,024 rows of the stack
// Bound by products: 4·H FLOPs per visible pair and head forward, twice as many backward. The step's bound
// uses these counts. Backward also recomputes the scores, which makes 2.5 times the forward FLOPs.
//   build/bench/tree_attention --benchmark_counters_tabular=true
#include "kernels/tree_attention/tree_attention.h"

#include <cmath>

#include "kernel_bench.h"

namespace {

using namespace bough;
using namespace bough::bench;

constexpr int kLayers = 8;  // used in rotation, as in a model

struct Layout {
  const char* name;
  int64_t stack_rows, piece;
};
constexpr Layout kLayouts[] = {{"path", 0, kTokens}, {"stack", 1024, kTokens}, {"forest", 1024, 64}};

struct Layer {
  TreeAttentionInput in;
  TreeAttentionOutput out;
  at::Tensor d_o, d_k_stack, d_v_stack;
};

at::Tensor ends(const Layout& layout) {
  auto ends = at::full({layout.stack_rows + kTokens}, kTokens, at::kInt);
  auto* own = ends.data_ptr<int32_t>() + layout.stack_rows;
  for (int64_t i = 0; i < kTokens; ++i) own[i] = static_cast<int32_t>((i / layout.piece + 1) * layout.piece);
  return ends;
}

Work work(const Setting& s, const Layout& layout, bool backward) {
  const double tokens = kTokens, piece = static_cast<double>(layout.piece);
  const double stack = static_cast<double>(layout.stack_rows);
  const double pairs = tokens * (stack + (piece + 1) / 2);
  const auto query = static_cast<double>(s.shape.query_width()),
             key = static_cast<double>(s.shape.key_width());
  const double rows = tokens * 2 * query + (tokens + stack) * 2 * key;  // q, o; k, v
  return {.flops = pairs * 4 * query * (backward ? 2 : 1),
          .bytes = backward ? rows * s.element() + tokens * 2 * query * s.element() +
                                  (tokens + 2 * stack) * 2 * key * sizeof(float)
                            : rows * s.element()};
}

std::vector<Layer> layers(const Setting& s, const Layout& layout) {
  const auto& m = s.shape;
  std::vector<Layer> result(kLayers);
  for (auto& layer : result) {
    const auto keys = [&](int64_t rows) { return values({rows, m.num_kv_heads, m.head_dim}, s.type); };
    layer.in = {values({kTokens, m.num_heads, m.head_dim}, s.type),
                keys(kTokens),
                keys(kTokens),
                keys(layout.stack_rows),
                keys(layout.stack_rows),
                ends(layout),
                1 / std::sqrt(static_cast<double>(m.head_dim))};
    layer.out = tree_attention_forward(layer.in);
    layer.d_o = values(layer.in.q_TNH.sizes(), s.type);
    layer.d_k_stack = at::zeros(layer.in.k_stack_PGH.sizes(), at::kFloat);
    layer.d_v_stack = at::zeros_like(layer.d_k_stack);
  }
  return result;
}

Kernel forward(const Setting& s, const Layout& layout) {
  return {work(s, layout, false), [all = layers(s, layout)](size_t turn) mutable {
            auto& layer = all[turn % kLayers];
            layer.out = tree_attention_forward(layer.in);
          }};
}

Kernel backward(const Setting& s, const Layout& layout) {
  return {
      work(s, layout, true),
      [all = layers(s, layout), ring = Ring<TreeAttentionGradient>(kLayers)](size_t turn) mutable {
        const auto& layer = all[turn % kLayers];
        ring.put(tree_attention_backward(layer.in, layer.out, layer.d_o, layer.d_k_stack, layer.d_v_stack));
      }};
}

}  // namespace

int main(int argc, char** argv) {
  Program program;
  for (const auto& layout : kLayouts) {
    program.add(std::string("tree_attention/") + layout.name + "/forward",
                [&](const Setting& s) { return forward(s, layout); });
    program.add(std::string("tree_attention/") + layout.name + "/backward",
                [&](const Setting& s) { return backward(s, layout); });
  }
  return program.run(argc, argv);
}
