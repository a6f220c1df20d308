// Writes a rollout file with a chosen potential overlap ratio (POR). Figures 7 and 8 of Tree Training
// (papers/tree-training.txt) vary this ratio with constant leaves and tokens.
//
//   build/bench/overlap_set [out=FILE] [por=0.705] [leaves=128] [mean_length=4000] [sigma=0.25] [vocab=4096]
//     [seed=1]
//
// `bough plan`, `bough step` and `bough bench step` read the file. docs/performance.md has the curve.
#include "overlap_set.h"

#include <cstdio>

#include "base/error.h"
#include "data/rollout_file.h"
#include "tree/prefix_tree.h"

int main(int argc, char** argv) {
  try {
    const auto settings = bough::parse_settings<bough_bench::OverlapSettings>(
        "{}", "command line", std::vector<std::string>(argv + 1, argv + argc));
    const auto rollouts = bough_bench::overlap_rollouts(settings);
    if (!settings.out.empty()) bough::write_rollouts(settings.out, rollouts);
    std::vector<bough::TokenSpan> sequences;
    for (const auto& rollout : rollouts) sequences.emplace_back(rollout.input_ids);
    const auto statistics = compute_statistics(bough::build_prefix_tree(sequences));
    std::printf("%s: %lld sequences, %lld tokens, tree of %lld, POR %.2f%%\n",
                settings.out.empty() ? "not written" : settings.out.c_str(),
                static_cast<long long>(statistics.num_sequences),
                static_cast<long long>(statistics.num_flat_tokens),
                static_cast<long long>(statistics.num_tree_tokens), 100 * statistics.potential_overlap_ratio);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "overlap_set: %s\n\n%s", error.what(),
                 bough::settings_help<bough_bench::OverlapSettings>().c_str());
    return 2;
  }
}
