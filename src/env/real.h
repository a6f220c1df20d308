// Real numbers of 106 bits, each the unevaluated sum of two doubles, and functions that occur in answers.
// - The relative errors of + - * / sqrt are a few 2^-104.
// - The relative errors of the other functions are below 1e-29 for arguments up to a thousand.
// - If a value is undefined, both parts are NaN.
//
// Source: T. J. Dekker, "A floating-point technique for extending the available precision", 1971. The code
// needs IEEE arithmetic in the written order, so it must not be compiled with -ffast-math.
#pragma once

namespace bough {

struct Real {
  double high = 0;
  double low = 0;

  Real() = default;
  Real(double value) : high(value) {}
  Real(double h, double l) : high(h), low(l) {}
};

Real operator+(Real a, Real b);
Real operator-(Real a);
Real operator-(Real a, Real b);
Real operator*(Real a, Real b);
Real operator/(Real a, Real b);

bool is_finite(Real a);
Real abs(Real a);
Real square_root(Real a);
Real power(Real base, long long exponent);
Real exponential(Real a);
Real logarithm(Real a);
Real sine(Real a);
Real cosine(Real a);
Real arc_tangent(Real a);
Real real_pi();

}  // namespace bough
