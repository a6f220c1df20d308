// RMSNorm at the widths of `small` and of Qwen3-0.6B. Bound by memory.
//   build/bench/rms_norm --benchmark_counters_tabular=true
#include "kernels/rms_norm/rms_norm.h"

#include "kernel_bench.h"

namespace {

using namespace bough;
using namespace bough::bench;

constexpr double kEps = 1e-6;

at::Tensor input(const Setting& s) {
  return values({kTokens, s.shape.hidden_size}, s.type).requires_grad_(true);
}

// `elements`: elements read or written per element of x. Weight: read once per row, from the nearest cache.
Work work(const Setting& s, double elements) {
  return {.bytes = elements * static_cast<double>(kTokens * s.shape.hidden_size) * s.element()};
}

Kernel forward(const Setting& s) {
  return forward_of(
      work(s, 2), [&] { return input(s); },
      [weight = parameter({s.shape.hidden_size}, s.type)](const at::Tensor& x) {
        return rms_norm(x, weight, kEps);
      });
}

Kernel backward(const Setting& s) {
  const auto weight = std::make_shared<Parameter>(parameter({s.shape.hidden_size}, s.type));
  return backward_of(work(s, 3), [&] {
    const auto x = input(s);
    return Graph{x, {rms_norm(x, *weight, kEps)}};
  });
}

}  // namespace

int main(int argc, char** argv) {
  Program program;
  program.add("rms_norm/forward", forward);
  program.add("rms_norm/backward", backward);
  return program.run(argc, argv);
}
