#include "kernels/common/element.h"
#include "kernels/common/exp.h"
#include "kernels/swiglu/swiglu_loops.h"

namespace bough::BOUGH_ISA {

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

}  // namespace bough::BOUGH_ISA
