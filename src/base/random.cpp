#include "base/random.h"

#include <cmath>
#include <numbers>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace bough {

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  // Multipliers and Weyl increments of the Philox paper (section 3.3; golden ratio and sqrt(3) - 1).
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

namespace {
uint32_t low(uint64_t value) {
  return static_cast<uint32_t>(value);
}
uint32_t high(uint64_t value) {
  return static_cast<uint32_t>(value >> 32);
}
uint64_t join(uint32_t low_half, uint32_t high_half) {
  return low_half | static_cast<uint64_t>(high_half) << 32;
}

// Maps the bits to the middle of one of 2^52 equal cells of (0, 1). With 2^53 cells, the last middle would
// round to 1.
double open_unit(uint64_t bits) {
  return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
}
}  // namespace

CounterRandom::CounterRandom(uint64_t seed, Purpose purpose) {
  const auto mixed =
      philox4x32({low(seed), high(seed), static_cast<uint32_t>(purpose), 0}, {0x426F7567, 0x68});
  key_ = {mixed[0], mixed[1]};
}

std::array<uint32_t, 4> CounterRandom::block(uint64_t sequence, uint64_t position) const {
  return philox4x32({low(position), high(position), low(sequence), high(sequence)}, key_);
}

uint64_t CounterRandom::bits(uint64_t sequence, uint64_t position) const {
  const auto words = block(sequence, position);
  return join(words[0], words[1]);
}

double CounterRandom::uniform(uint64_t sequence, uint64_t position) const {
  return open_unit(bits(sequence, position));
}

double CounterRandom::normal(uint64_t sequence, uint64_t position) const {
  const auto words = block(sequence, position);
  const double radius = std::sqrt(-2.0 * std::log(open_unit(join(words[0], words[1]))));
  return radius * std::cos(2.0 * std::numbers::pi * open_unit(join(words[2], words[3])));
}

uint64_t CounterRandom::below(uint64_t n, uint64_t sequence, uint64_t position) const {
  BOUGH_CHECK(n > 0, "below(0)");
  // Lemire's method: the result is the upper half of a 64-bit random number times n. A lower half below 2^64
  // mod n would make some results more likely, so it is rejected. Then the second half of the 128-bit Philox
  // block is used, then a block computed from this one. So the function stays pure.
  auto words = block(sequence, position);
  const uint64_t unfair = (0 - n) % n;
  while (true) {
    for (int half = 0; half < 2; ++half) {
      const auto product = static_cast<unsigned __int128>(join(words[2 * half], words[2 * half + 1])) * n;
      if (static_cast<uint64_t>(product) >= unfair) return static_cast<uint64_t>(product >> 64);
    }
    words = philox4x32(words, key_);
  }
}

std::vector<size_t> CounterRandom::permutation(size_t n, uint64_t sequence) const {
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = n; i > 1; --i) std::swap(order[i - 1], order[below(i, sequence, i)]);
  return order;
}

uint64_t stable_hash(const void* data, size_t num_bytes) {
  uint64_t hash = 0xCBF29CE484222325;  // offset and prime of 64-bit FNV-1a
  for (size_t i = 0; i < num_bytes; ++i)
    hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001B3;
  const auto mixed = philox4x32({low(hash), high(hash), 0, 0}, {0, 0});
  return join(mixed[0], mixed[1]);
}

}  // namespace bough
