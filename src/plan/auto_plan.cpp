// make_plan: the pass size, what is kept, and the choice between strategies.
#include <algorithm>
#include <functional>
#include <limits>

#include "base/error.h"
#include "base/format.h"
#include "plan/outline.h"
#include "plan/simulator.h"
#include "plan/strategies.h"

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
  std::optional<BlocksDraft> draft;  // of `blocks`
  std::optional<Plan> plan;          // where it had to be built to be priced
};

// A candidate whose peak or time is beyond these is not looked at to its end.
struct Bounds {
  std::optional<int64_t> most_bytes;
  double most_seconds = std::numeric_limits<double>::infinity();
};

// B, three quarters of it (often as many passes, in less memory), and powers of two below B; the largest first.
std::vector<int64_t> pass_sizes(int64_t max_tokens_per_pass) {
  std::vector<int64_t> sizes = {max_tokens_per_pass};
  if (const int64_t smaller = max_tokens_per_pass * 3 / 4; smaller >= kSmallestPass) sizes.push_back(smaller);
  int64_t size = kSmallestPass;
  while (size * 2 < max_tokens_per_pass) size *= 2;
  for (; size >= kSmallestPass && size < max_tokens_per_pass; size /= 2) sizes.push_back(size);
  std::ranges::sort(sizes, std::greater{});
  const auto repeated = std::ranges::unique(sizes);
  sizes.erase(repeated.begin(), repeated.end());
  return sizes;
}

class Planner {
 public:
  explicit Planner(const PlanRequest& request) : request_(request) {}

  // The plan of least predicted peak memory among those as fast as the one of least predicted time; without a cost
  // model the one of B tokens a pass.
  Plan best(const std::vector<std::string_view>& strategies) {
    if (!request_.costs) return make(strategies.front(), request_.max_tokens_per_pass);
    std::vector<Candidate> fastest;  // all as fast as the fastest yet
    bool any_too_large = false;
    std::optional<UserError> refused;
    for (const auto strategy : strategies) {
      if (is_left_out(strategy, strategies)) continue;
      // From large passes to small ones, until these only cost more: time by pass size has one minimum, but for
      // small steps where the number of passes jumps.
      double least = std::numeric_limits<double>::infinity();
      int num_worse = 0;
      for (const int64_t size : pass_sizes(request_.max_tokens_per_pass)) {
        if (num_worse == kWorseInARow) break;
        try {
          auto candidate = price(strategy, size, {request_.memory_bytes, least * kAsFast});
          if (!candidate || !is_within_memory(*candidate)) {
            any_too_large = true;
            continue;
          }
          const double seconds = candidate->simulation.seconds;
          num_worse = seconds < least ? 0 : num_worse + 1;
          least = std::min(least, seconds);
          add_if_fast(fastest, std::move(*candidate));
        } catch (const UserError& error) {  // `packed`: a path longer than a pass of this size
          if (!refused) refused = error;
          break;  // smaller passes hold no longer path
        }
      }
    }
    if (!fastest.empty())
      return finish(std::move(*std::ranges::min_element(
          fastest, {}, [](const Candidate& candidate) { return candidate.simulation.peak_bytes; })));
    if (!any_too_large) throw *refused;
    const int64_t smallest = smallest_memory(strategies);
    throw UserError(str("memory (--memory, mb_spec.memory): got ", *request_.memory_bytes,
                        " bytes over weights and gradients, too little for this batch by strategy ",
                        strategies.size() > 1 ? "auto" : std::string(strategies.front()),
                        "; the smallest that would do is ", smallest, " bytes (",
                        format_bytes(static_cast<double>(smallest)), ")"));
  }

 private:
  static void add_if_fast(std::vector<Candidate>& fastest, Candidate candidate) {
    double least = candidate.simulation.seconds;
    for (const auto& other : fastest) least = std::min(least, other.simulation.seconds);
    fastest.push_back(std::move(candidate));
    std::erase_if(fastest,
                  [&](const Candidate& other) { return other.simulation.seconds > least * kAsFast; });
  }

  const IndexedTree& whole() {
    if (!whole_)
      whole_ = index_tree(build_prefix_tree(request_.sequences), all_sequences(request_), request_);
    return *whole_;
  }

  PartReader& parts() {
    if (!parts_) parts_.emplace(request_, whole());
    return *parts_;
  }

  const IndexedTree& flat() {
    if (!flat_) flat_ = index_tree(build_flat_forest(request_.sequences), all_sequences(request_), request_);
    return *flat_;
  }

  bool is_left_out(std::string_view strategy, const std::vector<std::string_view>& strategies) {
    return strategy == "dense" && strategies.size() > 1 &&
           whole().tree->num_flat_tokens() > kMostFlat * whole().tree->num_tokens();
  }

  bool is_within_memory(const Candidate& candidate) const {
    return !request_.memory_bytes || candidate.simulation.peak_bytes <= *request_.memory_bytes;
  }

  // Nothing where its peak is above bounds.most_bytes; one that is merely slower is priced wrong, but as slower.
  std::optional<Candidate> price(std::string_view strategy, int64_t size, const Bounds& bounds) {
    const auto& costs = request_.costs;
    if (strategy == "dense")
      return Candidate{
          strategy, size, simulate_dense(request_, size, bounds.most_bytes, bounds.most_seconds), {}, {}};
    if (strategy == "packed") {
      if (bounds.most_bytes && is_packed_above(size, *bounds.most_bytes)) return std::nullopt;
      const Packing packing = pack(*whole().tree, whole().branches, size);
      return Candidate{strategy, size, simulate_packed(request_, whole(), packing), {}, {}};
    }
    if (strategy == "path") {
      Plan plan = plan_path(whole(), size);
      const auto simulation = simulate(plan, costs, bounds.most_bytes, bounds.most_seconds);
      return Candidate{strategy, size, simulation, {}, std::move(plan)};
    }
    auto draft = draft_blocks(request_, whole(), parts(), size, bounds.most_bytes);
    if (!draft.fits) return std::nullopt;
    choose_what_is_kept(draft.plan, *costs, budget(draft.plan));
    const auto simulation = simulate(draft.plan, costs, bounds.most_bytes, bounds.most_seconds);
    return Candidate{strategy, size, simulation, std::move(draft), {}};
  }

  // Without packing: of several trees one is more than half full, or it would have taken another's sequences.
  bool is_packed_above(int64_t size, int64_t most_bytes) {
    const auto& tree = *whole().tree;
    if (tree.num_tokens() <= size) return false;
    if (!least_packed_size_) {
      least_packed_size_ = 0;
      for (const auto& node : whole().branches.nodes) {
        const bool trains = whole().num_trained({node.begin, node.end}) > 0;
        *least_packed_size_ = std::max<int64_t>(*least_packed_size_, node.depth);
        if (node.is_leaf() && !trains) leaves_train_ = false;  // a tree that trains nothing takes nothing
      }
    }
    if (size < *least_packed_size_ || !leaves_train_) return false;
    const auto& costs = *request_.costs;
    const int64_t num_tokens = size / 2 + 1;
    return whole().num_rows(whole().all()) * costs.row_bytes() + num_tokens * costs.activation_bytes() +
               costs.temporary_bytes({.tokens = num_tokens}) >
           most_bytes;
  }

  // Over all pass sizes, the small ones first: they leave the large ones little to try for.
  int64_t smallest_memory(const std::vector<std::string_view>& strategies) {
    int64_t smallest = std::numeric_limits<int64_t>::max();
    auto sizes = pass_sizes(request_.max_tokens_per_pass);
    std::ranges::reverse(sizes);
    for (const auto strategy : strategies) {
      if (is_left_out(strategy, strategies)) continue;
      for (const int64_t size : sizes) {
        try {
          if (const auto candidate = price(strategy, size, {smallest - 1}))
            smallest = std::min(smallest, candidate->simulation.peak_bytes);
        } catch (const UserError&) {  // a path longer than a pass
        }
      }
    }
    return smallest;
  }

  Plan finish(Candidate candidate) {
    if (candidate.plan) return std::move(*candidate.plan);
    if (candidate.draft) return finish_blocks(std::move(*candidate.draft), request_, whole(), parts());
    return make(candidate.strategy, candidate.size);
  }

  Plan make(std::string_view strategy, int64_t size) {
    if (strategy == "dense") return plan_dense(flat(), size);
    if (strategy == "packed") return plan_packed(request_, whole(), size);
    if (strategy == "path") return plan_path(whole(), size);
    return finish_blocks(draft_blocks(request_, whole(), parts(), size), request_, whole(), parts());
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
  std::optional<PartReader> parts_;
  std::optional<int64_t> least_packed_size_;  // the longest path
  bool leaves_train_ = true;
};

}  // namespace

// Children before parents: a block near the leaves opens once for each of many chains, one near the root for all of
// them together, so memory spent lower down saves more recomputation.
void choose_what_is_kept(Plan& plan, const PassCosts& costs, int64_t budget) {
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
