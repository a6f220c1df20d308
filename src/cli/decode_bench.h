// Steps of decoding over long contexts, dense beside sparse, beside the bytes that each has to read: `bough
// bench rollout --contexts`.
//
// The caches hold random keys and values, written once: what a step reads and computes does not depend on
// what they are, but the pages that are chosen are scattered, as no two samples agree on them.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/settings.h"
#include "models/model.h"

namespace bough {

struct DecodeBench {
  std::vector<int64_t> contexts;  // tokens
  int64_t samples = 8;
  int64_t repeat = 7;
  SparseSettings sparse;
  int64_t weight_bytes = 0;  // that a step reads
};

struct DecodeTimes {
  int64_t context = 0;
  bool shared = false;                           // the samples have all of their context in common
  double dense_seconds = 0, sparse_seconds = 0;  // of a step, medians
  double dense_bound = 0, sparse_bound = 0;      // the bytes of a step at the rate of reading them
  double active_fraction = 0;                    // pages attended to, of those of the context
};

// UserError where there is no budget, a context is not at least a page long or longer than the model takes.
std::vector<DecodeTimes> run_decode_bench(const Model& model, const DecodeBench& bench);
void print_decode_bench(const std::vector<DecodeTimes>& times, bool json);

}  // namespace bough
