// Loops over elements and rows, vectorised by the compiler (isa.h). The headers of the ops define what the
// loops compute.
#include "kernels/common/element.h"
#include "kernels/common/element_loops.h"
#include "kernels/common/exp.h"

namespace bough::BOUGH_ISA {

// rms_norm.h

// Returns weight + offset. Without an offset nothing is added, because an addition would make the compiler
// reorder the factors.
template <bool kOffset, class A, class T>
static inline A factor_of(const T* weight, A offset) {
  if constexpr (kOffset) return load(weight) + offset;
  else return load(weight);
}

// Returns the normalised element. Forward and backward, which computes the element again, must agree to the
// last bit. With an offset, the compiler would otherwise combine the sum with different factors in each of
// them.
template <bool kOffset, class A>
static inline A normed(A x, A scale, A factor) {
  if constexpr (kOffset) return __builtin_assoc_barrier(x * scale) * __builtin_assoc_barrier(factor);
  else return x * scale * factor;
}

template <bool kOffset, class T, class A>
static inline void norm_rows(T* y, A* rstd, const T* x, const T* weight, int64_t num_rows, int64_t width,
                             const NormSettings& norm) {
  const double eps = norm.eps;
  const A offset = static_cast<A>(norm.weight_offset);
  for (int64_t r = 0; r < num_rows; ++r, x += width, y += width) {
    A sum = 0;
    for (int64_t d = 0; d < width; ++d) sum += load(x + d) * load(x + d);
    const A scale =
        A(1) / (sizeof(A) == 8 ? __builtin_sqrt(sum / width + eps)
                               : __builtin_sqrtf(static_cast<float>(sum / width + static_cast<A>(eps))));
    rstd[r] = scale;
    for (int64_t d = 0; d < width; ++d)
      store(y + d, normed<kOffset, A>(load(x + d), scale, factor_of<kOffset, A>(weight + d, offset)));
  }
}

template <class T, class A>
void rms_norm_rows(T* y, A* rstd, const T* x, const T* weight, int64_t num_rows, int64_t width,
                   const NormSettings& norm) {
  const auto rows = norm.weight_offset == 0 ? norm_rows<false, T, A> : norm_rows<true, T, A>;
  rows(y, rstd, x, weight, num_rows, width, norm);
}

// Forward: y = x · rstd · w.
// Backward, with g = d_y · w: d_x = rstd · (g - x · rstd² · mean(g · x)).
template <bool kOffset, bool kResidual, bool kAgain, class T, class A>
static inline void backward_row(T* d_x, T* y, A* d_weight, const T* d_y, const T* x, const T* weight,
                                const T* residual, A scale, int64_t width, A offset) {
  A dot = 0;
  for (int64_t d = 0; d < width; ++d)
    dot += load(d_y + d) * factor_of<kOffset, A>(weight + d, offset) * load(x + d);
  const A mean = dot * scale * scale / width;
#pragma GCC ivdep
  for (int64_t d = 0; d < width; ++d) {
    const A x_d = load(x + d), d_y_d = load(d_y + d), w_d = factor_of<kOffset, A>(weight + d, offset);
    d_weight[d] += d_y_d * x_d * scale;
    A d_x_d = scale * (d_y_d * w_d - x_d * mean);
    if constexpr (kResidual) d_x_d += load(residual + d);
    store(d_x + d, d_x_d);
    if constexpr (kAgain) store(y + d, normed<kOffset>(x_d, scale, w_d));
  }
}

template <bool kOffset, class T, class A>
static inline auto backward_row_of(bool residual, bool again) {
  return residual
             ? (again ? backward_row<kOffset, true, true, T, A> : backward_row<kOffset, true, false, T, A>)
             : (again ? backward_row<kOffset, false, true, T, A> : backward_row<kOffset, false, false, T, A>);
}

template <class T, class A>
void rms_norm_backward_rows(T* d_x, T* y, A* d_weight, const T* d_y, const T* x, const T* weight,
                            const T* residual, const A* rstd, int64_t num_rows, int64_t width,
                            double weight_offset) {
  const auto row = weight_offset == 0 ? backward_row_of<false, T, A>(residual, y)
                                      : backward_row_of<true, T, A>(residual, y);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t at = r * width;
    row(d_x + at, y ? y + at : nullptr, d_weight, d_y + at, x + at, weight,
        residual ? residual + at : nullptr, rstd[r], width, static_cast<A>(weight_offset));
  }
}

#define INSTANTIATE(T, A)                                                                                  \
  template void rms_norm_rows<T, A>(T*, A*, const T*, const T*, int64_t, int64_t, const NormSettings&);    \
  template void rms_norm_backward_rows<T, A>(T*, T*, A*, const T*, const T*, const T*, const T*, const A*, \
                                             int64_t, int64_t, double);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)
#undef INSTANTIATE

// swiglu.h

// silu(g) = g · sigmoid(g). GeLU by tanh:
// gelu(g) = g · (1 + tanh(u)) / 2 = g · sigmoid(2u),
// u = sqrt(2 / pi) · (g + 0.044715 · g³).
constexpr double kGelu = 1.5957691216057308, kGeluCube = kGelu * 0.044715;

// gate_argument returns p(g), the argument of the sigmoid. gate_steepness returns g · p'(g).
template <GateActivation kActivation, class A>
static inline A gate_argument(A g) {
  if constexpr (kActivation == GateActivation::kSilu) return g;
  else return g * (static_cast<A>(kGelu) + static_cast<A>(kGeluCube) * g * g);
}
template <GateActivation kActivation, class A>
static inline A gate_steepness(A g) {
  if constexpr (kActivation == GateActivation::kSilu) return g;
  else return g * (static_cast<A>(kGelu) + static_cast<A>(3 * kGeluCube) * g * g);
}

namespace {
// A rough sigmoid is precise enough for SiLU if the result is rounded to bf16. GeLU's steepness grows with
// the cube of the gate and multiplies the error of 1 - s, so GeLU needs the precise sigmoid.
template <GateActivation kActivation, class T>
Acc<T> sigmoid(Acc<T> x) {
  if constexpr (sizeof(T) == 2 && kActivation == GateActivation::kSilu) return rough_sigmoid(x);
  else return 1 / (1 + vector_exp(-x));
}

template <GateActivation kActivation, class T>
void gated_rows(T* y, const T* gate_up, int64_t num_rows, int64_t width) {
  for (int64_t r = 0; r < num_rows; ++r, y += width, gate_up += 2 * width) {
    const T* up = gate_up + width;
#pragma GCC ivdep
    for (int64_t f = 0; f < width; ++f) {
      const Acc<T> g = load(gate_up + f);
      store(y + f, g * sigmoid<kActivation, T>(gate_argument<kActivation>(g)) * load(up + f));
    }
  }
}

// Forward: y = g · s · u with s = sigmoid(p(g)).
// Backward: d_g = d_y · u · s · (1 + g · p'(g) · (1 - s)),
// d_u = d_y · g · s.
template <GateActivation kActivation, class T>
void gated_backward_rows(T* d_gate_up, T* y, const T* d_y, const T* gate_up, int64_t num_rows,
                         int64_t width) {
  for (int64_t r = 0; r < num_rows;
       ++r, y += width, d_y += width, gate_up += 2 * width, d_gate_up += 2 * width) {
    const T* up = gate_up + width;
    T* d_up = d_gate_up + width;
#pragma GCC ivdep
    for (int64_t f = 0; f < width; ++f) {
      const Acc<T> g = load(gate_up + f);
      const Acc<T> d = load(d_y + f);
      const Acc<T> u = load(up + f);
      const Acc<T> s = sigmoid<kActivation, T>(gate_argument<kActivation>(g));
      store(d_gate_up + f, d * u * s * (1 + gate_steepness<kActivation>(g) * (1 - s)));
      store(d_up + f, d * g * s);
      store(y + f, g * s * u);
    }
  }
}

}  // namespace

template <class T>
void swiglu_rows(T* y, const T* gate_up, int64_t num_rows, int64_t width, GateActivation activation) {
  if (activation == GateActivation::kSilu) gated_rows<GateActivation::kSilu>(y, gate_up, num_rows, width);
  else gated_rows<GateActivation::kGeluTanh>(y, gate_up, num_rows, width);
}

template <class T>
void swiglu_backward_rows(T* d_gate_up, T* y, const T* d_y, const T* gate_up, int64_t num_rows, int64_t width,
                          GateActivation activation) {
  if (activation == GateActivation::kSilu)
    gated_backward_rows<GateActivation::kSilu>(d_gate_up, y, d_y, gate_up, num_rows, width);
  else gated_backward_rows<GateActivation::kGeluTanh>(d_gate_up, y, d_y, gate_up, num_rows, width);
}

#define INSTANTIATE(T)                                                          \
  template void swiglu_rows<T>(T*, const T*, int64_t, int64_t, GateActivation); \
  template void swiglu_backward_rows<T>(T*, T*, const T*, const T*, int64_t, int64_t, GateActivation);
INSTANTIATE(float)
INSTANTIATE(BFloat16Bits)
INSTANTIATE(double)
#undef INSTANTIATE

// qk_norm_rotary.h

template <class A, class T>
static inline A inverse_rms(const T* x, int64_t width, double eps) {
  A sum = 0;
  for (int64_t d = 0; d < width; ++d) sum += load(x + d) * load(x + d);
  return A(1) / (sizeof(A) == 8 ? __builtin_sqrt(sum / width + eps)
                                : __builtin_sqrtf(static_cast<float>(sum / width + static_cast<A>(eps))));
}

template <bool kOffset, class T, class A>
static inline void rotate_rows(T* y, const T* qkv, const A* cos, const A* sin, const T* weight,
                               const NormSettings& norm, const HeadRows& rows) {
  const int64_t half = rows.num_pairs;
  const A offset = static_cast<A>(norm.weight_offset);
  const T* x = qkv;
  for (int64_t h = 0; h < rows.num_heads; ++h, x += rows.head_dim, y += rows.head_dim) {
    if (weight) {
      const A scale = inverse_rms<A>(x, rows.head_dim, norm.eps);
#pragma GCC ivdep
      for (int64_t d = 0; d < half; ++d) {
        const A first = load(x + d) * scale * factor_of<kOffset, A>(weight + d, offset);
        const A second = load(x + half + d) * scale * factor_of<kOffset, A>(weight + half + d, offset);
        store(y + d, first * cos[d] - second * sin[d]);
        store(y + half + d, second * cos[d] + first * sin[d]);
      }
      for (int64_t d = 2 * half; d < rows.head_dim; ++d)
        store(y + d, load(x + d) * scale * factor_of<kOffset, A>(weight + d, offset));
    } else {
#pragma GCC ivdep
      for (int64_t d = 0; d < half; ++d) {
        const A first = load(x + d);
        const A second = load(x + half + d);
        store(y + d, first * cos[d] - second * sin[d]);
        store(y + half + d, second * cos[d] + first * sin[d]);
      }
      for (int64_t d = 2 * half; d < rows.head_dim; ++d) y[d] = x[d];
    }
  }
}

// Forward: y = rotate(x · rstd · w). Backward first inverts the rotation into `g` = d(x · rstd · w). Then
// d_x = rstd · (g·w - x · rstd² · mean(g·w·x)), d_w += g · x · rstd.
template <bool kOffset, class T, class A>
static inline void rotate_backward_rows(T* d_qkv, A* d_weight, A* g, const T* d_y, const T* qkv, const A* cos,
                                        const A* sin, const T* weight, const NormSettings& norm,
                                        const HeadRows& rows) {
  const int64_t width = rows.head_dim;
  const int64_t half = rows.num_pairs;
  const A offset = static_cast<A>(norm.weight_offset);
  for (int64_t h = 0; h < rows.num_heads; ++h, d_y += width) {
    const T* x = qkv + h * width;
    T* d_x = d_qkv + h * width;
#pragma GCC ivdep
    for (int64_t d = 0; d < half; ++d) {
      const A first = load(d_y + d);
      const A second = load(d_y + half + d);
      g[d] = first * cos[d] + second * sin[d];
      g[half + d] = second * cos[d] - first * sin[d];
    }
    for (int64_t d = 2 * half; d < width; ++d) g[d] = load(d_y + d);
    if (weight) {
      const A scale = inverse_rms<A>(x, width, norm.eps);
      A dot = 0;
      for (int64_t d = 0; d < width; ++d)
        dot += g[d] * factor_of<kOffset, A>(weight + d, offset) * load(x + d);
      const A mean = dot * scale * scale / width;
#pragma GCC ivdep
      for (int64_t d = 0; d < width; ++d) {
        const A x_d = load(x + d);
        d_weight[d] += g[d] * x_d * scale;
        store(d_x + d, scale * (g[d] * factor_of<kOffset, A>(weight + d, offset) - x_d * mean));
      }
    } else {
#pragma GCC ivdep
      for (int64_t d = 0; d < width; ++d) store(d_x + d, g[d]);
    }
  }
}

template <class T, class A>
void norm_rotate_rows(T* y, const T* qkv, const A* cos, const A* sin, const T* weight,
                      const NormSettings& norm, const HeadRows& rows) {
  const auto all = norm.weight_offset == 0 ? rotate_rows<false, T, A> : rotate_rows<true, T, A>;
  all(y, qkv, cos, sin, weight, norm, rows);
}

template <class T, class A>
void norm_rotate_backward_rows(T* d_qkv, A* d_weight, A* g, const T* d_y, const T* qkv, const A* cos,
                               const A* sin, const T* weight, const NormSettings& norm,
                               const HeadRows& rows) {
  const auto all =
      norm.weight_offset == 0 ? rotate_backward_rows<false, T, A> : rotate_backward_rows<true, T, A>;
  all(d_qkv, d_weight, g, d_y, qkv, cos, sin, weight, norm, rows);
}

#define INSTANTIATE(T, A)                                                                               \
  template void norm_rotate_rows<T, A>(T*, const T*, const A*, const A*, const T*, const NormSettings&, \
                                       const HeadRows&);                                                \
  template void norm_rotate_backward_rows<T, A>(T*, A*, A*, const T*, const T*, const A*, const A*,     \
                                                const T*, const NormSettings&, const HeadRows&);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)
#undef INSTANTIATE

// log_prob.h

template <class T, class A>
void log_prob_backward_row(T* logits, int64_t width, A inverse_temperature, A lse, A entropy, A d_log_prob,
                           A d_entropy) {
#pragma GCC ivdep
  for (int64_t v = 0; v < width; ++v) {
    const A log_p = load(logits + v) * inverse_temperature - lse;
    const A p = vector_exp(log_p);
    store(logits + v, -p * (d_log_prob + d_entropy * (log_p + entropy)) * inverse_temperature);
  }
}

#define INSTANTIATE(T, A) template void log_prob_backward_row<T, A>(T*, int64_t, A, A, A, A, A);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)
#undef INSTANTIATE

// embedding.h

template <class T, class A>
void add_rows_of_tokens(A* sums, const int64_t* tokens, const T* rows, int64_t num_rows, int64_t width,
                        int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 4;  // rows to prefetch ahead, because sums lie anywhere in memory
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(A));
  for (int64_t t = 0; t < num_rows; ++t) {
    if (t + kAhead < num_rows) {
      const A* later = sums + tokens[t + kAhead] * width;
      for (int64_t d = begin; d < end; d += kLine) __builtin_prefetch(later + d, 1);
    }
    A* sum = sums + tokens[t] * width;
    const T* row = rows + t * width;
#pragma GCC ivdep
    for (int64_t d = begin; d < end; ++d) sum[d] += load(row + d);
  }
}

#define INSTANTIATE(T, A) \
  template void add_rows_of_tokens<T, A>(A*, const int64_t*, const T*, int64_t, int64_t, int64_t, int64_t);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)
#undef INSTANTIATE

// adamw.h

static inline float square_root(float x) {
  return __builtin_sqrtf(x);
}
static inline double square_root(double x) {
  return __builtin_sqrt(x);
}

// Updates one element and returns the new weight.
template <class A>
static inline A update(A weight, A* exp_avg, A* exp_avg_sq, A* gradient, const AdamwScalars<A>& s) {
  const A g = *gradient * s.gradient_scale;
  const A m = s.beta1 * *exp_avg + s.one_minus_beta1 * g;
  const A v = s.beta2 * *exp_avg_sq + s.one_minus_beta2 * (g * g);
  *exp_avg = m;
  *exp_avg_sq = v;
  *gradient = 0;
  return weight * s.decay - s.step_size * m / (square_root(v * s.inverse_variance) + s.eps);
}

template <class T, class A>
void adamw_elements(T* __restrict__ value, A* __restrict__ master, A* __restrict__ exp_avg,
                    A* __restrict__ exp_avg_sq, A* __restrict__ gradient, int64_t size,
                    const AdamwScalars<A>& scalars) {
  const AdamwScalars<A> s = scalars;  // a local copy: stores cannot alias it, so it stays in registers
  if (master == nullptr) {
    for (int64_t i = 0; i < size; ++i)
      store(value + i, update<A>(load(value + i), exp_avg + i, exp_avg_sq + i, gradient + i, s));
  } else {
    for (int64_t i = 0; i < size; ++i) {
      const A weight = update<A>(master[i], exp_avg + i, exp_avg_sq + i, gradient + i, s);
      master[i] = weight;
      store(value + i, weight);
    }
  }
}

#define INSTANTIATE(T, A) \
  template void adamw_elements<T, A>(T*, A*, A*, A*, A*, int64_t, const AdamwScalars<A>&);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

template <class T>
void sum_of_squares_block(double* sum, const T* x, int64_t size) {
  double total = 0;
  for (int64_t i = 0; i < size; ++i) {
    const double x_i = static_cast<double>(load(x + i));
    total += x_i * x_i;
  }
  *sum = total;
}

template void sum_of_squares_block<float>(double*, const float*, int64_t);
template void sum_of_squares_block<BFloat16Bits>(double*, const BFloat16Bits*, int64_t);
template void sum_of_squares_block<double>(double*, const double*, int64_t);
#undef INSTANTIATE

}  // namespace bough::BOUGH_ISA
