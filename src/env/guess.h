// The task `guess`: the model must find a number in a few guesses. Each guess is answered by higher or lower.
//
//   user       My number is from 3 to 18. You have 4 guesses.
//   assistant  10
//   user       lower
//   ...
//
// A right guess ends the game with reward 1. If all guesses are used up, the reward is 0. A turn without a
// number is a wasted guess. The task has no tools: it is the smallest one whose turns depend on each other.
// Bisection finds 15 of 16 numbers in four guesses. Random guesses in the remaining range find far fewer.
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
    v("max_low", max_low, "a range starts at a random number from 1 to max_low", range(1, 1'000'000));
    v("width", width, "numbers in a range", range(2, 1'000'000));
    v("guesses", guesses, "guesses of a game", range(1, 64));
    v("slips", slips, "share of the guesses of demonstrations that ignore the previous answers",
      range(0.0, 1.0));
  }
};

// Like make_calculator_problems and make_calculator_traces (calculator.h). Problems also have low, high and
// guesses. Demonstrations guess at random in the remaining range.
std::vector<Json> make_guess_problems(int64_t n, Split split, uint64_t seed, const GuessSettings& settings);
std::vector<Json> make_guess_traces(int64_t n, Split split, uint64_t seed, const GuessSettings& settings);

std::unique_ptr<Episode> make_guess();

}  // namespace bough
