#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/common/op.h"
#include "kernels/log_prob/log_prob.h"
#include "kernels/log_prob/log_prob_loops.h"
#include "kernels/log_prob/softmax_blocks.h"
#include "kernels/parameter.h"

namespace bough {

namespace {
// Loads a logit and widens it.
float load(const float* p) {
  return *p;
}
double load(const double* p) {
  return *p;
}
float load(const BFloat16Bits* p) {
  return c10::BFloat16(p->bits, c10::BFloat16::from_bits());
}
void store(float* p, float value) {
  *p = value;
}
void store(double* p, double value) {
  *p = value;
}
void store(BFloat16Bits* p, float value) {
  p->bits = c10::BFloat16(value).x;
}

template <class T, class A>
void backward_row(T* logits, int64_t width, A inverse_temperature, A lse, A entropy, A d_log_prob,
                  A d_entropy) {
  if constexpr (std::is_same_v<A, float>)
    if (best_isa() == Isa::kAvx512)
      return avx512::log_prob_backward(logits, width, inverse_temperature, lse, entropy, d_log_prob,
                                       d_entropy);
  BOUGH_ISA_CALL(log_prob_backward_row, logits, width, inverse_temperature, lse, entropy, d_log_prob,
                 d_entropy);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> log_prob_forward_cpu(const at::Tensor& logits_RV,
                                                                    const at::Tensor& labels_R,
                                                                    double temperature) {
  const int64_t width = logits_RV.size(1);
  const auto options = logits_RV.options().dtype(accumulator_type(logits_RV.scalar_type()));
  auto log_probs = at::empty({logits_RV.size(0)}, options);
  auto lse = at::empty({logits_RV.size(0)}, options);
  auto entropies = at::empty({logits_RV.size(0)}, options);
  dispatch_float_types(logits_RV.scalar_type(), "log_prob", [&]<class T>() {
    using A = AccOf<T>;
    A *log_probs_data = mutable_data<A>(log_probs), *lse_data = mutable_data<A>(lse),
      *entropies_data = mutable_data<A>(entropies);
    at::parallel_for(0, logits_RV.size(0), grain(4 * width), [&](int64_t begin, int64_t end) {
      const auto num_blocks = static_cast<size_t>(softmax_blocks(width));
      std::vector<A> maxima(num_blocks);
      std::vector<double> sums(num_blocks), dots(num_blocks);
      for (int64_t r = begin; r < end; ++r) {
        const T* row = data<T>(logits_RV) + r * width;
        softmax_maxima(row, width, maxima.data());
        const A max = *std::max_element(maxima.begin(), maxima.end());
        softmax_sums(row, width, max, static_cast<A>(1 / temperature), sums.data(), dots.data());
        const double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
        const double dot = std::accumulate(dots.begin(), dots.end(), 0.0);
        const double log_sum = std::log(sum);
        lse_data[r] = static_cast<A>(max / temperature + log_sum);
        const int64_t label = data<int64_t>(labels_R)[r];
        log_probs_data[r] =
            label < 0 ? -std::numeric_limits<A>::infinity()
                      : static_cast<A>(log_probability(load(row + label), max, temperature, log_sum));
        entropies_data[r] = static_cast<A>(log_sum - dot / sum);
      }
    });
  });
  return {log_probs, lse, entropies};
}

void log_prob_backward_cpu_(const at::Tensor& logits_RV, const at::Tensor& labels_R, const at::Tensor& lse,
                            const at::Tensor& entropies, const at::Tensor& d_log_probs,
                            const at::Tensor& d_entropies, double temperature) {
  const int64_t width = logits_RV.size(1);
  dispatch_float_types(logits_RV.scalar_type(), "log_prob", [&]<class T>() {
    using A = AccOf<T>;
    T* logits = mutable_data<T>(logits_RV);
    at::parallel_for(0, logits_RV.size(0), grain(4 * width), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* row = logits + r * width;
        const A inverse = static_cast<A>(1 / temperature);
        const A d_log_prob = data<A>(d_log_probs)[r];
        const A d_entropy = data<A>(d_entropies)[r];
        const A entropy = data<A>(entropies)[r];
        const int64_t number = data<int64_t>(labels_R)[r];
        T* label = row + number;
        const A log_p = number < 0 ? A(0) : load(label) * inverse - data<A>(lse)[r];
        backward_row(row, width, inverse, data<A>(lse)[r], entropy, d_log_prob, d_entropy);
        if (number < 0) continue;
        // The label's element of d_logits is computed as a whole and rounded once. -expm1(log_p) is 1 - p
        // without cancellation.
        store(label,
              (d_log_prob * -std::expm1(log_p) - d_entropy * std::exp(log_p) * (log_p + entropy)) * inverse);
      }
    });
  });
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("log_prob_forward", TORCH_FN(bough::log_prob_forward_cpu));
  m.impl("log_prob_backward_", TORCH_FN(bough::log_prob_backward_cpu_));
}
