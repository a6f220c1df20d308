// The optimizer: AdamW and the sum of squares of the global norm, on matrices of `small` and of Qwen3-0.6B.
// Bound by memory. For comparison, torch's fused AdamW does the same update without clipping. With bf16
// weights it updates the fp32 master weights. Separate passes then round them to bf16 and zero the gradient.
// A ratio of the two needs interleaved runs:
//   build/bench/adamw --benchmark_counters_tabular=true
//   build/bench/adamw --benchmark_filter=adamw --benchmark_enable_random_interleaving=true
//     --benchmark_repetitions=9
#include "kernels/adamw/adamw.h"

#include "kernel_bench.h"

namespace {

using namespace bough;
using namespace bough::bench;

std::vector<int64_t> matrix(const Setting& s) {  // gate and up
  return {2 * s.shape.intermediate_size, s.shape.hidden_size};
}
double num_elements(const Setting& s) {
  return 2.0 * static_cast<double>(s.shape.intermediate_size * s.shape.hidden_size);
}

// Operands of one update, in more sets than a cache holds, and the bytes of an update. fp32: reads and writes
// the value, both moments and the gradient. bf16: the same for the master weights instead of the value, and
// the value is only written.
struct Updates {
  Work work;
  std::vector<AdamwState> states;

  explicit Updates(const Setting& s) {
    const bool has_master = s.type != at::kFloat;
    work = {.bytes = num_elements(s) * (4 * 8 + (has_master ? 2 : 0)), .in_place = true};
    for (size_t i = 0; i < work.num_sets(); ++i) {
      const auto value = values(matrix(s), at::kFloat);
      states.push_back({value.to(s.type), has_master ? value : at::Tensor(), at::zeros_like(value),
                        at::zeros_like(value), values(matrix(s), at::kFloat)});
    }
  }
};

Kernel update(const Setting& s) {
  const Updates updates(s);
  return {updates.work,
          [states = updates.states](size_t turn) {
            adamw(states[turn % states.size()], {.lr = 1e-3,
                                                 .beta1 = 0.9,
                                                 .beta2 = 0.999,
                                                 .eps = 1e-8,
                                                 .weight_decay = 0.01,
                                                 .gradient_scale = 0.5,
                                                 .step = static_cast<int64_t>(turn) + 1});
          },
          updates.states.size()};
}

Kernel torch_update(const Setting& s) {
  const Updates updates(s);
  return {updates.work,
          [states = updates.states, step = at::zeros({}, at::kFloat)](size_t turn) {
            const AdamwState& state = states[turn % states.size()];
            const at::Tensor& weights = state.master.defined() ? state.master : state.value;
            step.fill_(static_cast<double>(turn) + 1);
            at::_fused_adamw_({weights}, {state.gradient}, {state.exp_avg}, {state.exp_avg_sq}, {}, {step},
                              /*lr=*/1e-3, /*beta1=*/0.9, /*beta2=*/0.999, /*weight_decay=*/0.01,
                              /*eps=*/1e-8,
                              /*amsgrad=*/false, /*maximize=*/false);
            state.gradient.zero_();
            if (state.master.defined()) state.value.copy_(state.master);
          },
          updates.states.size()};
}

// Gradients have the accumulator type (fp32), independent of the weights' type.
Kernel norm(const Setting& s) {
  return forward_of(
      Work{.bytes = num_elements(s) * sizeof(float)}, [&] { return values(matrix(s), at::kFloat); },
      [](const at::Tensor& x) { return sum_of_squares(x); });
}

}  // namespace

int main(int argc, char** argv) {
  Program program;
  program.add("adamw", update);
  program.add("torch_adamw", torch_update);
  program.add("sum_of_squares", norm);
  return program.run(argc, argv);
}
