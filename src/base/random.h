// Random numbers as a pure function of (seed, purpose, sequence, position). They do not depend on batching,
// number of threads or restarts. Method: Philox4x32-10 (J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bough {

// The use of a random number. Each purpose has its own stream.
enum class Purpose : uint32_t { sample, shuffle, init, environment, evaluation, acceptance, test };

// Ten rounds of Philox on a 128-bit counter under a 64-bit key.
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Within one seed and purpose, the same (sequence, position) always gives the same number. `sequence` is the
// index of what the number is for (a rollout, a parameter, an epoch). `position` counts the numbers of one
// `sequence`. Philox counter: position (64 bits), sequence (64 bits). Philox key: seed and purpose, mixed by
// one Philox call.
class CounterRandom {
 public:
  CounterRandom(uint64_t seed, Purpose purpose);

  uint64_t bits(uint64_t sequence, uint64_t position) const;               // 64 uniform bits
  double uniform(uint64_t sequence, uint64_t position) const;              // in (0, 1): neither 0 nor 1
  double normal(uint64_t sequence, uint64_t position) const;               // mean 0, variance 1 (Box-Muller)
  uint64_t below(uint64_t n, uint64_t sequence, uint64_t position) const;  // unbiased in [0, n); n > 0

  // A random order of 0 .. n-1 (Fisher-Yates with the random numbers of `sequence`).
  std::vector<size_t> permutation(size_t n, uint64_t sequence) const;

 private:
  std::array<uint32_t, 4> block(uint64_t sequence, uint64_t position) const;

  std::array<uint32_t, 2> key_;
};

// A 64-bit hash (FNV-1a, finished by Philox). Use it as `sequence` for what has a name but no index.
uint64_t stable_hash(const void* data, size_t num_bytes);

}  // namespace bough
