// Times decoding steps over long contexts with dense and with sparse attention, and compares them with the
// time to read the bytes that a step needs: `bough bench rollout --contexts`.
//
// The caches hold random keys and values. The FLOPs and bytes of a step do not depend on these numbers. The
// pages that sparse attention selects are scattered, and differ between samples.
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
  int64_t weight_bytes = 0;  // bytes of the weights that a step reads
};

struct DecodeTimes {
  int64_t context = 0;
  bool shared = false;                           // whether all samples have the same pages of context
  double dense_seconds = 0, sparse_seconds = 0;  // of one decoding step, medians
  double dense_bound = 0, sparse_bound = 0;      // bytes that a step reads / measured read rate, seconds
  double active_fraction = 0;                    // pages attended to / pages of the context
};

// Throws UserError if there is no sparse budget or summary, if the model is not on the CPU, or if a context
// is shorter than a page or longer than the model's maximum.
std::vector<DecodeTimes> run_decode_bench(const Model& model, const DecodeBench& bench);
void print_decode_bench(const std::vector<DecodeTimes>& times, bool json);

}  // namespace bough
