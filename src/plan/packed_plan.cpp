// Strategy `packed`: trees of at most B tokens, one pass each (papers/tree-training.txt, section 2.2).
#include <algorithm>

#include "base/error.h"
#include "plan/plan_strategies.h"
#include "plan/recompute_policy.h"
#include "plan/simulator.h"

namespace bough {

namespace {

// Counts the trained tokens of a bin: once each (rows of the lm_head), and once per sequence that trains the
// token (loss rows).
class TrainedRows {
 public:
  explicit TrainedRows(const IndexedTree& whole)
      : tree_(whole.tree()),
        request_(whole.request()),
        last_bin_(request_.trained.empty() ? 0 : tree_.num_tokens(), -1) {}

  void add(int32_t bin, const std::vector<int64_t>& sequences, Block& block) {
    for (const int64_t s : sequences) {
      const int64_t begin = tree_.sequence_offset[s], length = tree_.sequence_offset[s + 1] - begin;
      if (request_.trained.empty()) {
        block.num_loss_rows += std::max<int64_t>(0, length - 1);
        continue;
      }
      const uint8_t* own = request_.trained.data() + begin;
      for (int32_t t = tree_.sequence_end[s]; t >= 0;) {  // one run of consecutive token numbers at a time
        const int32_t run = tree_.chain_begin[t], shift = tree_.depth[run] - run;
        for (; t >= run; --t) {
          if (own[t + shift] == 0 || tree_.parent[t] < 0) continue;
          ++block.num_loss_rows;
          block.num_head_rows += last_bin_[t] != bin;
          last_bin_[t] = bin;
        }
        t = tree_.parent[run];
      }
    }
  }

 private:
  const PrefixTree& tree_;
  const PlanRequest& request_;
  std::vector<int32_t> last_bin_;  // per token: the last bin in which a sequence trains it
};

Packing packing_of(const IndexedTree& whole, int64_t max_tokens_per_pass) {
  return pack_by(whole.request().packer, whole.branches(), max_tokens_per_pass);
}

}  // namespace

void emit_packed(const IndexedTree& whole, const Packing& packing, BlockSink& sink, LayerRecompute layers) {
  const bool all_train = whole.request().trained.empty();
  const bool chooses = layers != LayerRecompute::kNever;
  const int64_t room = chooses ? room_for_passes(whole.request(), whole.num_rows(whole.all()), 0) : 0;
  TrainedRows rows(whole);
  internal::TreeOfSome trees(whole.branches());
  for (size_t b = 0; b < packing.bins.size(); ++b) {
    const auto& bin = packing.bins[b];
    const auto number = static_cast<int32_t>(b);
    Block block;
    int64_t num_roots = 0;
    trees.visit(bin.sequences, [&](const BranchNode& node, int32_t begin, int32_t end) {
      block.num_tokens += end - begin;
      block.num_pairs += whole.num_pairs({begin, end});
      num_roots += node.parent < 0 && begin == node.begin;
    });
    block.num_pieces = trees.num_leaves();  // each piece ends in a leaf
    rows.add(number, bin.sequences, block);
    if (all_train) block.num_head_rows = block.num_tokens - num_roots;
    block.needed = block.num_head_rows > 0;
    block.ranges = {{0, static_cast<int32_t>(block.num_tokens)}};
    BOUGH_CHECK(block.num_tokens == bin.num_tokens, "bin ", b, " has ", block.num_tokens, " tokens, says ",
                bin.num_tokens);
    if (chooses)
      choose_recompute_policies({&block, 1}, *whole.request().costs, room,
                                {.layers = layers, .offload = whole.request().offload});
    sink.begin_tree(bin.sequences, 0);
    if (block.num_tokens > 0) sink.add_leaf(std::move(block));
  }
}

Plan plan_packed(const IndexedTree& whole, int64_t max_tokens_per_pass, LayerRecompute layers) {
  const auto& all = whole.request().sequences;
  PlanWriter writer;
  emit_packed(whole, packing_of(whole, max_tokens_per_pass), writer, layers);
  Plan plan{"packed", max_tokens_per_pass, writer.finish()};
  for (auto& planned : plan.trees) {
    std::vector<TokenSpan> sequences;
    for (const int64_t s : planned.sequences) sequences.push_back(all[s]);
    planned.tree = plan.trees.size() == 1 ? whole.shared_tree()
                                          : std::make_shared<const PrefixTree>(build_prefix_tree(sequences));
  }
  return plan;
}

Simulation simulate_packed(const IndexedTree& whole, int64_t max_tokens_per_pass, LayerRecompute layers) {
  Simulator simulator(whole.request().costs, whole.request().memory_bytes);
  emit_packed(whole, packing_of(whole, max_tokens_per_pass), simulator, layers);
  return simulator.finish();
}

}  // namespace bough
