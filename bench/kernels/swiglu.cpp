// SwiGLU at the shapes of `small` and of Qwen3-0.6B. Bound by memory.
//   build/bench/swiglu --benchmark_counters_tabular=true
#include "kernels/swiglu/swiglu.h"

#include "kernel_bench.h"

namespace {

using namespace bough;
using namespace bough::bench;

at::Tensor input(const Setting& s) {
  return values({kTokens, 2 * s.shape.intermediate_size}, s.type);
}

// `elements`: elements read or written per element of the product.
Work work(const Setting& s, double elements) {
  return {.bytes = elements * static_cast<double>(kTokens * s.shape.intermediate_size) * s.element()};
}

Kernel forward(const Setting& s) {
  return forward_of(
      work(s, 3), [&] { return input(s); }, [](const at::Tensor& x) { return swiglu_forward(x); });
}

// Includes recomputing the product.
Kernel backward(const Setting& s) {
  const int64_t inner = s.shape.intermediate_size;
  return forward_of(
      work(s, 6),
      [&] {
        return values({3, kTokens, inner}, s.type);
      },
      [inner](const at::Tensor& all) {
        const auto gate_up = all.narrow(0, 0, 2).view({kTokens, 2 * inner}), d_y = all[2];
        const std::pair out(at::empty_like(d_y), at::empty_like(gate_up));
        swiglu_backward(d_y, gate_up, out.first, out.second);
        return out;
      });
}

}  // namespace

int main(int argc, char** argv) {
  Program program;
  program.add("swiglu/forward", forward);
  program.add("swiglu/backward", backward);
  return program.run(argc, argv);
}
