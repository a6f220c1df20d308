// Data of the page of a run (report/run_page.h) beyond the files that RunFollower reads: settings that
// differ from their defaults, and the rollouts of a step with their texts, tokens, conversations and prefix
// tree.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/mutex.h"
#include "data/trajectory.h"
#include "report/view_server.h"
#include "text/tokenizer.h"
#include "tree/prefix_tree.h"

namespace bough {

// The prefix tree as the page draws it. A node is a run of consecutive tree tokens that have the same
// sequences in common: [parent (an index, -1: none), begin, end (positions), number of sequences, trained
// positions as begin, end, begin, end, ...]. Nodes are in preorder. If there are more than 5,000 nodes, those
// of the most sequences are given; `left_out` counts the others. `tree` must be made of the rollouts'
// input_ids, in their order. A token counts as trained if any sequence trains it.
Json tree_json(const PrefixTree& tree, std::span<const Trajectory> rollouts);

// A page with only the tree and a note below it.
std::string tree_page(const PrefixTree& tree, std::span<const Trajectory> rollouts, const std::string& title,
                      const std::string& note);

// The rollouts of a run's folder, for the page. Thread-safe.
class RunRollouts {
 public:
  explicit RunRollouts(std::filesystem::path folder) : folder_(std::move(folder)) {}

  // Whole groups from the index `first_group` on, until `most_samples` samples or a few MB are reached;
  // always one group. Dropped groups come last. The tree, without dropped groups, only with first_group 0.
  // Throws UserError if the step has no groups.
  Json step(int64_t step, int64_t first_group, int64_t most_samples);

 private:
  Json sample_json(const Trajectory& row);
  // nullopt: the model's tokenizer was not found, so tokens have no texts.
  const std::optional<Tokenizer>& tokenizer();

  const std::filesystem::path folder_;
  Mutex mutex_;
  bool has_searched_ GUARDED_BY(mutex_) = false;
  std::optional<Tokenizer> tokenizer_ GUARDED_BY(mutex_);
};

// `settings`: [key, value, meaning] of those that differ from their defaults. `config`: the text of
// config.yaml.
Json about_run(const std::filesystem::path& folder);

// A run's folder for ViewServer. Throws UserError if it is not one.
ViewedRun view_of_run(const std::filesystem::path& folder);

// The page of a run with its data inside: curves, timeline, problems, settings, and of the rollouts the
// samples of the last steps and some of the first one, kMostReportSamples together, and as many of the last
// evaluation. At most kMostReportBytes.
inline constexpr int64_t kMostReportSamples = 200, kMostReportBytes = 20'000'000;
std::string run_report(const std::filesystem::path& folder);

}  // namespace bough
