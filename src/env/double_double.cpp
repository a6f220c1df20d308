#include "env/double_double.h"

#include <cmath>
#include <limits>

namespace bough {

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

DoubleDouble two_sum(double a, double b) {
  const double sum = a + b, part = sum - a;
  return {sum, (a - (sum - part)) + (b - part)};
}
DoubleDouble quick_two_sum(double a, double b) {  // requires |a| >= |b|
  const double sum = a + b;
  return {sum, b - (sum - a)};
}
DoubleDouble checked(DoubleDouble a) {
  return std::isfinite(a.high) && std::isfinite(a.low) ? a : DoubleDouble(kNaN, kNaN);
}
DoubleDouble scaled(DoubleDouble a, int exponent) {
  return checked({std::ldexp(a.high, exponent), std::ldexp(a.low, exponent)});
}

const DoubleDouble kPi{3.141592653589793116e+00, 1.224646799147353207e-16};
const DoubleDouble kLogTwo{6.931471805599452862e-01, 2.319046813846299558e-17};

// Sum of a^k / k! over k = first, first + step, ..., with alternating signs if `alternate`. Requires |a| <=
// 1.
DoubleDouble series(DoubleDouble a, int first, int step, bool alternate) {
  DoubleDouble term = 1;
  for (int k = 1; k <= first; ++k) term = term * a / DoubleDouble(k);
  DoubleDouble sum = term;
  for (int k = first; k < 60; k += step) {
    for (int j = 1; j <= step; ++j) term = term * a / DoubleDouble(k + j);
    if (alternate) term = -term;
    sum = sum + term;
  }
  return sum;
}

// a - n * pi / 2, with the integer n that makes the result nearest to 0. Sets `quadrant` to n modulo 4.
DoubleDouble reduced(DoubleDouble a, int& quadrant) {
  const double multiple = std::nearbyint(a.high / (kPi.high / 2));
  if (!(std::abs(multiple) < 1e6)) return {kNaN, kNaN};  // too few digits would remain
  quadrant = static_cast<int>(std::fmod(std::fmod(multiple, 4) + 4, 4));
  // pi / 2 to 159 bits, so that its product with n up to a million is as precise as a DoubleDouble.
  const DoubleDouble half{kPi.high / 2, kPi.low / 2};
  const double third = -1.497384904859169777e-33;
  return a - DoubleDouble(multiple) * half - DoubleDouble(multiple * third);
}

}  // namespace

DoubleDouble operator+(DoubleDouble a, DoubleDouble b) {
  const DoubleDouble high = two_sum(a.high, b.high), low = two_sum(a.low, b.low);
  const DoubleDouble sum = quick_two_sum(high.high, high.low + low.high);
  return checked(quick_two_sum(sum.high, sum.low + low.low));
}
DoubleDouble operator-(DoubleDouble a) {
  return {-a.high, -a.low};
}
DoubleDouble operator-(DoubleDouble a, DoubleDouble b) {
  return a + -b;
}
DoubleDouble operator*(DoubleDouble a, DoubleDouble b) {
  const double product = a.high * b.high;
  const double error = std::fma(a.high, b.high, -product);
  return checked(quick_two_sum(product, error + (a.high * b.low + a.low * b.high)));
}
DoubleDouble operator/(DoubleDouble a, DoubleDouble b) {
  if (b.high == 0) return {kNaN, kNaN};
  const double first = a.high / b.high;
  const DoubleDouble rest = a - b * DoubleDouble(first);
  const double second = rest.high / b.high;
  const DoubleDouble left = rest - b * DoubleDouble(second);
  return checked(quick_two_sum(first, second) + DoubleDouble(left.high / b.high));
}

bool is_finite(DoubleDouble a) {
  return std::isfinite(a.high) && std::isfinite(a.low);
}
DoubleDouble abs(DoubleDouble a) {
  return a.high < 0 ? -a : a;
}

DoubleDouble square_root(DoubleDouble a) {
  if (a.high == 0) return 0;
  if (!(a.high > 0)) return {kNaN, kNaN};
  DoubleDouble root = std::sqrt(a.high);
  for (int i = 0; i < 2; ++i) root = (root + a / root) * DoubleDouble(0.5);  // Newton's method
  return root;
}

DoubleDouble power(DoubleDouble base, long long exponent) {
  if (exponent < 0) return DoubleDouble(1) / power(base, -exponent);
  DoubleDouble value = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) value = value * base;
    if (exponent > 1) base = base * base;
  }
  return value;
}

DoubleDouble exponential(DoubleDouble a) {
  if (!(std::abs(a.high) < 700)) return {kNaN, kNaN};
  const double twos = std::nearbyint(a.high / kLogTwo.high);
  // Computes exp(x) - 1 at a small x and squares exp(x) ten times. This loses few digits, because exp(x) - 1
  // is stored instead of exp(x).
  const DoubleDouble small = scaled(a - DoubleDouble(twos) * kLogTwo, -10);
  DoubleDouble minus_one = series(small, 1, 1, false);
  for (int i = 0; i < 10; ++i) minus_one = minus_one * DoubleDouble(2) + minus_one * minus_one;
  return scaled(minus_one + DoubleDouble(1), static_cast<int>(twos));
}

DoubleDouble logarithm(DoubleDouble a) {
  if (!(a.high > 0)) return {kNaN, kNaN};
  DoubleDouble value = std::log(a.high);
  for (int i = 0; i < 2; ++i) value = value + a * exponential(-value) - DoubleDouble(1);  // Newton's method
  return value;
}

DoubleDouble sine(DoubleDouble a) {
  int quadrant = 0;
  const DoubleDouble rest = reduced(a, quadrant);
  if (!is_finite(rest)) return {kNaN, kNaN};
  const DoubleDouble value = quadrant % 2 == 0 ? series(rest, 1, 2, true) : series(rest, 0, 2, true);
  return quadrant < 2 ? value : -value;
}
DoubleDouble cosine(DoubleDouble a) {
  return sine(kPi * DoubleDouble(0.5) + a);
}

DoubleDouble arc_tangent(DoubleDouble a) {
  DoubleDouble value = std::atan(a.high);
  for (int i = 0; i < 2; ++i) {  // Newton's method on tan, whose derivative is 1 / cos^2
    const DoubleDouble s = sine(value), c = cosine(value);
    value = value - (s - a * c) * c;
  }
  return value;
}

DoubleDouble real_pi() {
  return kPi;
}

}  // namespace bough
