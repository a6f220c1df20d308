// Which sampled sequences are trained on. Each filter counts what it drops.
//
// Oversampling (DistillSparse, equation 4): of a group of M samples the n = keep_samples of highest reward,
// which are those of highest advantage; mean and deviation are then those of the n. Of equal rewards the
// earlier sample is kept. With keep_samples_by acceptance the samples that the trained policy would most
// likely have drawn itself are kept in their place (the oracle of figure 4): it takes a walk over all M.
//
// Order: samples without a reward, then truncated samples (a dropped one no longer counts in its group's
// mean), then samples beyond keep_samples, then groups: those that are stale, then those of equal rewards. A
// group that dropping left with a single sample is dropped with it: its advantage would have no baseline.
// Groups of one from the start are untouched.
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
    v("keep_samples_by", keep_samples_by,
      "which samples keep_samples keeps: reward (the highest), acceptance (those that the trained policy is "
      "nearest to, after a walk over all)",
      one_of({"reward", "acceptance"}));
  }
  bool needs_acceptance() const { return keep_samples > 0 && keep_samples_by == "acceptance"; }
  void check() const;  // UserError: settings that contradict each other
};

// What filters look at. [S] each; refers to the caller's lists.
struct FilterInput {
  std::span<const double> rewards;  // those that advantages are computed from
  std::span<const int64_t> groups;
  std::span<const uint8_t> truncated;
  std::span<const uint8_t> valid = {};      // 0: dropped before anything else; empty: all are
  std::span<const uint8_t> stale = {};      // 1: has a token that is too old, its group goes; empty: none
  std::span<const double> acceptance = {};  // the mean over its tokens, where settings.needs_acceptance()
};

// What would be kept had only the first `width` samples of each group been drawn.
struct KeptByWidth {
  int64_t width = 0;
  double reward = 0;                 // mean over the samples kept
  std::optional<double> acceptance;  // theirs, where it is known
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
  // Of the groups that had more than keep_samples, n, to choose from: for widths n, 1.5 n, 2 n, 3 n and the
  // smallest such group's, as far as all have them.
  std::vector<KeptByWidth> by_width;
};

// A sequence that is not valid is only counted among sequences_dropped. UserError: an unknown value of
// truncated_samples or keep_samples_by.
FilterResult filter_sequences(const FilterSettings& settings, const FilterInput& input);

}  // namespace bough
