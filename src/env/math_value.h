// What an expression is worth: in prime fields, and in real numbers of 106 bits.
//
// Modulo a prime p each variable, and pi and e, has a random value; a root of -1 stands for i; a root or a
// function of something that has no rational value is an unknown of its own, whose value is drawn by the
// value of its argument. So equal expressions that need no law about roots and functions have equal values.
// Two rational expressions that differ have equal values with a chance of degree / p.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "env/math_expression.h"

namespace bough {

class PrimeField {
 public:
  // A prime of 61 bits, and values for all names, drawn by `seed`.
  explicit PrimeField(uint64_t seed);

  // `unknowns` is set where a root or a function was taken for an unknown; another `salt` gives the variables
  // other values. nullopt: no value, as of 1/0, or too large an exponent.
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
  uint64_t i_ = 0;  // a root of -1
};

// Do both have the same real value, to 26 digits, at random values of the variables where both have one? Only
// of expressions so short that different ones are not so near; false for longer ones.
bool agree_in_reals(const Expression& a, const Expression& b);

bool has_variables(const Expression& e);
size_t count_nodes(const Expression& e);

}  // namespace bough
