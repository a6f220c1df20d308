// GAE (Schulman et al. 2016): advantages of the tokens of one sequence under a critic's values.
//   delta_t = rew_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lambda A_{t+1},   returns = A + V
// t runs over the trained tokens; others are skipped, with A = 0 and returns = V. V_t is the value before
// token t is drawn. After the end V = 0; a truncated sample bootstraps from its last trained token's V. (With
// gamma = 1 that V learns from itself and grows without end: the estimator does so only on request.)
//
// By turn: a step is a turn. V_k is that of the turn's first trained token, rew_k the sum over the turn, and
// A_k stands on all of its tokens (AReaL's gae_timestep_unit: turn).
//
// The estimator gae takes V from a critic and whitens A over all trained tokens of the batch. turn_returns
// has no critic: R_k = rew_k + turn_discount R_{k+1} on all tokens of turn k, GAE by turn with V = 0, lambda
// = 1.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace bough {

struct GaeInput {  // lists by token, of one length
  std::span<const double> rewards, values;
  std::span<const uint8_t> trained;
  std::span<const int32_t> turns = {};  // equal numbers in a row are a turn; empty: each token is a step
  bool truncated = false;
};

struct GaeResult {
  std::vector<double> advantages, returns;
};

GaeResult gae(const GaeInput& input, double gamma, double lambda);

}  // namespace bough
