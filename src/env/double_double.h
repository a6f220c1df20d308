// Real numbers of 106 bits, each the unevaluated sum of two doubles, and the functions that occur in
// mathematical answers.
// - The relative errors of + - * / sqrt are a few 2^-104.
// - The relative errors of the other functions are below 1e-29 for arguments up to a thousand.
// - If a value is undefined, both parts are NaN.
//
// Source: T. J. Dekker, "A floating-point technique for extending the available precision", 1971. The code
// needs IEEE arithmetic in the written order, so it must not be compiled with -ffast-math.
#pragma once

namespace bough {

struct DoubleDouble {
  double high = 0;
  double low = 0;

  DoubleDouble() = default;
  DoubleDouble(double value) : high(value) {}
  DoubleDouble(double h, double l) : high(h), low(l) {}
};

DoubleDouble operator+(DoubleDouble a, DoubleDouble b);
DoubleDouble operator-(DoubleDouble a);
DoubleDouble operator-(DoubleDouble a, DoubleDouble b);
DoubleDouble operator*(DoubleDouble a, DoubleDouble b);
DoubleDouble operator/(DoubleDouble a, DoubleDouble b);

bool is_finite(DoubleDouble a);
DoubleDouble abs(DoubleDouble a);
DoubleDouble square_root(DoubleDouble a);
DoubleDouble power(DoubleDouble base, long long exponent);
DoubleDouble exponential(DoubleDouble a);
DoubleDouble logarithm(DoubleDouble a);
DoubleDouble sine(DoubleDouble a);
DoubleDouble cosine(DoubleDouble a);
DoubleDouble arc_tangent(DoubleDouble a);
DoubleDouble real_pi();

}  // namespace bough
