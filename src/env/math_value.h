// Values of expressions in prime fields and in real numbers of 106 bits.
//
// Modulo a prime p:
// - Each variable, pi and e have a pseudorandom value. The value of i is a square root of -1.
// - A root or function without a rational value is an unknown. Its pseudorandom value is derived from the
//   value of its argument.
// - Equal expressions have equal values, unless their equality needs a law about roots or functions.
// - Two different rational expressions have equal values with a probability of at most degree / p.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "env/math_expression.h"

namespace bough {

class PrimeField {
 public:
  // `seed` determines the prime, which has 61 bits, and the values of all variables, pi and e.
  explicit PrimeField(uint64_t seed);

  // Sets `unknowns` to true if a root or a function was treated as an unknown. Another `salt` gives the
  // variables other values. nullopt if there is no value (1/0) or an exponent is too large.
  std::optional<uint64_t> value(const Expression& e, bool& unknowns, uint64_t salt = 0) const;

  uint64_t times(uint64_t a, uint64_t b) const;

 private:
  uint64_t plus(uint64_t a, uint64_t b) const { return (a + b) % p_; }
  uint64_t minus(uint64_t a) const { return a == 0 ? 0 : p_ - a; }
  std::optional<uint64_t> inverse(uint64_t a) const;
  uint64_t from(__int128 value) const;
  uint64_t named(const std::string& name) const;
  uint64_t unknown(const std::string& name, uint64_t argument, uint64_t other, bool& unknowns) const;
  std::optional<uint64_t> number(const std::string& text) const;
  std::optional<uint64_t> power(const Expression& base, const Expression& exponent, bool& unknowns,
                                uint64_t salt) const;
  std::optional<uint64_t> root(const Expression& of, int64_t n, bool& unknowns, uint64_t salt) const;
  std::optional<uint64_t> function(const Expression& e, bool& unknowns, uint64_t salt) const;

  uint64_t seed_;
  uint64_t p_ = 0;
  uint64_t i_ = 0;  // a square root of -1
};

// Whether a and b have the same real value, to 26 digits, at random values of the variables. Values at which
// a or b is not real are skipped. Returns false for long expressions, because two different long expressions
// can agree to 26 digits.
bool agree_in_reals(const Expression& a, const Expression& b);

bool has_variables(const Expression& e);
size_t count_nodes(const Expression& e);

}  // namespace bough
