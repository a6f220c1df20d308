// GAE (Schulman et al. 2016): advantages of the tokens of one sequence from a critic's values.
//   delta_t = rew_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lambda A_{t+1},   returns = A + V
// t runs over the trained tokens. Other tokens are skipped and get A = 0 and returns = V. V_t is the critic's
// value before token t is sampled. V after the last token is 0, but if `truncated`, it is the V of the last
// trained token. With gamma = 1 that V would be its own target and could grow without bound. Therefore
// callers set `truncated` only with bootstrap_truncated, which is off by default.
//
// With turns, a time step k is a turn (AReaL's gae_timestep_unit: turn). V_k is the value of the turn's first
// trained token, rew_k the sum of the turn's rewards. All tokens of the turn get A_k.
//
// The estimator gae takes V from a critic and whitens A over all trained tokens of the batch. The estimator
// turn_returns has no critic: all tokens of turn k get R_k = rew_k + turn_discount R_{k+1}. This is GAE by
// turn with V = 0 and lambda = 1.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace bough {

struct GaeInput {  // one entry per token of the sequence
  std::span<const double> rewards, values;
  std::span<const uint8_t> trained;
  std::span<const int32_t> turns = {};  // adjacent equal numbers are one turn; empty: a time step is a token
  bool truncated = false;
};

struct GaeResult {
  std::vector<double> advantages, returns;
};

GaeResult gae(const GaeInput& input, double gamma, double lambda);

}  // namespace bough
