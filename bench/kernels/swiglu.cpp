// SwiGLU at the shapes of `small` and of Qwen3-0.6B: bound by memory.
//   build/bench/swiglu --benchmark_counters_tabular=true
#include "kernels/swiglu/swiglu.h"

#include "kernel_bench.h"

namespace {

using namespace bough;
using namespace bough::bench;

at::Tensor input(const Setting& s) {
  return values({kTokens, 2 * s.shape.intermediate_size}, s.type).requires_grad_(true);
}

// Elements read or written for each of the product's.
Work work(const Setting& s, double elements) {
  return {.bytes = elements * static_cast<double>(kTokens * s.shape.intermediate_size) * s.element()};
}

Kernel forward(const Setting& s) {
  return forward_of(
      work(s, 3), [&] { return input(s); }, [](const at::Tensor& x) { return swiglu(x); });
}

Kernel backward(const Setting& s) {
  return backward_of(work(s, 5), [&] {
    const auto x = input(s);
    return Graph{x, {swiglu(x)}};
  });
}

}  // namespace

int main(int argc, char** argv) {
  Program program(argv);
  program.add("swiglu/forward", forward);
  program.add("swiglu/backward", backward);
  return program.run(argc, argv);
}
