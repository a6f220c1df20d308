// make_plan: the pass size, what is kept, and the choice between strategies.
#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/format.h"
#include "tree/outline.h"
#include "tree/simulator.h"
#include "tree/strategies.h"

namespace bough {

namespace {

// Smaller passes cost more in overhead than their memory is worth.
constexpr int64_t kSmallestPass = 16;

constexpr int kWorseInARow = 2;

// `auto` leaves out `dense` where the flat batch is more than so many times the tree: `blocks` fills passes of the same
// size and repeats each token at most once, and a flat tree of nested prefixes would take gigabytes, if memory for a few
// exits were short.
constexpr int64_t kMostFlat = 16;

struct Candidate {
  std::string_view strategy;
  int64_t size;
  Simulation simulation;
  std::optional<Plan> plan;  // where it had to be built to be priced
};

// B, then powers of two below it.
std::vector<int64_t> pass_sizes(int64_t max_tokens_per_pass) {
  std::vector<int64_t> sizes = {max_tokens_per_pass};
  int64_t size = kSmallestPass;
  while (size * 2 < max_tokens_per_pass) size *= 2;
  for (; size >= kSmallestPass && size < max_tokens_per_pass; size /= 2) sizes.push_back(size);
  return sizes;
}

class Planner {
 public:
  explicit Planner(const PlanRequest& request) : request_(request) {}

  // The plan of least predicted time; without a cost model the one of B tokens a pass.
  Plan best(const std::vector<std::string_view>& strategies) {
    if (!request_.costs) return make(strategies.front(), request_.max_tokens_per_pass);
    std::optional<Candidate> best;
    int64_t smallest = std::numeric_limits<int64_t>::max();
    std::optional<UserError> refused;
    for (const auto strategy : strategies) {
      if (strategy == "dense" && strategies.size() > 1 &&
          whole().tree->num_flat_tokens() > kMostFlat * whole().tree->num_tokens())
        continue;
      // From large passes to small ones, until these only cost more: time by pass size has one minimum, but for
      // small steps where the number of passes jumps.
      double least = std::numeric_limits<double>::infinity();
      int num_worse = 0;
      for (const int64_t size : pass_sizes(request_.max_tokens_per_pass)) {
        if (num_worse == kWorseInARow) break;
        try {
          auto candidate = price(strategy, size);
          const auto& simulation = candidate.simulation;
          smallest = std::min(smallest, simulation.peak_bytes);
          if (request_.memory_bytes && simulation.peak_bytes > *request_.memory_bytes) continue;
          num_worse = simulation.seconds < least ? 0 : num_worse + 1;
          least = std::min(least, simulation.seconds);
          if (!best || simulation.seconds < best->simulation.seconds) best = std::move(candidate);
        } catch (const UserError& error) {  // `packed`: a path longer than a pass of this size
          if (!refused) refused = error;
          break;  // smaller passes hold no longer path
        }
      }
    }
    if (best) return best->plan ? std::move(*best->plan) : make(best->strategy, best->size);
    if (smallest == std::numeric_limits<int64_t>::max()) throw *refused;
    throw UserError(str("memory (--memory, mb_spec.memory): got ", *request_.memory_bytes,
                        " bytes over weights and gradients, too little for this batch by strategy ",
                        strategies.size() > 1 ? "auto" : std::string(strategies.front()),
                        "; the smallest that would do is ", smallest, " bytes (",
                        format_bytes(static_cast<double>(smallest)), ")"));
  }

 private:
  const IndexedTree& whole() {
    if (!whole_)
      whole_ = index_tree(build_prefix_tree(request_.sequences), all_sequences(request_), request_);
    return *whole_;
  }

  const IndexedTree& flat() {
    if (!flat_) flat_ = index_tree(build_flat_forest(request_.sequences), all_sequences(request_), request_);
    return *flat_;
  }

  Candidate price(std::string_view strategy, int64_t size) {
    if (strategy == "dense") return {strategy, size, simulate_dense(request_, size), {}};
    if (strategy == "packed") {
      const Packing packing = pack(*whole().tree, whole().branches, size);
      return {strategy, size, simulate_packed(request_, whole(), packing), {}};
    }
    Plan plan = make(strategy, size);
    const auto simulation = simulate(plan, request_.costs, request_.memory_bytes);
    return {strategy, size, simulation, std::move(plan)};
  }

  Plan make(std::string_view strategy, int64_t size) {
    Plan plan = strategy == "dense"    ? plan_dense(flat(), size)
                : strategy == "packed" ? plan_packed(request_, whole(), size)
                : strategy == "path"   ? plan_path(whole(), size)
                                       : plan_blocks(request_, whole(), size, parts_);
    if (request_.costs && strategy == "blocks") choose_what_is_kept(plan, *request_.costs, budget(plan));
    return plan;
  }

  // Bytes that the plan may hold: what was given, or what one pass of B tokens takes.
  int64_t budget(const Plan& plan) const {
    if (request_.memory_bytes) return *request_.memory_bytes;
    const auto& costs = *request_.costs;
    const int64_t size = request_.max_tokens_per_pass;
    int64_t stack_rows = 0;
    for (const auto& planned : plan.trees) stack_rows = std::max(stack_rows, planned.stack_capacity);
    return stack_rows * costs.stack_row_bytes() + size * costs.activation_bytes() +
           costs.temporary_bytes({plan.max_tokens_per_pass, stack_rows, 0, plan.max_tokens_per_pass});
  }

  const PlanRequest& request_;
  std::optional<IndexedTree> whole_, flat_;
  PartTrees parts_;
};

}  // namespace

// Children before parents: a block near the leaves opens once for each of many chains, one near the root for all of
// them together, so memory spent lower down saves more recomputation.
void choose_what_is_kept(Plan& plan, const CostModel& costs, int64_t budget) {
  int64_t num_loss_rows = 0;
  for (const auto& planned : plan.trees)
    for (const auto& block : planned.blocks) num_loss_rows += block.num_loss_rows;
  budget -= num_loss_rows * costs.row_bytes();
  for (auto& planned : plan.trees) {
    auto& blocks = planned.blocks;
    const int64_t room = budget - planned.stack_capacity * costs.stack_row_bytes();
    // By block + 1, the root being 0: exits held by the chain down to it; bytes held, beside those, while what hangs
    // off it runs.
    std::vector<int64_t> exits(blocks.size() + 1, 0), held(blocks.size() + 1, 0);
    for (size_t i = 0; i < blocks.size(); ++i)
      exits[i + 1] = exits[blocks[i].above + 1] + blocks[i].num_exits * costs.exit_bytes();
    for (size_t i = blocks.size(); i-- > 0;) {
      auto& block = blocks[i];
      if (!block.needed) continue;
      const int64_t activations = block.num_tokens * costs.activation_bytes();
      const int64_t attention = block.num_tokens * costs.attention_bytes();
      const int64_t pass = activations + costs.temporary_bytes(block.shape());
      // With the block's exits, which end with it: above it they are part of what is held.
      const int64_t below = held[i + 1];
      int64_t total = pass;
      if (block.interior) {
        const int64_t with_activations = std::max(below + activations, pass);
        const int64_t with_attention = std::max(below, pass) + attention;
        total = std::max(below, pass);
        if (with_activations + exits[i + 1] <= room) {
          block.keep = Keep::kActivations;
          total = with_activations;
        } else if (with_attention + exits[i + 1] <= room) {
          block.keep = Keep::kAttention;
          total = with_attention;
        }
        total += block.num_exits * costs.exit_bytes();
      }
      held[block.above + 1] = std::max(held[block.above + 1], total);
    }
  }
}

Plan make_plan(std::string_view strategy, const PlanRequest& request) {
  if (request.max_tokens_per_pass < 1)
    throw UserError(
        str("max_tokens_per_mb: got ", request.max_tokens_per_pass, ", expected at least 1 token a pass"));
  BOUGH_CHECK(!request.memory_bytes || request.costs, "a memory budget needs a cost model");
  Planner planner(request);
  if (strategy == "auto") return planner.best({"blocks", "packed", "dense"});
  for (const char* known : {"dense", "packed", "path", "blocks"})
    if (strategy == known) return planner.best({known});
  throw UserError(str("tree_training_mode: got ", quoted(std::string(strategy)),
                      ", expected auto, dense, packed, path or blocks"));
}

}  // namespace bough
