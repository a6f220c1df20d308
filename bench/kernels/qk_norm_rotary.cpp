// Split, q/k norm and rotary embedding with the heads of `small` and of Qwen3-0.6B. Bound by memory.
//   build/bench/qk_norm_rotary --benchmark_counters_tabular=true
#include "kernels/qk_norm_rotary/qk_norm_rotary.h"

#include "kernel_bench.h"

namespace {

using namespace bough;
using namespace bough::bench;

struct Heads {
  QkvLayout layout;
  RotaryTable rotary;
  Parameter q_norm, k_norm;

  explicit Heads(const Setting& s)
      : layout{s.shape.num_heads, s.shape.num_kv_heads, s.shape.head_dim},
        rotary(make_rotary_table(at::arange(kTokens), s.shape.head_dim, 1e6, at::kFloat)),
        q_norm(parameter({s.shape.head_dim}, s.type)),
        k_norm(parameter({s.shape.head_dim}, s.type)) {}

  at::Tensor input(const Setting& s) const {
    return values({kTokens, layout.width()}, s.type).requires_grad_(true);
  }
  auto run(const at::Tensor& qkv) const {
    return qk_norm_rotary(qkv, layout, rotary, &q_norm, &k_norm, 1e-6);
  }
  // `elements`: elements read or written per element of q and k. v is copied. The rotary table is read once.
  Work work(const Setting& s, double elements) const {
    const auto table = static_cast<double>(rotary.cos.nbytes() + rotary.sin.nbytes());
    const auto v = static_cast<double>(layout.num_kv_heads * layout.head_dim);
    const double row = elements * (static_cast<double>(layout.width()) - v) + 2 * v;
    return {.bytes = row * kTokens * s.element() + table};
  }
};

Kernel forward(const Setting& s) {
  const Heads heads(s);
  return forward_of(
      heads.work(s, 2), [&] { return heads.input(s); },
      [heads](const at::Tensor& qkv) { return heads.run(qkv); });
}

Kernel backward(const Setting& s) {
  const Heads heads(s);
  return backward_of(heads.work(s, 3), [&] {
    const auto qkv = heads.input(s);
    const auto [q, k, v] = heads.run(qkv);
    return Graph{qkv, {q, k, v}};
  });
}

}  // namespace

int main(int argc, char** argv) {
  Program program;
  program.add("qk_norm_rotary/forward", forward);
  program.add("qk_norm_rotary/backward", backward);
  return program.run(argc, argv);
}
