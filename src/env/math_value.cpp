#include "env/math_value.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/random.h"
#include "env/double_double.h"

namespace bough {

namespace {

using Kind = Expression::Kind;
using Wide = __int128;

constexpr double kMostHeight = 24;    // sum of the heights of two expressions that real arithmetic compares
constexpr double kAgreement = 1e-26;  // relative, in real arithmetic; a Real has 32 digits
constexpr double kZero = 1e-28;       // in real arithmetic, smaller values are zero
constexpr int kPoints = 8;            // evaluation points for expressions with variables
constexpr int64_t kMostFactorial = 2'000;

// ---- Exact values of small numbers.

struct Rational {
  Wide numerator = 0;
  Wide denominator = 1;  // positive; the fraction is in lowest terms
};

Wide absolute(Wide a) {
  return a < 0 ? -a : a;
}

std::optional<Rational> rational(Wide numerator, Wide denominator) {
  constexpr Wide kMost = static_cast<Wide>(1) << 120;
  if (denominator == 0 || absolute(numerator) > kMost || absolute(denominator) > kMost) return std::nullopt;
  Wide a = absolute(numerator), b = absolute(denominator);
  while (b != 0) a = std::exchange(b, a % b);
  if (denominator < 0) a = -a;
  return Rational{numerator / a, denominator / a};
}

std::optional<Rational> times(const Rational& a, const Rational& b) {
  Wide numerator, denominator;
  if (__builtin_mul_overflow(a.numerator, b.numerator, &numerator) ||
      __builtin_mul_overflow(a.denominator, b.denominator, &denominator))
    return std::nullopt;
  return rational(numerator, denominator);
}

std::optional<Rational> plus(const Rational& a, const Rational& b) {
  Wide left, right, sum, denominator;
  if (__builtin_mul_overflow(a.numerator, b.denominator, &left) ||
      __builtin_mul_overflow(b.numerator, a.denominator, &right) ||
      __builtin_add_overflow(left, right, &sum) ||
      __builtin_mul_overflow(a.denominator, b.denominator, &denominator))
    return std::nullopt;
  return rational(sum, denominator);
}

std::optional<Rational> raised(const Rational& base, int64_t exponent) {
  if (std::abs(exponent) > 128 && absolute(base.numerator) != base.denominator) return std::nullopt;
  if (exponent < 0) {
    if (base.numerator == 0) return std::nullopt;
    const auto inverse = rational(base.denominator, base.numerator);
    return inverse ? raised(*inverse, -exponent) : std::nullopt;
  }
  if (exponent == 0 && base.numerator == 0) return std::nullopt;
  if (absolute(base.numerator) == base.denominator)
    return Rational{base.numerator > 0 || exponent % 2 == 0 ? 1 : -1, 1};
  std::optional<Rational> value = Rational{1, 1};
  for (int64_t i = 0; i < exponent && value; ++i) value = times(*value, base);
  return value;
}

// Digits, point and exponent of a number's text.
struct Digits {
  std::string digits;    // without the point
  int64_t exponent = 0;  // the power of ten
};
std::optional<Digits> digits_of(const std::string& text) {
  Digits out;
  const size_t e = text.find('e');
  const std::string mantissa = text.substr(0, e);
  if (e != std::string::npos) {
    const std::string exponent = text.substr(e + 1);
    if (exponent.size() > 10) return std::nullopt;
    out.exponent = std::stoll(exponent);
  }
  const size_t point = mantissa.find('.');
  out.digits = mantissa;
  if (point != std::string::npos) {
    out.digits.erase(point, 1);
    out.exponent -= static_cast<int64_t>(mantissa.size() - point - 1);
  }
  return out;
}

// The value of a constant if it is a rational number whose parts fit into Rational. Roots are not evaluated.
std::optional<Rational> exact(const Expression& e) {
  switch (e.kind) {
    case Kind::kNumber: {
      const auto digits = digits_of(e.text);
      if (!digits || digits->digits.size() > 30 || std::abs(digits->exponent) > 30) return std::nullopt;
      Wide value = 0;
      for (const char c : digits->digits) value = value * 10 + (c - '0');
      const auto scale = raised({10, 1}, digits->exponent), whole = rational(value, 1);
      return scale && whole ? times(*scale, *whole) : std::nullopt;
    }
    case Kind::kSum: {
      std::optional<Rational> sum = Rational{};
      for (const Expression& child : e.children) {
        const auto term = exact(child);
        sum = term && sum ? plus(*sum, *term) : std::nullopt;
        if (!sum) break;
      }
      return sum;
    }
    case Kind::kNegate: {
      auto value = exact(e.children[0]);
      if (value) value->numerator = -value->numerator;
      return value;
    }
    case Kind::kProduct:
    case Kind::kQuotient: {
      const auto left = exact(e.children[0]);
      const auto right = left ? exact(e.children[1]) : std::nullopt;
      if (!right) return std::nullopt;
      if (e.kind == Kind::kProduct) return times(*left, *right);
      const auto inverse = rational(right->denominator, right->numerator);
      return inverse ? times(*left, *inverse) : std::nullopt;
    }
    case Kind::kPower: {
      const auto exponent = exact(e.children[1]);
      if (!exponent || exponent->denominator != 1 || absolute(exponent->numerator) > 1'000'000)
        return std::nullopt;
      const auto base = exact(e.children[0]);
      return base ? raised(*base, static_cast<int64_t>(exponent->numerator)) : std::nullopt;
    }
    default: return std::nullopt;
  }
}

std::optional<int64_t> exact_integer(const Expression& e) {
  const auto value = exact(e);
  constexpr Wide kMost = std::numeric_limits<int64_t>::max();
  if (!value || value->denominator != 1 || absolute(value->numerator) > kMost) return std::nullopt;
  return static_cast<int64_t>(value->numerator);
}

// The integer n-th root of a, if it exists.
std::optional<Wide> whole_root(Wide a, int64_t n) {
  if (a < 0) return std::nullopt;
  const auto guess = static_cast<Wide>(std::llround(std::pow(static_cast<long double>(a), 1.0L / n)));
  for (Wide root = std::max<Wide>(0, guess - 1); root <= guess + 1; ++root) {
    const auto power = root <= 1 ? std::optional(Rational{root, 1}) : raised({root, 1}, n);
    if (power && power->numerator == a) return root;
  }
  return std::nullopt;
}

// ---- Prime fields.

uint64_t times_mod(uint64_t a, uint64_t b, uint64_t p) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b % p);
}
uint64_t power_mod(uint64_t base, uint64_t exponent, uint64_t p) {
  uint64_t value = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) value = times_mod(value, base, p);
    base = times_mod(base, base, p);
  }
  return value;
}

bool is_prime(uint64_t n) {  // Miller-Rabin; these bases decide all 64-bit numbers
  constexpr std::array<uint64_t, 12> kBases{2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37};
  for (const uint64_t b : kBases)
    if (n % b == 0) return n == b;
  const int twos = __builtin_ctzll(n - 1);
  const uint64_t odd = (n - 1) >> twos;
  return std::all_of(kBases.begin(), kBases.end(), [&](uint64_t base) {
    uint64_t x = power_mod(base, odd, n);
    if (x == 1 || x == n - 1) return true;
    for (int i = 1; i < twos; ++i) {
      x = times_mod(x, x, n);
      if (x == n - 1) return true;
    }
    return false;
  });
}

}  // namespace

PrimeField::PrimeField(uint64_t seed) : seed_(seed) {
  constexpr uint64_t kLeast = uint64_t{1} << 60;
  p_ = kLeast + (seed % kLeast) / 4 * 4 + 1;
  while (!is_prime(p_)) p_ += 4;
  for (uint64_t g = 2;; ++g) {
    if (power_mod(g, (p_ - 1) / 2, p_) != p_ - 1) continue;
    i_ = power_mod(g, (p_ - 1) / 4, p_);
    break;
  }
}

uint64_t PrimeField::times(uint64_t a, uint64_t b) const {
  return times_mod(a, b, p_);
}
std::optional<uint64_t> PrimeField::inverse(uint64_t a) const {
  if (a == 0) return std::nullopt;
  return power_mod(a, p_ - 2, p_);
}
std::optional<uint64_t> PrimeField::value(const Expression& e, bool& unknowns, uint64_t salt) const {
  const auto child = [&](size_t i) { return value(e.children[i], unknowns, salt); };
  switch (e.kind) {
    case Kind::kNumber: return number(e.text);
    case Kind::kSymbol:
      if (e.text == "i") return i_;
      return named(e.text == "pi" || e.text == "e" ? e.text : str(e.text, "#", salt));
    case Kind::kSum: {
      uint64_t sum = 0;
      for (size_t i = 0; i < e.children.size(); ++i) {
        const auto term = child(i);
        if (!term) return std::nullopt;
        sum = plus(sum, *term);
      }
      return sum;
    }
    case Kind::kNegate: {
      const auto inside = child(0);
      return inside ? std::optional(minus(*inside)) : std::nullopt;
    }
    case Kind::kProduct:
    case Kind::kQuotient: {
      const auto left = child(0), right = child(1);
      if (!left || !right) return std::nullopt;
      if (e.kind == Kind::kProduct) return times(*left, *right);
      const auto below = inverse(*right);
      return below ? std::optional(times(*left, *below)) : std::nullopt;
    }
    case Kind::kPower: return power(e.children[0], e.children[1], unknowns, salt);
    case Kind::kFunction: return function(e, unknowns, salt);
    default: return std::nullopt;
  }
}

uint64_t PrimeField::named(const std::string& name) const {
  const std::string whole = str(seed_, ":", name);
  return stable_hash(whole.data(), whole.size()) % p_;
}
uint64_t PrimeField::unknown(const std::string& name, uint64_t argument, uint64_t other,
                             bool& unknowns) const {
  unknowns = true;
  return named(str(name, "(", argument, ",", other, ")"));
}
uint64_t PrimeField::from(Wide value) const {
  const Wide rest = value % static_cast<Wide>(p_);
  return static_cast<uint64_t>(rest < 0 ? rest + static_cast<Wide>(p_) : rest);
}

std::optional<uint64_t> PrimeField::number(const std::string& text) const {
  const auto digits = digits_of(text);
  if (!digits) return std::nullopt;
  uint64_t value = 0;
  for (const char c : digits->digits) value = plus(times(value, 10), static_cast<uint64_t>(c - '0'));
  const uint64_t scale = power_mod(10, static_cast<uint64_t>(std::abs(digits->exponent)), p_);
  if (digits->exponent >= 0) return times(value, scale);
  return times(value, *inverse(scale));
}

std::optional<uint64_t> PrimeField::power(const Expression& base, const Expression& exponent, bool& unknowns,
                                          uint64_t salt) const {
  const auto below = value(base, unknowns, salt);
  if (!below) return std::nullopt;
  if (const auto whole = exact_integer(exponent)) {
    if (*below == 0) return *whole > 0 ? std::optional(uint64_t{0}) : std::nullopt;
    const uint64_t raised = power_mod(*below, static_cast<uint64_t>(std::abs(*whole)), p_);
    return *whole >= 0 ? std::optional(raised) : inverse(raised);
  }
  const auto quotient = exact(exponent);
  if (quotient && quotient->denominator <= 64 && absolute(quotient->numerator) <= 1'000'000) {
    const auto taken = root(base, static_cast<int64_t>(quotient->denominator), unknowns, salt);
    if (!taken || *taken == 0) return std::nullopt;
    const uint64_t raised = power_mod(*taken, static_cast<uint64_t>(absolute(quotient->numerator)), p_);
    return quotient->numerator >= 0 ? std::optional(raised) : inverse(raised);
  }
  const auto above = value(exponent, unknowns, salt);
  return above ? std::optional(unknown("power", *below, *above, unknowns)) : std::nullopt;
}

std::optional<uint64_t> PrimeField::root(const Expression& of, int64_t n, bool& unknowns,
                                         uint64_t salt) const {
  if (n == 1) return value(of, unknowns, salt);
  if (const auto known = exact(of)) {
    const auto above = whole_root(absolute(known->numerator), n), below = whole_root(known->denominator, n);
    const bool negative = known->numerator < 0;
    if (above && below && (!negative || n == 2)) {
      const uint64_t value = times(from(*above), *inverse(from(*below)));
      return negative ? times(value, i_) : value;
    }
    constexpr Wide kMost = static_cast<Wide>(1) << 50;
    if (n == 2 && absolute(known->numerator) < kMost && known->denominator < kMost) {
      // sqrt(a / b) = sqrt(a b) / b, with square factors moved out of a b.
      Wide rest = absolute(known->numerator) * known->denominator, outside = 1;
      for (Wide d = 2; d < 2000 && d * d <= rest; ++d) {
        while (rest % (d * d) == 0) {
          rest /= d * d;
          outside *= d;
        }
      }
      uint64_t value = times(from(outside), *inverse(from(known->denominator)));
      value = times(value, unknown("root", from(rest), 2, unknowns));
      return negative ? times(value, i_) : value;
    }
  }
  const auto inside = value(of, unknowns, salt);
  return inside ? std::optional(unknown("root", *inside, static_cast<uint64_t>(n), unknowns)) : std::nullopt;
}

std::optional<uint64_t> PrimeField::function(const Expression& e, bool& unknowns, uint64_t salt) const {
  if (e.text == "root") {
    const auto index = exact_integer(e.children[1]);
    if (!index || *index < 2 || *index > 64) return std::nullopt;
    return root(e.children[0], *index, unknowns, salt);
  }
  if (e.text == "factorial" || e.text == "binomial") {
    const auto n = exact_integer(e.children[0]);
    const auto k = e.text == "binomial" ? exact_integer(e.children[1]) : n;
    if (n && k && *k >= 0 && *k <= *n && *n <= kMostFactorial) {
      uint64_t above = 1, below = 1;
      for (int64_t i = 0; i < *k; ++i) {
        above = times(above, static_cast<uint64_t>(*n - i));
        if (e.text == "binomial") below = times(below, static_cast<uint64_t>(i + 1));
      }
      return times(above, *inverse(below));
    }
  }
  if (e.text == "abs") {
    const auto known = exact(e.children[0]);
    if (known) return times(from(absolute(known->numerator)), *inverse(from(known->denominator)));
  }
  std::array<uint64_t, 2> arguments{0, 0};
  for (size_t i = 0; i < e.children.size() && i < 2; ++i) {
    const auto argument = value(e.children[i], unknowns, salt);
    if (!argument) return std::nullopt;
    arguments[i] = *argument;
  }
  return unknown(e.text, arguments[0], arguments[1], unknowns);
}

bool has_variables(const Expression& e) {
  if (e.kind == Kind::kSymbol) return e.text != "pi" && e.text != "e";
  return std::any_of(e.children.begin(), e.children.end(), has_variables);
}

size_t count_nodes(const Expression& e) {
  size_t count = 1;
  for (const Expression& child : e.children) count += count_nodes(child);
  return count;
}

namespace {

// ---- Real values.

// The value of e at random point number `point`, which gives each variable (also i) a value. NaN if there is
// no real value or it is not accurate enough.
DoubleDouble real_value(const Expression& e, int point) {
  const auto child = [&](size_t i) { return real_value(e.children[i], point); };
  const DoubleDouble none = logarithm(-1);
  switch (e.kind) {
    case Kind::kNumber: {
      const auto digits = digits_of(e.text);
      if (!digits || digits->digits.size() > 30 || std::abs(digits->exponent) > 300) return none;
      DoubleDouble value;
      for (const char c : digits->digits) value = value * DoubleDouble(10) + DoubleDouble(c - '0');
      return value * power(10, digits->exponent);
    }
    case Kind::kSymbol: {
      if (e.text == "pi") return real_pi();
      if (e.text == "e") return exponential(1);
      const CounterRandom random(7, Purpose::test);
      const double size =
          0.3 + 2.7 * random.uniform(stable_hash(e.text.data(), e.text.size()), static_cast<uint64_t>(point));
      const bool negative =
          point >= kPoints / 2 &&
          (random.bits(stable_hash(e.text.data(), e.text.size()), 100 + static_cast<uint64_t>(point)) & 1) !=
              0;
      return negative ? -size : size;
    }
    case Kind::kSum: {
      DoubleDouble sum;
      for (size_t i = 0; i < e.children.size(); ++i) sum = sum + child(i);
      return sum;
    }
    case Kind::kNegate: return -child(0);
    case Kind::kProduct: return child(0) * child(1);
    case Kind::kQuotient: return child(0) / child(1);
    case Kind::kPower: {
      const DoubleDouble base = child(0);
      if (const auto whole = exact_integer(e.children[1])) {
        if (base.high == 0 && *whole <= 0) return none;
        return std::abs(*whole) <= 100'000 ? power(base, *whole) : none;
      }
      if (base.high == 0) return none;
      return exponential(child(1) * logarithm(base));
    }
    case Kind::kFunction: break;
    default: return none;
  }
  const std::string& name = e.text;
  const DoubleDouble x = child(0);
  if (!is_finite(x)) return none;
  if (name == "root") {
    const auto index = exact_integer(e.children[1]);
    if (!index || *index < 2 || *index > 64) return none;
    if (*index == 2) return square_root(x);
    if (x.high == 0) return 0;
    if (x.high < 0 && *index % 2 == 0) return none;
    const DoubleDouble size = exponential(logarithm(abs(x)) / DoubleDouble(static_cast<double>(*index)));
    return x.high < 0 ? -size : size;
  }
  if (name == "factorial" || name == "binomial") {
    const auto n = exact_integer(e.children[0]);
    const auto k = name == "binomial" ? exact_integer(e.children[1]) : n;
    if (!n || !k || *k < 0 || *k > *n || *n > 100) return none;
    DoubleDouble value = 1;
    for (int64_t i = 0; i < *k; ++i)
      value = value * DoubleDouble(static_cast<double>(*n - i)) /
              DoubleDouble(name == "binomial" ? static_cast<double>(i + 1) : 1);
    return value;
  }
  const DoubleDouble half = DoubleDouble(0.5);
  if (name == "abs") return abs(x);
  if (name == "ln") return logarithm(x);
  if (name == "log") return logarithm(x) / logarithm(e.children.size() > 1 ? child(1) : DoubleDouble(10));
  if (name == "sin") return sine(x);
  if (name == "cos") return cosine(x);
  if (name == "tan") return sine(x) / cosine(x);
  if (name == "cot") return cosine(x) / sine(x);
  if (name == "sec") return DoubleDouble(1) / cosine(x);
  if (name == "csc") return DoubleDouble(1) / sine(x);
  if (name == "sinh") return (exponential(x) - exponential(-x)) * half;
  if (name == "cosh") return (exponential(x) + exponential(-x)) * half;
  if (name == "tanh") return DoubleDouble(1) - DoubleDouble(2) / (exponential(x + x) + DoubleDouble(1));
  if (name == "arctan") return arc_tangent(x);
  if (name == "arcsin" || name == "arccos") {
    if (!(std::abs(x.high) < 1)) {
      if (abs(x).high != 1 || x.low != 0) return none;
      const DoubleDouble right = x.high > 0 ? real_pi() * half : -(real_pi() * half);
      return name == "arcsin" ? right : real_pi() * half - right;
    }
    const DoubleDouble angle = arc_tangent(x / square_root(DoubleDouble(1) - x * x));
    return name == "arcsin" ? angle : real_pi() * half - angle;
  }
  return none;
}

// The length of an expression, in digits: the digits of its numbers, plus twice the absolute values of their
// powers of ten, plus 1 per symbol. A power multiplies the length of its base by the value of its exponent. A
// function of kSaturating adds the value of its argument, because it can come close to a simpler expression
// (tanh 50 is nearly 1).
double height(const Expression& e) {
  if (e.kind == Kind::kNumber) {
    const auto digits = digits_of(e.text);
    if (!digits) return 1e9;
    return static_cast<double>(digits->digits.size()) + 2 * std::abs(static_cast<double>(digits->exponent));
  }
  double sum = e.kind == Kind::kSymbol ? 1 : 0;
  for (const Expression& child : e.children) sum += height(child);
  const auto size_of = [](const Expression& constant) {
    if (has_variables(constant)) return 1.0;
    const double size = std::abs(real_value(constant, 0).high);
    return size >= 0 ? std::max(1.0, size) : 1e9;  // false for NaN
  };
  if (e.kind == Kind::kPower) return height(e.children[0]) * size_of(e.children[1]) + height(e.children[1]);
  if (e.kind == Kind::kFunction) {
    if (e.text == "root") return height(e.children[0]) + height(e.children[1]);
    if (e.text == "factorial" || e.text == "binomial") return sum * 2;
    static constexpr std::string_view kSaturating[] = {"sinh", "cosh", "tanh", "arctan"};
    if (std::find(std::begin(kSaturating), std::end(kSaturating), e.text) != std::end(kSaturating))
      return sum + size_of(e.children[0]) - 1;
  }
  return sum;
}

}  // namespace

bool agree_in_reals(const Expression& a, const Expression& b) {
  if (height(a) + height(b) > kMostHeight) return false;
  const bool constant = !has_variables(a) && !has_variables(b);
  int met = 0;
  for (int point = 0; point < (constant ? 1 : kPoints); ++point) {
    const DoubleDouble left = real_value(a, point), right = real_value(b, point);
    if (!is_finite(left) || !is_finite(right)) continue;
    const double scale = std::max(std::abs(left.high), std::abs(right.high));
    if (scale > kZero && !(std::abs((left - right).high) <= kAgreement * scale)) return false;
    ++met;
  }
  return met >= (constant ? 1 : 3);
}

}  // namespace bough
