// Reproduces the tables of the papers on tree training: the savings of plans on the papers' sets, the papers'
// figures beside ours.
//
//   build/bench/plan_tables [sharing | splitting | packers | schedule | strategies | balance | overlap |
//     exact ...]
//   default: all
//
// The papers are AReaL-DTA (arXiv 2602.00482v2: Figures 1 and 5 to 9, Table 3, section 5.3) and Tree Training
// (arXiv 2511.00413: sections 2.2 and 3.1, Figure 8). The program generates sets of the same shapes
// (bench/paper_sets.h). All numbers are counts, so they are equal on every machine. docs/plans.md explains
// them.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "base/format.h"
#include "paper_sets.h"
#include "plan/dta_schedule.h"
#include "plan/load_balance.h"
#include "plan/packing.h"
#include "plan/plan.h"
#include "tree/prefix_tree.h"

namespace {

using namespace bough_bench;
using bough::format_thousands;
using bough::TokenSpan;

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}
std::string percent(double share, int digits = 1) {
  return fixed(100 * share, digits) + "%";
}
std::string count(int64_t value) {
  return format_thousands(value);
}

// Printed as Markdown, so that the output can be pasted into docs/plans.md.
class Table {
 public:
  Table(const std::string& title, std::vector<std::string> columns) : rows_{std::move(columns)} {
    std::printf("\n%s\n\n", title.c_str());
  }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  ~Table() {
    std::vector<size_t> widths(rows_[0].size(), 3);
    for (const auto& row : rows_)
      for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
    for (size_t r = 0; r < rows_.size(); ++r) {
      print(rows_[r], widths);
      if (r > 0) continue;
      for (size_t c = 0; c < widths.size(); ++c)
        std::printf("%s%s%s", c ? "|" : "|-", std::string(widths[c], '-').c_str(), c ? "-:" : "-");
      std::printf("|\n");
    }
    std::fflush(stdout);
  }

 private:
  static void print(const std::vector<std::string>& row, const std::vector<size_t>& widths) {
    for (size_t c = 0; c < row.size(); ++c)
      std::printf(c ? "| %*s " : "| %-*s ", static_cast<int>(widths[c]), row[c].c_str());
    std::printf("|\n");
  }
  std::vector<std::vector<std::string>> rows_;
};

struct Set {
  std::string name;
  Batch batch;
  std::vector<TokenSpan> spans;
  bough::PrefixTree tree;
  bough::TreeStatistics statistics;

  Set(std::string n, Batch b)
      : name(std::move(n)),
        batch(std::move(b)),
        spans(batch.begin(), batch.end()),
        tree(bough::build_prefix_tree(spans)),
        statistics(bough::compute_statistics(tree)) {}
  Set(const Set&) = delete;
};

bough::Simulation simulate_plan(const Set& set, const char* strategy, int64_t bound) {
  bough::PlanRequest request;
  request.sequences = set.spans;
  request.max_tokens_per_pass = bound;
  return bough::simulate(bough::make_plan(strategy, request));
}

// Removes sequences that are prefixes of others, and the first `drop` tokens of each remaining sequence.
Batch leaves_only(const Set& set, int64_t drop) {
  Batch result;
  std::vector<bool> seen(set.tree.num_tokens(), false);
  for (size_t s = 0; s < set.batch.size(); ++s) {
    const int32_t end = set.tree.sequence_end[s];
    if (set.tree.subtree_end[end] != end + 1 || seen[end]) continue;
    seen[end] = true;
    result.emplace_back(set.batch[s].begin() + drop, set.batch[s].end());
  }
  return result;
}

const Set& tau2_set() {
  static const Set set("tau2", tau2());
  return set;
}
const Set& tau2_leaves() {
  static const Set set("tau2, leaves only", leaves_only(tau2_set(), 0));
  return set;
}
const Set& modified_prefix() {
  static const Set set("Modified Prefix", leaves_only(tau2_set(), Tau2Shape{}.system_prompt));
  return set;
}
const Set& gsm8k() {
  static const Set set("GSM8K", group(64, 8, 170, 1630, 0.4, 16'384));
  return set;
}
const Set& aime() {
  static const Set set("AIME", group(8, 8, 145, 15'850, 0.4, 32'768));
  return set;
}

void sharing() {
  Table table("AReaL-DTA, Figure 1 and Table 3: what the sets share",
              {"set", "sequences", "tokens", "tree tokens", "mean length", "theirs", "C", "theirs", "C attn",
               "theirs"});
  struct Theirs {
    const Set& set;
    const char *length, *c, *c_attention;
  };
  for (const auto& [set, length, c, c_attention] :
       {Theirs{tau2_set(), "", "9.43", ""}, Theirs{tau2_leaves(), "", "5.56", ""},
        Theirs{modified_prefix(), "1.6K", "1.42", "1.17"}, Theirs{gsm8k(), "1.8K", "1.09", "1.01"},
        Theirs{aime(), "16K", "1.008", "1.00"}}) {
    const auto& s = set.statistics;
    const double mean = static_cast<double>(s.num_flat_tokens) / static_cast<double>(s.num_sequences);
    table.add({set.name, count(s.num_sequences), count(s.num_flat_tokens), count(s.num_tree_tokens),
               fixed(mean / 1000, 1) + "K", length, fixed(s.compression, &set == &aime() ? 3 : 2), c,
               fixed(s.attention_compression, 2), c_attention});
  }
}

using Packer = bough::Packing (*)(const bough::PrefixTree&, int64_t);
constexpr std::pair<const char*, Packer> kPackers[] = {{"ours", bough::pack},
                                                       {"Tree Training", bough::pack_depth_first},
                                                       {"first fit", bough::pack_first_fit_decreasing},
                                                       {"single path", bough::pack_single_path}};

double reuse(const bough::Packing& packing, const Set& set) {
  return bough::effective_reuse_ratio(packing.num_tokens, set.statistics.num_flat_tokens);
}

void splitting() {
  {
    Table table("AReaL-DTA, section 5.3: effective compression of the tau2 tree split into packed trees",
                {"tokens a tree", "trees", "ours", "Tree Training", "first fit", "single path", "theirs"});
    const auto& set = tau2_set();
    for (const int64_t capacity : {16'384, 24'576, 32'768, 49'152, 98'304, 196'608}) {
      std::vector<std::string> row = {count(capacity)};
      for (const auto& [name, packer] : kPackers) {
        const auto packing = packer(set.tree, capacity);
        if (row.size() == 1) row.push_back(count(std::ssize(packing.bins)));
        row.push_back(fixed(1 / (1 - reuse(packing, set)), 2));
      }
      row.push_back(capacity == 24'576 ? "7.47" : "");
      table.add(row);
    }
    table.add({"whole tree", "1", fixed(set.statistics.compression, 2), "", "", "", "9.43"});
  }
  Table table("The same set in chunks: the tree stays whole, recomputed tokens have no autograd graph",
              {"tokens a chunk", "DTA, released", "DTA, as printed", "path", "blocks"});
  const auto& set = tau2_set();
  for (const int64_t block : {256, 512, 1024, 2048, 4096, 8192}) {
    std::vector<std::string> row = {count(block)};
    for (const auto variant : {bough::DtaVariant::kReleased, bough::DtaVariant::kPrinted}) {
      const auto schedule = simulate_dta(set.tree, {.block_size = block, .variant = variant});
      row.push_back(fixed(schedule.effective_compression, 2));
    }
    for (const char* strategy : {"path", "blocks"}) {
      const auto s = simulate_plan(set, strategy, block);
      row.push_back(fixed(static_cast<double>(set.statistics.num_flat_tokens) /
                              static_cast<double>(s.tokens_forwarded + s.tokens_recomputed),
                          2));
    }
    table.add(row);
  }
}

// Computed tokens and number of trees (one pass per tree) for each value of the setting `packer`.
void packers() {
  std::vector<std::string> columns = {"set", "tokens a tree", "tree tokens"};
  for (const auto name : bough::packer_names())
    if (name != "exact") columns.push_back(std::string(name) + ": tokens, trees");
  Table table("Tokens computed and trees of each packer", columns);
  for (const auto* set : {&tau2_set(), &modified_prefix(), &gsm8k(), &aime()}) {
    const int64_t capacity = set == &aime() ? 32'768 : 24'576;
    std::vector<std::string> row = {set->name, count(capacity), count(set->statistics.num_tree_tokens)};
    for (const auto name : bough::packer_names()) {
      if (name == "exact") continue;  // these sets are far too large for the exact packer
      const auto packing = pack_by(name, bough::BranchTree(set->tree), capacity);
      row.push_back(count(packing.num_tokens) + ", " + count(std::ssize(packing.bins)));
    }
    table.add(row);
  }
}

void schedule() {
  Table table("AReaL-DTA, section 3.2: rounds of its schedule on tau2, tree of C = " +
                  fixed(tau2_set().statistics.compression, 2),
              {"order", "tokens a chunk", "leaves", "forward+backward", "forward only",
               "forward only per trajectory", "share of work"});
  const auto& tree = tau2_set().tree;
  const auto add = [&](const char* name, bough::DtaOrder order, int64_t block) {
    const auto s = simulate_dta(tree, {.block_size = block, .order = order});
    int64_t forward_only = 0, forward_tokens = 0;
    for (const auto& pass : s.passes) {
      if (pass.kind != bough::DtaPass::Kind::kForward) continue;
      ++forward_only;
      forward_tokens += pass.num_tokens;
    }
    table.add({name, block < INT32_MAX ? count(block) : "no bound", count(s.num_leaves),
               count(std::ssize(s.passes) - forward_only), count(forward_only),
               fixed(static_cast<double>(forward_only) / (Tau2Shape{}.tasks * Tau2Shape{}.samples), 2),
               percent(static_cast<double>(forward_tokens) /
                       static_cast<double>(forward_tokens + 3 * tree.num_tokens()))});
  };
  for (const int64_t block : {int64_t{2048}, int64_t{4096}, bough::DtaOptions{}.block_size}) {
    add("lexicographic", bough::DtaOrder::kLexicographic, block);
    add("backward (Algorithm 1)", bough::DtaOrder::kBackward, block);
  }
}

// Work is counted in forward passes of one token; a backward pass counts as two. The column is the work
// divided by the minimum, three per tree token.
void strategies() {
  for (const Set* set : {&tau2_set(), &modified_prefix(), &gsm8k(), &aime()}) {
    Table table("Plans of " + set->name + ", " + count(set->statistics.num_flat_tokens) +
                    " tokens, tree of " + count(set->statistics.num_tree_tokens),
                {"plan", "bound", "passes", "tokens a pass", "forwarded", "recomputed", "work",
                 "keys and values", "largest pass"});
    const auto least = static_cast<double>(3 * set->statistics.num_tree_tokens);
    const auto add = [&](const std::string& name, int64_t bound, int64_t passes, int64_t forwarded,
                         int64_t recomputed, double work, int64_t stack, int64_t pass) {
      table.add({name, count(bound), count(passes),
                 count((forwarded + recomputed + passes / 2) / std::max<int64_t>(1, passes)),
                 count(forwarded), count(recomputed), fixed(work / least, 3), count(stack), count(pass)});
    };
    const auto add_plan = [&](const char* strategy, int64_t bound) {
      const auto s = simulate_plan(*set, strategy, bound);
      add(strategy, bound, s.num_passes, s.tokens_forwarded, s.tokens_recomputed,
          static_cast<double>(3 * s.tokens_forwarded + s.tokens_recomputed), s.peak_stack_tokens,
          s.peak_pass_tokens);
    };
    for (const int64_t bound : {2048, 4096}) {
      const auto dta = simulate_dta(set->tree, {.block_size = bound});
      const int64_t unique = set->statistics.num_tree_tokens;
      add("DTA's schedule", bound, std::ssize(dta.passes), unique, dta.tokens_recomputed,
          static_cast<double>(3 * unique + dta.tokens_recomputed), dta.peak_stack_tokens,
          dta.peak_pass_tokens);
      for (const char* strategy : {"path", "blocks"}) add_plan(strategy, bound);
    }
    for (const char* strategy : {"packed", "dense"})
      add_plan(strategy, std::max<int64_t>(24'576, set->statistics.longest_path));
  }
}

void balance() {
  // Assumes equal FLOP rates. In Qwen3-1.7B, a token takes 2.8 GFLOP forward in linear layers, an attention
  // pair takes 0.23 MFLOP.
  const std::pair<const char*, bough::BalanceWeights> costs[] = {{"tree tokens", {1, 0}},
                                                                 {"tokens and pairs", {1, 0.23e6 / 2.8e9}}};
  for (const auto& [cost, weights] : costs) {
    Table table(std::string("AReaL-DTA, Figures 7 to 9: load balance on and off on tau2, cost: ") + cost,
                {"GPUs", "balance", "tree tokens", "recomputed", "largest share", "mean share", "lower bound",
                 "throughput", "on over off"});
    const auto& tree = tau2_set().tree;
    const double whole = largest_cost(balance_load(tree, 1, weights));
    for (const int64_t ranks : {2, 4, 8}) {
      double on = 0;
      const auto add = [&](const char* name, const std::vector<bough::RankShare>& shares) {
        int64_t tokens = 0;
        double sum = 0;
        for (const auto& share : shares) {
          tokens += share.num_tokens;
          sum += share.cost;
        }
        const double most = largest_cost(shares), ideal = whole / static_cast<double>(ranks);
        if (on == 0) on = most;
        table.add({count(ranks), name, count(tokens), count(tokens - tree.num_tokens()),
                   count(std::llround(most)), count(std::llround(sum / static_cast<double>(ranks))),
                   count(std::llround(ideal)), fixed(whole / most, 2),
                   on == most ? "" : "+" + percent(most / on - 1)});
      };
      add("on (Algorithm 4)", balance_load(tree, ranks, weights));
      add("off: by C(T)", balance_by_tree_cost(tree, ranks, weights));
      add("off: by length", balance_by_length(tree, ranks, weights));
    }
  }
}

constexpr double kOverlaps[] = {0.2, 0.28, 0.4, 0.5, 0.6, 0.705, 0.8, 0.887, 0.92};
constexpr int kLeaves = 128;
constexpr double kMeanLength = 4000, kSigma = 0.25;

void overlap() {
  {
    Table table(
        "Tree Training, section 3.1: ERR of each packing at 16,384 tokens a tree, 128 leaves of 4K tokens",
        {"POR", "ours", "Tree Training", "first fit", "single path", "trees, ours", "bins, flat", "C",
         "C attn", "ceiling, ours", "ceiling, Tree Training"});
    for (const double por : kOverlaps) {
      const Set set("", with_overlap(por, kLeaves, kMeanLength, kSigma, 1));
      std::vector<std::string> row = {percent(set.statistics.potential_overlap_ratio)};
      std::vector<double> reused;
      int64_t num_bins = 0;
      for (const auto& [name, packer] : kPackers) {
        const auto packing = packer(set.tree, 16'384);
        if (reused.empty()) num_bins = std::ssize(packing.bins);
        reused.push_back(reuse(packing, set));
        row.push_back(percent(reused.back()));
      }
      const auto flat = bough::build_flat_forest(set.spans);
      row.push_back(count(num_bins));
      row.push_back(count(std::ssize(bough::pack(flat, 16'384).bins)));
      row.push_back(fixed(set.statistics.compression, 2));
      row.push_back(fixed(set.statistics.attention_compression, 2));
      row.push_back(fixed(1 / (1 - reused[0]), 2));
      row.push_back(fixed(1 / (1 - reused[1]), 2));
      table.add(row);
    }
  }
  Table table(
      "ERR of ours by the capacity, and of `blocks`, which splits nothing",
      {"POR", "8,192", "16,384", "32,768", "65,536", "131,072", "blocks, passes of 8,192", "recomputed"});
  for (const double por : kOverlaps) {
    const Set set("", with_overlap(por, kLeaves, kMeanLength, kSigma, 1));
    std::vector<std::string> row = {percent(set.statistics.potential_overlap_ratio)};
    for (const int64_t capacity : {8'192, 16'384, 32'768, 65'536, 131'072})
      row.push_back(percent(reuse(bough::pack(set.tree, capacity), set)));
    const auto s = simulate_plan(set, "blocks", 8'192);
    const auto flat = static_cast<double>(set.statistics.num_flat_tokens);
    row.push_back(percent(1 - static_cast<double>(s.tokens_forwarded) / flat));
    row.push_back(percent(static_cast<double>(s.tokens_recomputed) / flat));
    table.add(row);
  }
}

void exact() {
  Table table(
      "Tree Training, section 2.2.2: 40 small trees a row, 10 leaves, capacity half of the tree or the "
      "longest path; mean ERR, and the most tokens over the exact program's",
      {"POR", "exact", "ours", "Tree Training", "first fit", "single path", "worst, ours",
       "worst, Tree Training"});
  for (const double por : {0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8}) {
    double sum_por = 0, sum_exact = 0;
    std::vector<double> sums(std::size(kPackers), 0), worst(std::size(kPackers), 1);
    int64_t trees = 0;
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      const Set set("", with_overlap(por, 10, 400, kSigma, seed));
      const int64_t capacity = std::max(set.statistics.num_tree_tokens / 2, set.statistics.longest_path);
      const auto best = pack_exact(set.tree, capacity);
      if (!best) continue;
      ++trees;
      sum_por += set.statistics.potential_overlap_ratio;
      sum_exact += reuse(*best, set);
      for (size_t p = 0; p < std::size(kPackers); ++p) {
        const auto packing = kPackers[p].second(set.tree, capacity);
        sums[p] += reuse(packing, set);
        worst[p] = std::max(worst[p],
                            static_cast<double>(packing.num_tokens) / static_cast<double>(best->num_tokens));
      }
    }
    const auto mean = [&](double sum) { return percent(sum / static_cast<double>(trees)); };
    table.add({mean(sum_por), mean(sum_exact), mean(sums[0]), mean(sums[1]), mean(sums[2]), mean(sums[3]),
               fixed(worst[0], 3), fixed(worst[1], 3)});
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::pair<std::string, void (*)()> tables[] = {
      {"sharing", sharing},       {"splitting", splitting}, {"packers", packers}, {"schedule", schedule},
      {"strategies", strategies}, {"balance", balance},     {"overlap", overlap}, {"exact", exact}};
  const std::vector<std::string> chosen(argv + 1, argv + argc);
  for (const auto& [name, print] : tables)
    if (chosen.empty() || std::ranges::find(chosen, name) != chosen.end()) print();
}
