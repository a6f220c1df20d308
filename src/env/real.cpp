#include "env/real.h"

#include <cmath>
#include <limits>

namespace bough {

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Real two_sum(double a, double b) {
  const double sum = a + b, part = sum - a;
  return {sum, (a - (sum - part)) + (b - part)};
}
Real quick_two_sum(double a, double b) {  // requires |a| >= |b|
  const double sum = a + b;
  return {sum, b - (sum - a)};
}
Real checked(Real a) {
  return std::isfinite(a.high) && std::isfinite(a.low) ? a : Real(kNaN, kNaN);
}
Real scaled(Real a, int exponent) {
  return checked({std::ldexp(a.high, exponent), std::ldexp(a.low, exponent)});
}

const Real kPi{3.141592653589793116e+00, 1.224646799147353207e-16};
const Real kLogTwo{6.931471805599452862e-01, 2.319046813846299558e-17};

// Sum of a^k / k! over k = first, first + step, ..., with alternating signs if `alternate`. Requires |a| <=
// 1.
Real series(Real a, int first, int step, bool alternate) {
  Real term = 1;
  for (int k = 1; k <= first; ++k) term = term * a / Real(k);
  Real sum = term;
  for (int k = first; k < 60; k += step) {
    for (int j = 1; j <= step; ++j) term = term * a / Real(k + j);
    if (alternate) term = -term;
    sum = sum + term;
  }
  return sum;
}

// a minus the nearest multiple of pi / 2. `quadrant` is the multiple modulo 4.
Real reduced(Real a, int& quadrant) {
  const double multiple = std::nearbyint(a.high / (kPi.high / 2));
  if (!(std::abs(multiple) < 1e6)) return {kNaN, kNaN};  // too few digits would remain
  quadrant = static_cast<int>(std::fmod(std::fmod(multiple, 4) + 4, 4));
  // pi / 2 to 159 bits, so that a multiple of up to a million keeps a Real's precision.
  const Real half{kPi.high / 2, kPi.low / 2};
  const double third = -1.497384904859169777e-33;
  return a - Real(multiple) * half - Real(multiple * third);
}

}  // namespace

Real operator+(Real a, Real b) {
  const Real high = two_sum(a.high, b.high), low = two_sum(a.low, b.low);
  const Real sum = quick_two_sum(high.high, high.low + low.high);
  return checked(quick_two_sum(sum.high, sum.low + low.low));
}
Real operator-(Real a) {
  return {-a.high, -a.low};
}
Real operator-(Real a, Real b) {
  return a + -b;
}
Real operator*(Real a, Real b) {
  const double product = a.high * b.high;
  const double error = std::fma(a.high, b.high, -product);
  return checked(quick_two_sum(product, error + (a.high * b.low + a.low * b.high)));
}
Real operator/(Real a, Real b) {
  if (b.high == 0) return {kNaN, kNaN};
  const double first = a.high / b.high;
  const Real rest = a - b * Real(first);
  const double second = rest.high / b.high;
  const Real left = rest - b * Real(second);
  return checked(quick_two_sum(first, second) + Real(left.high / b.high));
}

bool is_finite(Real a) {
  return std::isfinite(a.high) && std::isfinite(a.low);
}
Real abs(Real a) {
  return a.high < 0 ? -a : a;
}

Real square_root(Real a) {
  if (a.high == 0) return 0;
  if (!(a.high > 0)) return {kNaN, kNaN};
  Real root = std::sqrt(a.high);
  for (int i = 0; i < 2; ++i) root = (root + a / root) * Real(0.5);  // Newton's method
  return root;
}

Real power(Real base, long long exponent) {
  if (exponent < 0) return Real(1) / power(base, -exponent);
  Real value = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) value = value * base;
    if (exponent > 1) base = base * base;
  }
  return value;
}

Real exponential(Real a) {
  if (!(std::abs(a.high) < 700)) return {kNaN, kNaN};
  const double twos = std::nearbyint(a.high / kLogTwo.high);
  // Squaring ten times loses few digits, because exp(x) - 1 is squared instead of exp(x).
  const Real small = scaled(a - Real(twos) * kLogTwo, -10);
  Real minus_one = series(small, 1, 1, false);
  for (int i = 0; i < 10; ++i) minus_one = minus_one * Real(2) + minus_one * minus_one;
  return scaled(minus_one + Real(1), static_cast<int>(twos));
}

Real logarithm(Real a) {
  if (!(a.high > 0)) return {kNaN, kNaN};
  Real value = std::log(a.high);
  for (int i = 0; i < 2; ++i) value = value + a * exponential(-value) - Real(1);  // Newton's method
  return value;
}

Real sine(Real a) {
  int quadrant = 0;
  const Real rest = reduced(a, quadrant);
  if (!is_finite(rest)) return {kNaN, kNaN};
  const Real value = quadrant % 2 == 0 ? series(rest, 1, 2, true) : series(rest, 0, 2, true);
  return quadrant < 2 ? value : -value;
}
Real cosine(Real a) {
  return sine(kPi * Real(0.5) + a);
}

Real arc_tangent(Real a) {
  Real value = std::atan(a.high);
  for (int i = 0; i < 2; ++i) {  // Newton's method on tan, whose derivative is 1 / cos^2
    const Real s = sine(value), c = cosine(value);
    value = value - (s - a * c) * c;
  }
  return value;
}

Real real_pi() {
  return kPi;
}

}  // namespace bough
