// `bough plan`: what a rollout file shares, what each strategy would cost, and the picture of its tree.
#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "cli/command.h"
#include "cli/rollout_batch.h"
#include "cli/step_costs.h"
#include "cli/tree_page.h"
#include "tree/plan.h"

namespace bough {

namespace {

struct PlanOptions {
  std::string rollouts, html;
  int64_t max_tokens_per_mb = kDefaultMaxTokensPerPass;
  bool json = false;
};

struct PlanCost {
  std::string strategy;
  Simulation simulation;
};

Json plan_json(const PlanCost& plan) {
  const Simulation& s = plan.simulation;
  return {{"strategy", plan.strategy},
          {"passes", s.num_passes},
          {"tokens_forwarded", s.tokens_forwarded},
          {"tokens_recomputed", s.tokens_recomputed},
          {"peak_stack_tokens", s.peak_stack_tokens},
          {"peak_pass_tokens", s.peak_pass_tokens}};
}

void print_json_report(const PlanOptions& options, const TreeStatistics& tree,
                       const std::vector<PlanCost>& plans) {
  Json plan_list = Json::array();
  for (const PlanCost& plan : plans) plan_list.push_back(plan_json(plan));
  print_json({{"sequences", tree.num_sequences},
              {"tokens", tree.num_flat_tokens},
              {"tree_tokens", tree.num_tree_tokens},
              {"compression", tree.compression},
              {"attention_compression", tree.attention_compression},
              {"space_saving", tree.space_saving},
              {"tree_token_ratio", tree.tree_token_ratio},
              {"potential_overlap_ratio", tree.potential_overlap_ratio},
              {"longest_path", tree.longest_path},
              {"mean_depth", tree.mean_depth},
              {"leaves", tree.num_leaves},
              {"branch_points", tree.num_branch_points},
              {"max_tokens_per_mb", options.max_tokens_per_mb},
              {"plans", plan_list}});
}

void print_plan_table(int64_t max_tokens, const std::vector<PlanCost>& plans) {
  using Row = std::array<std::string, 6>;
  std::vector<Row> rows = {{"plan", "passes", "forwarded", "recomputed", "stack tokens", "pass tokens"}};
  for (const PlanCost& plan : plans) {
    const Simulation& s = plan.simulation;
    rows.push_back({plan.strategy, format_thousands(s.num_passes), format_thousands(s.tokens_forwarded),
                    format_thousands(s.tokens_recomputed), format_thousands(s.peak_stack_tokens),
                    format_thousands(s.peak_pass_tokens)});
  }
  std::string text = str("\nplans with passes of at most ", format_thousands(max_tokens), " tokens:\n");
  for (const Row& row : rows) {
    text += row[0] + std::string(8 - row[0].size(), ' ');
    for (size_t i = 1; i < row.size(); ++i)
      text += std::string(14 - std::min<size_t>(13, row[i].size()), ' ') + row[i];
    text += "\n";
  }
  print_text(text);
}

void print_readable_report(const PlanOptions& options, const TreeStatistics& tree,
                           const std::vector<PlanCost>& plans) {
  print_table({{"sequences", format_thousands(tree.num_sequences)},
               {"tokens", format_thousands(tree.num_flat_tokens)},
               {"tree tokens", format_thousands(tree.num_tree_tokens)},
               {"compression", format_significant(tree.compression)},
               {"attention compression", format_significant(tree.attention_compression)},
               {"space saving", str(format_significant(100 * tree.space_saving, 3), "%")},
               {"longest path", str(format_thousands(tree.longest_path), " tokens")},
               {"leaves", format_thousands(tree.num_leaves)},
               {"branch points", format_thousands(tree.num_branch_points)}});
  print_plan_table(options.max_tokens_per_mb, plans);
}

void run_plan(const PlanOptions& options) {
  check_at_least("--max-tokens-per-mb", options.max_tokens_per_mb, 1, "a pass holds at least one token");
  if (!options.html.empty()) check_output_file("--html", options.html);
  const RolloutBatch batch(read_rollouts(options.rollouts, {.require_reward_or_advantage = false}));
  const PrefixTree tree = build_prefix_tree(batch.sequences);
  std::vector<PlanCost> plans;
  for (const char* strategy : {"dense", "path"})
    plans.push_back({strategy, simulate(make_plan(strategy, batch.sequences, options.max_tokens_per_mb))});
  if (!options.html.empty()) write_file_atomically(options.html, tree_page(tree, batch, options.rollouts));
  const TreeStatistics statistics = compute_statistics(tree);
  if (options.json) print_json_report(options, statistics, plans);
  else print_readable_report(options, statistics, plans);
}

}  // namespace

void add_plan_command(CommandLine& line) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App& command = line.add("plan", "What a rollout file shares, and what each strategy would cost",
                               [options] { run_plan(*options); });
  command.add_option("--rollouts", options->rollouts, "JSON Lines, .jsonl or .jsonl.zst")
      ->required()
      ->type_name("FILE");
  command.add_option("--max-tokens-per-mb", options->max_tokens_per_mb, "Tokens of one pass at most")
      ->type_name("B");
  command.add_option("--html", options->html, "Write the picture of the tree as a page of its own")
      ->type_name("FILE");
  add_json_flag(command, options->json);
}

}  // namespace bough
