#include "plan/dta_schedule.h"

#include <algorithm>

#include "base/error.h"
#include "tree/branch_tree.h"

namespace bough {

namespace {

// Algorithm 1, lines 1 to 12: leaf children first, then internal children, smallest tail first. The tail of a
// node is the depth of the leaf that is visited first below it.
void sort_children(BranchTree& branches) {
  std::vector<int32_t> tail(branches.nodes.size());
  const auto order = [&](std::span<int32_t> children) {
    std::ranges::stable_sort(children, {},
                             [&](int32_t c) { return std::pair(!branches.nodes[c].is_leaf(), tail[c]); });
  };
  for (int32_t n = branches.size() - 1; n >= 0; --n) {
    order(branches.children(n));
    tail[n] = branches.nodes[n].is_leaf() ? branches.nodes[n].depth : tail[branches.children(n).front()];
  }
  order(branches.children(-1));
}

struct Leaf {
  int64_t length;
  int64_t shared_before, shared_after;  // tokens shared with the previous and next leaf; 0 at the ends
};

std::vector<Leaf> order_leaves(const PrefixTree& tree, DtaOrder order) {
  BranchTree branches(tree);
  branches.sort_lexicographically();
  if (order == DtaOrder::kBackward) sort_children(branches);
  const auto visits = branches.visit();
  std::vector<Leaf> leaves;
  for (size_t i = 0; i < visits.size(); ++i)
    leaves.push_back({visits[i].length, visits[i].lcp, i + 1 < visits.size() ? visits[i + 1].lcp : 0});
  if (order == DtaOrder::kBackward) {  // Algorithm 1, line 13: leaves are executed in the reverse order
    std::ranges::reverse(leaves);
    for (auto& leaf : leaves) std::swap(leaf.shared_before, leaf.shared_after);
  }
  return leaves;
}

// Algorithm 3.
class Algorithm3 {
 public:
  explicit Algorithm3(const DtaOptions& options) : options_(options) {}

  DtaSchedule run(const std::vector<Leaf>& leaves) {
    for (const auto& leaf : leaves) {
      const int64_t num_popped = leaf.length - leaf.shared_after;
      const int64_t num_chunks = (num_popped - 1) / options_.block_size + 1;
      const int64_t chunk = (num_popped + num_chunks - 1) / num_chunks;
      const int64_t anchor = leaf.length - chunk;  // equals shared_after if one chunk is enough
      if (options_.variant != DtaVariant::kReleased)
        add(DtaPass::Kind::kForward, leaf.shared_before, leaf.length);
      if (options_.variant != DtaVariant::kWholeSuffix)
        add(DtaPass::Kind::kForward, leaf.shared_before, anchor);
      schedule_.peak_stack_tokens = std::max(schedule_.peak_stack_tokens, leaf.length);
      for (int64_t end = leaf.length; end > leaf.shared_after; end -= chunk)
        add(DtaPass::Kind::kForwardBackward, std::max(end - chunk, leaf.shared_after), end);
      ++schedule_.num_leaves;
    }
    return std::move(schedule_);
  }

 private:
  void add(DtaPass::Kind kind, int64_t begin, int64_t end) {
    if (begin >= end) return;
    schedule_.passes.push_back({kind, static_cast<int32_t>(schedule_.num_leaves), begin, end - begin});
    schedule_.tokens_forwarded += end - begin;
    if (kind == DtaPass::Kind::kForwardBackward)
      schedule_.peak_pass_tokens = std::max(schedule_.peak_pass_tokens, end - begin);
  }

  DtaOptions options_;
  DtaSchedule schedule_;
};

}  // namespace

DtaSchedule simulate_dta(const PrefixTree& tree, const DtaOptions& options) {
  if (options.block_size < 1)
    throw UserError(str("block size: got ", options.block_size, ", expected at least 1 token"));
  auto schedule = Algorithm3(options).run(order_leaves(tree, options.order));
  schedule.tokens_recomputed = schedule.tokens_forwarded - tree.num_tokens();
  if (schedule.tokens_forwarded > 0)
    schedule.effective_compression =
        static_cast<double>(tree.num_flat_tokens()) / static_cast<double>(schedule.tokens_forwarded);
  return schedule;
}

}  // namespace bough
