// AVX512-BF16, 32 neighbouring elements at a time. swiglu_loops_isa.cpp has the equations.
#include "kernels/common/bf16_lanes.h"
#include "kernels/common/exp2_avx.h"
#include "kernels/swiglu/swiglu_loops.h"

namespace bough::bf16 {

namespace {
// Returns 1 / (1 + exp(-x)) with an error of at most 1.4e-4; bf16's precision is 4e-3. NaN stays NaN.
inline __m512 sigmoid(__m512 x) {
  const __m512 power = exp2_rough(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2E)));
  return _mm512_rcp14_ps(_mm512_add_ps(power, _mm512_set1_ps(1)));
}
inline Lanes sigmoid(const Lanes& x) {
  return {sigmoid(x.even), sigmoid(x.odd)};
}

// These are the constants of gate_argument and gate_steepness in swiglu_loops_isa.cpp.
constexpr float kGelu = 1.5957691216f, kGeluCube = kGelu * 0.044715f;
inline Lanes cubic(const Lanes& g, float linear, float cube) {
  const __m512 a = _mm512_set1_ps(linear), b = _mm512_set1_ps(cube);
  return g * multiply_add(g * g, {b, b}, {a, a});
}
template <GateActivation kActivation>
inline Lanes gate_argument(const Lanes& g) {
  return kActivation == GateActivation::kSilu ? g : cubic(g, kGelu, kGeluCube);
}
template <GateActivation kActivation>
inline Lanes gate_steepness(const Lanes& g) {
  return kActivation == GateActivation::kSilu ? g : cubic(g, kGelu, 3 * kGeluCube);
}

template <GateActivation kActivation>
void gated_rows(BFloat16Bits* y, const BFloat16Bits* gate_up, int64_t num_rows, int64_t width) {
  for (int64_t r = 0; r < num_rows; ++r, y += width, gate_up += 2 * width)
    for (int64_t f = 0; f < width; f += kNeighbours) {
      const Lanes g = load_lanes(gate_up + f);
      store_lanes(y + f, g * sigmoid(gate_argument<kActivation>(g)) * load_lanes(gate_up + width + f));
    }
}

template <GateActivation kActivation>
void gated_backward_rows(BFloat16Bits* d_gate_up, BFloat16Bits* y, const BFloat16Bits* d_y,
                         const BFloat16Bits* gate_up, int64_t num_rows, int64_t width) {
  const __m512 one = _mm512_set1_ps(1);
  for (int64_t r = 0; r < num_rows;
       ++r, y += width, d_y += width, gate_up += 2 * width, d_gate_up += 2 * width)
    for (int64_t f = 0; f < width; f += kNeighbours) {
      const Lanes g = load_lanes(gate_up + f), u = load_lanes(gate_up + width + f), d = load_lanes(d_y + f);
      const Lanes s = sigmoid(gate_argument<kActivation>(g)), d_s = d * s, gs = g * s;
      const Lanes slope = multiply_add(gate_steepness<kActivation>(g),
                                       {_mm512_sub_ps(one, s.even), _mm512_sub_ps(one, s.odd)}, {one, one});
      store_lanes(d_gate_up + f, d_s * u * slope);
      store_lanes(d_gate_up + width + f, d * gs);
      store_lanes(y + f, gs * u);
    }
}
}  // namespace

void swiglu_rows(BFloat16Bits* y, const BFloat16Bits* gate_up, int64_t num_rows, int64_t width,
                 GateActivation activation) {
  const auto rows = activation == GateActivation::kSilu ? gated_rows<GateActivation::kSilu>
                                                        : gated_rows<GateActivation::kGeluTanh>;
  rows(y, gate_up, num_rows, width);
}

void swiglu_backward_rows(BFloat16Bits* d_gate_up, BFloat16Bits* y, const BFloat16Bits* d_y,
                          const BFloat16Bits* gate_up, int64_t num_rows, int64_t width,
                          GateActivation activation) {
  const auto rows = activation == GateActivation::kSilu ? gated_backward_rows<GateActivation::kSilu>
                                                        : gated_backward_rows<GateActivation::kGeluTanh>;
  rows(d_gate_up, y, d_y, gate_up, num_rows, width);
}

}  // namespace bough::bf16
