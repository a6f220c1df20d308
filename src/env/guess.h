// The task `guess`: a number is to be found in a few guesses, each answered with higher or lower.
//
//   user       My number is from 3 to 18. You have 4 guesses.
//   assistant  10
//   user       lower
//   ...
//
// 1 where a guess is right, which ends the game; 0 where the guesses are used up. A turn without a number is
// a guess that was wasted. No tools: the smallest environment in which a turn depends on what came before.
// Who halves what is left finds 15 of 16 numbers in four guesses; who guesses at random inside it far fewer.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/settings.h"
#include "env/environment.h"
#include "env/sums.h"

namespace bough {

struct GuessSettings {
  int64_t max_low = 80;
  int64_t width = 16;
  int64_t guesses = 4;
  double slips = 0;

  template <class V>
  void visit(V& v) {
    v("max_low", max_low, "the smallest number of a range is 1 to this", range(1, 1'000'000));
    v("width", width, "numbers in a range", range(2, 1'000'000));
    v("guesses", guesses, "guesses of a game", range(1, 64));
    v("slips", slips, "share of the guesses of demonstrations that forget what was answered",
      range(0.0, 1.0));
  }
};

// As those of the task calculator. Problems have low, high and guesses besides; demonstrations guess at
// random inside what is left.
std::vector<Json> make_guess_problems(int64_t n, Split split, uint64_t seed, const GuessSettings& settings);
std::vector<Json> make_guess_traces(int64_t n, Split split, uint64_t seed, const GuessSettings& settings);

std::unique_ptr<Episode> make_guess();

}  // namespace bough
