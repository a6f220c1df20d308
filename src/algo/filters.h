// Which sampled sequences are trained on. Each filter counts what it drops.
//
// Oversampling (papers/distillsparse.txt, equation 4): of a group of M samples the n = keep_samples of
// highest reward, which are those of highest advantage; mean and deviation are then those of the n. Of equal
// rewards the earlier sample is kept.
//
// Order: samples without a reward, then truncated samples (a dropped one no longer counts in its group's
// mean), then samples beyond keep_samples, then groups: those that are stale, then those of equal rewards. A
// group that dropping left with a single sample is dropped with it: its advantage would have no baseline.
// Groups of one from the start are untouched.
#pragma once

#include <cstdint>
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

  template <class V>
  void visit(V& v) {
    v("dynamic_sampling", dynamic_sampling,
      "drop groups whose rewards are all equal: they teach nothing; a run draws others for them");
    v("max_num_gen_batches", max_num_gen_batches,
      "of groups that filters refuse: at most so many batches are generated for a step, which is then "
      "trained "
      "on what there is; a run of which that is nothing ends. 0: no bound",
      range(0, 1'000'000));
    v("truncated_samples", truncated_samples,
      "samples cut at the length limit: keep; mask (in the group's mean, not trained); drop",
      one_of({"keep", "mask", "drop"}));
    v("keep_samples", keep_samples,
      "of each group only so many samples of highest reward count, the others are in neither mean nor loss; "
      "0: "
      "all",
      range(0, 100000));
  }
};

struct FilterResult {
  std::vector<uint8_t> kept;      // [S] 1: in its group's advantages
  std::vector<uint8_t> trained;   // [S] 1: kept, and its tokens enter the loss
  int64_t truncated = 0;          // truncated samples seen
  int64_t truncated_masked = 0;   // of these: not trained
  int64_t truncated_dropped = 0;  // of these: removed
  int64_t surplus_dropped = 0;    // samples beyond keep_samples
  int64_t zero_std_groups = 0;    // groups of two or more with equal rewards, dropped or not
  int64_t stale_groups = 0;       // groups dropped because a token in them is too old
  int64_t masked_tokens = 0;      // tokens masked because they are too old: counted by who masks them
  int64_t groups_dropped = 0;     // by dynamic sampling, as stale, or because one sample or none was left
  int64_t sequences_dropped = 0;  // all that are not kept
};

// rewards, groups, truncated: [S]. Pass the rewards that advantages are computed from. `valid` [S], or empty
// where all are: a sequence that is not valid is dropped before anything else, and only counted among
// sequences_dropped. `stale` [S], or empty where none is: a sequence with a token that is too old; its group
// is dropped. UserError: an unknown value of truncated_samples.
FilterResult filter_sequences(const FilterSettings& settings, std::span<const double> rewards,
                              std::span<const int64_t> groups, std::span<const uint8_t> truncated,
                              std::span<const uint8_t> valid = {}, std::span<const uint8_t> stale = {});

}  // namespace bough
