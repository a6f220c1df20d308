// Selects the sampled sequences to train on. Each filter counts the sequences that it drops.
//
// Oversampling (DistillSparse, equation 4) keeps n = keep_samples of the M samples of a group:
//   keep_samples_by reward      the samples with the highest rewards
//   keep_samples_by acceptance  the samples with the highest acceptance under the trained policy (the oracle
//                               of figure 4); this needs a forward pass over all M
// On ties, the earlier sample is kept. The group's mean and deviation are of the n kept rewards.
//
// Filters apply in this order. A dropped sample does not count in its group's mean.
//   1. samples without a reward
//   2. truncated samples
//   3. samples beyond keep_samples
//   4. groups that have a token that is too old, have equal rewards (if dynamic_sampling), or lost samples by
//      filter 1 or 2 and have fewer than two left
// A group with a single sample has no baseline for its advantage. Groups that had one sample at first are
// kept.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/settings.h"

namespace bough {

struct FilterSettings {
  bool dynamic_sampling = false;
  std::string truncated_samples = "keep";
  int64_t max_num_gen_batches = 10;
  int64_t keep_samples = 0;
  std::string keep_samples_by = "reward";

  template <class V>
  void visit(V& v) {
    v("dynamic_sampling", dynamic_sampling,
      "drop groups whose rewards are all equal, because they have no gradient; a run samples other groups");
    v("max_num_gen_batches", max_num_gen_batches,
      "most batches to generate for a step if filters drop groups. The step then trains on the groups "
      "that are left; if there are none, the run ends. 0: no limit",
      range(0, 1'000'000));
    v("truncated_samples", truncated_samples,
      "samples cut at the length limit: keep; mask (count in the group's mean, but are not trained); drop",
      one_of({"keep", "mask", "drop"}));
    v("keep_samples", keep_samples,
      "number of samples per group that are kept; the rest counts in neither mean nor loss. 0: all",
      range(0, 100000));
    v("keep_samples_by", keep_samples_by,
      "keep_samples keeps the samples with the highest reward, or with the highest acceptance under the "
      "trained policy (needs a forward pass over all samples)",
      one_of({"reward", "acceptance"}));
  }
  bool needs_acceptance() const { return keep_samples > 0 && keep_samples_by == "acceptance"; }
  void check() const;  // throws UserError if settings contradict each other
};

// One entry per sequence, [S]. The caller owns the lists.
struct FilterInput {
  std::span<const double> rewards;  // the rewards that advantages are computed from
  std::span<const int64_t> groups;
  std::span<const uint8_t> truncated;
  std::span<const uint8_t> valid = {};      // 0: has no reward and is dropped first; empty: all are valid
  std::span<const uint8_t> stale = {};      // 1: has a token that is too old: drops its group; empty: none
  std::span<const double> acceptance = {};  // mean over a sequence's tokens; set if needs_acceptance()
};

// The means over the samples that would be kept if each group had only its first `width` samples.
struct KeptByWidth {
  int64_t width = 0;
  double reward = 0;
  std::optional<double> acceptance;  // nullopt if FilterInput has none
};

struct FilterResult {
  std::vector<uint8_t> kept;      // [S] 1: counts in its group's advantages
  std::vector<uint8_t> trained;   // [S] 1: kept, and its tokens enter the loss
  int64_t truncated = 0;          // truncated samples among the valid ones
  int64_t truncated_masked = 0;   // truncated samples that are kept but not trained
  int64_t truncated_dropped = 0;  // truncated samples that are not kept
  int64_t surplus_dropped = 0;    // samples beyond keep_samples
  int64_t zero_std_groups = 0;    // groups of two or more with equal rewards, dropped or not
  int64_t stale_groups = 0;       // groups dropped because a token in them is too old
  int64_t masked_tokens = 0;      // tokens masked because they are too old; set by the caller that masks them
  int64_t groups_dropped = 0;     // groups dropped by filter 4
  int64_t sequences_dropped = 0;  // all sequences that are not kept
  // Covers the groups with more than n = keep_samples candidates (samples that filters 1 and 2 left). m is
  // the number of candidates of the smallest such group. Widths: m, and those of n, 1.5 n, 2 n and 3 n that
  // are at most m.
  std::vector<KeptByWidth> by_width;
};

// A sequence that is not valid (FilterInput::valid) counts in sequences_dropped and in no other sample count.
// Throws UserError if truncated_samples or keep_samples_by has an unknown value.
FilterResult filter_sequences(const FilterSettings& settings, const FilterInput& input);

}  // namespace bough
