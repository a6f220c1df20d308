// The lm_head of `small` and of Qwen3-0.6B on one chunk of rows, as train/head.cpp runs it. Forward: from
// hidden states through the vocabulary matrix to log-probabilities and entropies. Backward: to both
// gradients. A chunk with many rows is bound by products, one with few rows by memory (the matrix and its
// gradient). `log_prob` alone is bound by memory.
//   build/bench/log_prob --benchmark_counters_tabular=true
#include "kernels/log_prob/log_prob.h"
#include "kernels/log_prob/log_prob_cost.h"

#include "kernel_bench.h"
#include "kernels/matrix_product/matrix_product.h"

namespace {

using namespace bough;
using namespace bough::bench;

struct Chunk {
  at::Tensor hidden_RD, logits_RV, labels_R, seeds_R;
};

Chunk chunk(const Setting& s, bool with_logits) {
  const int64_t rows = head_chunk_rows(s.shape.vocab_size);
  Chunk c;
  c.hidden_RD = values({rows, s.shape.hidden_size}, s.type);
  if (with_logits) c.logits_RV = values({rows, s.shape.vocab_size}, s.type);
  c.labels_R = at::randint(s.shape.vocab_size, {rows}, at::kLong);
  c.seeds_R = values({rows}, at::kFloat);
  return c;
}

struct Sizes {
  double rows, width, vocab;
  explicit Sizes(const Setting& s)
      : rows(static_cast<double>(head_chunk_rows(s.shape.vocab_size))),
        width(static_cast<double>(s.shape.hidden_size)),
        vocab(static_cast<double>(s.shape.vocab_size)) {}
  double product_flops() const { return 2 * rows * width * vocab; }
};

// Reads hidden states and matrix once. The logits can stay in the cache.
Kernel head_forward(const Setting& s) {
  const Sizes n(s);
  return {{.flops = n.product_flops(), .bytes = (n.rows + n.vocab) * n.width * s.element()},
          [c = chunk(s, false), weight = values({s.shape.vocab_size, s.shape.hidden_size}, s.type)](size_t) {
            const at::NoGradGuard no_grad;
            log_prob_forward(matrix_product(c.hidden_RD, weight.t()), c.labels_R, 1.0);
          }};
}

// Three products. Reads the matrix twice, reads and writes its gradient in fp32.
Kernel head_forward_backward(const Setting& s) {
  const Sizes n(s);
  return {
      {.flops = 3 * n.product_flops(),
       .bytes = 2 * (n.rows + n.vocab) * n.width * s.element() + n.vocab * n.width * 2 * sizeof(float)},
      [c = chunk(s, false), weight = parameter({s.shape.vocab_size, s.shape.hidden_size}, s.type)](size_t) {
        const at::NoGradGuard no_grad;
        const auto logits_RV = matrix_product(c.hidden_RD, weight.value.t());
        const auto out = log_prob_forward(logits_RV, c.labels_R, 1.0);
        log_prob_backward_(logits_RV, c.labels_R, out, c.seeds_R, c.seeds_R, 1.0);
        add_matrix_product_(weight.main_grad, logits_RV.t(), c.hidden_RD);
        matrix_product(logits_RV, weight.value);
      }};
}

std::vector<Chunk> chunks(const Setting& s, const Work& work) {
  std::vector<Chunk> all;
  for (size_t i = 0; i < work.num_sets(); ++i) all.push_back(chunk(s, true));
  return all;
}

Kernel forward(const Setting& s) {
  const Sizes n(s);
  const Work work{.bytes = n.rows * n.vocab * s.element()};
  return {work,
          [all = chunks(s, work)](size_t turn) {
            const auto& c = all[turn % all.size()];
            log_prob_forward(c.logits_RV, c.labels_R, 1.0);
          },
          work.num_sets()};
}

// In place: the gradient becomes the logits of the next turn. The time does not depend on the values.
Kernel backward(const Setting& s) {
  const Sizes n(s);
  const Work work{.bytes = 2 * n.rows * n.vocab * s.element(), .in_place = true};
  auto all = chunks(s, work);
  const auto out = log_prob_forward(all.front().logits_RV, all.front().labels_R, 1.0);
  return {work,
          [all, out](size_t turn) {
            const auto& c = all[turn % all.size()];
            log_prob_backward_(c.logits_RV, c.labels_R, out, c.seeds_R, c.seeds_R, 1.0);
          },
          work.num_sets()};
}

}  // namespace

int main(int argc, char** argv) {
  Program program;
  program.add("head/forward", head_forward);
  program.add("head/forward_backward", head_forward_backward);
  program.add("log_prob/forward", forward);
  program.add("log_prob/backward", backward);
  return program.run(argc, argv);
}
