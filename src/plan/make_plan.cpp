// make_plan: the table of strategies. Chooses pass size, recompute policy and, for `auto`, the strategy.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>

#include "base/error.h"
#include "base/format.h"
#include "plan/pipeline_schedule.h"
#include "plan/plan_strategies.h"
#include "plan/simulator.h"

namespace bough {

namespace {

// The smallest pass size, in tokens, that is tried below max_tokens_per_pass. A smaller pass costs more time
// than the memory that it saves is worth.
constexpr int64_t kSmallestPass = 16;

constexpr int kWorseInARow = 2;

// `auto` skips `dense` if the flat batch has more than this many times the tree's tokens. `blocks` has passes
// of the same size and runs each token's forward at most twice, so it is faster then. `dense` could only win
// if memory for a few boundary hidden states were short, but its flat tree could take gigabytes (nested
// prefixes).
constexpr int64_t kMostFlat = 16;

// One choice to try for a strategy: passes of at most `size` tokens with this layer recomputation.
struct PassChoice {
  int64_t size;
  LayerRecompute layers;
};

// The data that strategies read from a request. Each part is built on first use and kept for all pass sizes.
class Batch {
 public:
  explicit Batch(const PlanRequest& request) : request_(request) {}

  const PlanRequest& request() const { return request_; }
  IndexedTree& whole() {
    if (!whole_) whole_.emplace(request_);
    return *whole_;
  }

  // Returns true if every `packed` plan needs more than most_bytes; false if this is not certain. Needs no
  // packing: if there are several trees, one is more than half full, otherwise two trees would fit into one.
  bool is_packed_above(const PassChoice& passes, int64_t most_bytes);

 private:
  const PlanRequest& request_;
  std::optional<IndexedTree> whole_;
  std::optional<int64_t> least_packed_size_;  // the longest path
  bool leaves_train_ = true;
};

// A candidate whose peak or time exceeds these bounds is not evaluated to its end.
struct Bounds {
  std::optional<int64_t> most_bytes;
  double most_seconds = std::numeric_limits<double>::infinity();
};

struct Priced {
  Simulation simulation;
  std::optional<BlocksDraft> draft;  // present if pricing made it; its plan may already be complete
};

struct Strategy {
  std::string_view name;
  // Predicts the plan that the strategy makes for `passes`. Returns nullopt if the plan's peak exceeds
  // bounds.most_bytes. If the plan's time exceeds bounds.most_seconds, the returned time is inexact, but
  // exceeds the bound too. Throws UserError if the strategy has no plan for `passes`.
  std::optional<Priced> (*price)(Batch& batch, const PassChoice& passes, const Bounds& bounds);
  Plan (*make)(Batch& batch, const PassChoice& passes);
  // completes a draft that was priced; nullptr if the strategy has no drafts
  Plan (*finish)(Batch& batch, BlocksDraft draft);
};

struct Candidate {
  const Strategy* strategy;
  PassChoice passes;
  Priced priced;
  double seconds;
  std::optional<Plan> plan = {};  // present if time_in_stages() has made it
};

// Sizes to try, for B = max_tokens_per_pass: B, 3/4 B (often as many passes in less memory), and powers of
// two below B. Largest first.
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

bool Batch::is_packed_above(const PassChoice& passes, int64_t most_bytes) {
  const int64_t size = passes.size;
  const auto& tree = whole().tree();
  if (tree.num_tokens() <= size) return false;
  if (!least_packed_size_) {
    least_packed_size_ = 0;
    for (const auto& node : whole().branches().nodes) {
      const bool trains = whole().num_trained({node.begin, node.end}) > 0;
      *least_packed_size_ = std::max<int64_t>(*least_packed_size_, node.depth);
      if (node.is_leaf() && !trains) leaves_train_ = false;  // a tree that trains nothing takes no memory
    }
  }
  if (size < *least_packed_size_ || !leaves_train_) return false;
  const auto& costs = *request_.costs;
  return whole().num_rows(whole().all()) * costs.row_bytes() +
             least_pass_bytes(costs, {.tokens = size / 2 + 1},
                              {.layers = passes.layers, .offload = request_.offload}) >
         most_bytes;
}

// Returns the bytes that the plan may hold: the given budget. If no budget is given: the bytes of the plan's
// largest stack, of the activations of request.max_tokens_per_pass tokens, and of the temporaries of one pass
// of plan.max_tokens_per_pass tokens.
int64_t budget(const PlanRequest& request, const Plan& plan) {
  if (request.memory_bytes) return *request.memory_bytes;
  const auto& costs = *request.costs;
  const int64_t size = request.max_tokens_per_pass;
  int64_t stack_rows = 0;
  for (const auto& planned : plan.trees) stack_rows = std::max(stack_rows, planned.stack_capacity);
  return stack_rows * costs.stack_row_bytes() + size * costs.kept_bytes(RecomputePolicy::kActivations) +
         costs.temporary_bytes({plan.max_tokens_per_pass, stack_rows, 0, plan.max_tokens_per_pass},
                               RecomputePolicy::kActivations);
}

std::optional<Priced> price_dense(Batch& batch, const PassChoice& passes, const Bounds& bounds) {
  return Priced{
      simulate_dense(batch.request(), passes.size, bounds.most_bytes, bounds.most_seconds, passes.layers),
      {}};
}

Plan make_dense(Batch& batch, const PassChoice& passes) {
  return plan_dense(batch.request(), passes.size, passes.layers);
}

std::optional<Priced> price_packed(Batch& batch, const PassChoice& passes, const Bounds& bounds) {
  const bool fills_trees = batch.request().packer == "auto";
  if (fills_trees && bounds.most_bytes && batch.is_packed_above(passes, *bounds.most_bytes))
    return std::nullopt;
  const IndexedTree& whole = batch.whole();
  return Priced{simulate_packed(whole, passes.size, passes.layers), {}};
}

Plan make_packed(Batch& batch, const PassChoice& passes) {
  return plan_packed(batch.whole(), passes.size, passes.layers);
}

Plan make_path(Batch& batch, const PassChoice& passes) {
  Plan plan = plan_path(batch.whole(), passes.size);
  if (passes.layers != LayerRecompute::kNever)
    choose_what_is_kept(plan, *batch.request().costs,
                        batch.request().memory_bytes.value_or(std::numeric_limits<int64_t>::max()),
                        {.layers = passes.layers, .offload = batch.request().offload});
  return plan;
}

std::optional<Priced> price_path(Batch& batch, const PassChoice& passes, const Bounds& bounds) {
  BlocksDraft draft{.plan = make_path(batch, passes)};
  const auto simulation = simulate(draft.plan, batch.request().costs, bounds.most_bytes, bounds.most_seconds);
  return Priced{simulation, std::move(draft)};
}

Plan finish_path(Batch&, BlocksDraft draft) {
  return std::move(draft.plan);
}

std::optional<Priced> price_blocks(Batch& batch, const PassChoice& passes, const Bounds& bounds) {
  const auto* costs = batch.request().costs;
  auto draft = draft_blocks(batch.whole(), passes.size, bounds.most_bytes, passes.layers);
  if (!draft.fits) return std::nullopt;
  choose_what_is_kept(
      draft.plan, *costs, budget(batch.request(), draft.plan),
      {.layers = passes.layers, .offload = batch.request().offload, .interior_may_keep_more = true});
  const auto simulation = simulate(draft.plan, costs, bounds.most_bytes, bounds.most_seconds);
  return Priced{simulation, std::move(draft)};
}

Plan make_blocks(Batch& batch, const PassChoice& passes) {
  return finish_blocks(draft_blocks(batch.whole(), passes.size), batch.whole());
}

Plan finish_drafted_blocks(Batch& batch, BlocksDraft draft) {
  return finish_blocks(std::move(draft), batch.whole());
}

constexpr std::array kStrategies = {
    Strategy{"dense", price_dense, make_dense, nullptr},
    Strategy{"packed", price_packed, make_packed, nullptr},
    Strategy{"path", price_path, make_path, finish_path},
    Strategy{"blocks", price_blocks, make_blocks, finish_drafted_blocks},
};
constexpr std::string_view kAuto = "auto";
constexpr std::array<std::string_view, 3> kAutoTries = {"blocks", "packed", "dense"};  // in this order

constexpr auto kNames = [] {
  std::array<std::string_view, kStrategies.size() + 1> names{kAuto};
  for (size_t i = 0; i < kStrategies.size(); ++i) names[i + 1] = kStrategies[i].name;
  return names;
}();

// The row of the table; nullptr if there is none.
const Strategy* find_strategy(std::string_view name) {
  const auto found = std::ranges::find(kStrategies, name, &Strategy::name);
  return found == kStrategies.end() ? nullptr : &*found;
}

class Planner {
 public:
  explicit Planner(const PlanRequest& request) : request_(request), batch_(request) {}

  // Among the plans within kAsFast of the least predicted time, returns the one of least predicted peak
  // memory. Without a cost model, returns the plan with passes of at most request.max_tokens_per_pass tokens.
  Plan best(const std::vector<const Strategy*>& strategies) {
    if (!request_.costs) return without_costs(*strategies.front());
    std::vector<Candidate> fastest;  // all candidates within kAsFast of the fastest one so far
    std::optional<UserError> refused;
    bool any_too_large = false;
    for (const auto* strategy : strategies) {
      if (is_left_out(strategy, strategies)) continue;
      bool is_too_large = false;
      for (const LayerRecompute layers : ways()) {
        // If no tried size was too large without recomputation, recomputing layers gains nothing.
        if (layers == LayerRecompute::kWherePays && !is_too_large) continue;
        is_too_large = try_sizes(*strategy, layers, fastest, refused);
        any_too_large |= is_too_large;
      }
    }
    if (!fastest.empty())
      return finish(std::move(*std::ranges::min_element(
          fastest, {}, [](const Candidate& candidate) { return candidate.priced.simulation.peak_bytes; })));
    if (!any_too_large) throw *refused;
    const int64_t smallest = smallest_memory(strategies);
    throw MemoryTooSmall(str("memory (--memory, mb_spec.memory): got ", *request_.memory_bytes,
                             " bytes over weights and gradients, too little for this batch with strategy ",
                             strategies.size() > 1 ? "auto" : std::string(strategies.front()->name),
                             "; the smallest budget that fits is ", smallest, " bytes (",
                             format_bytes(static_cast<double>(smallest)), ")"),
                         smallest);
  }

 private:
  // The layer recomputation choices in the order in which they are tried.
  std::vector<LayerRecompute> ways() const {
    if (request_.layers == LayerRecompute::kAlways) return {LayerRecompute::kAlways};
    if (request_.layers == LayerRecompute::kNever || !request_.memory_bytes) return {LayerRecompute::kNever};
    return {LayerRecompute::kNever, LayerRecompute::kWherePays};
  }

  Plan without_costs(const Strategy& strategy) {
    Plan plan = strategy.make(batch_, {request_.max_tokens_per_pass, LayerRecompute::kNever});
    if (request_.layers == LayerRecompute::kAlways)
      for (auto& planned : plan.trees)
        for (auto& block : planned.blocks)
          block.keep = request_.offload == ActivationOffload::kAlways ? RecomputePolicy::kLayerInputsOnHost
                                                                      : RecomputePolicy::kLayerInputs;
    return plan;
  }

  // Tries sizes from large to small until kWorseInARow sizes in a row are slower. Time as a function of pass
  // size has one minimum, apart from small jumps of the number of passes. Returns true if the plan of some
  // size did not fit into the memory budget.
  bool try_sizes(const Strategy& strategy, LayerRecompute layers, std::vector<Candidate>& fastest,
                 std::optional<UserError>& refused) {
    bool any_too_large = false;
    double least = std::numeric_limits<double>::infinity();
    int num_worse = 0;
    for (const int64_t size : pass_sizes(request_.max_tokens_per_pass)) {
      if (num_worse == kWorseInARow) break;
      try {
        const bool in_stages = request_.pipeline.num_stages > 1;
        const double most = in_stages ? std::numeric_limits<double>::infinity() : least * kAsFast;
        auto priced = strategy.price(batch_, {size, layers}, {request_.memory_bytes, most});
        if (!priced || !is_within_memory(*priced)) {
          any_too_large = true;
          continue;
        }
        Candidate candidate{&strategy, {size, layers}, std::move(*priced), 0};
        candidate.seconds = candidate.priced.simulation.seconds;
        if (in_stages) time_in_stages(candidate);
        num_worse = candidate.seconds < least ? 0 : num_worse + 1;
        least = std::min(least, candidate.seconds);
        add_if_fast(fastest, std::move(candidate));
      } catch (const UserError& error) {  // `packed`: a path is longer than a pass of this size
        if (!refused) refused = error;
        break;  // smaller passes cannot hold that path either
      }
    }
    return any_too_large;
  }

  static void add_if_fast(std::vector<Candidate>& fastest, Candidate candidate) {
    double least = candidate.seconds;
    for (const auto& other : fastest) least = std::min(least, other.seconds);
    fastest.push_back(std::move(candidate));
    std::erase_if(fastest, [&](const Candidate& other) { return other.seconds > least * kAsFast; });
  }

  bool is_left_out(const Strategy* strategy, const std::vector<const Strategy*>& strategies) {
    return strategy->name == "dense" && strategies.size() > 1 &&
           batch_.whole().tree().num_flat_tokens() > kMostFlat * batch_.whole().tree().num_tokens();
  }

  bool is_within_memory(const Priced& priced) const {
    return !request_.memory_bytes || priced.simulation.peak_bytes <= *request_.memory_bytes;
  }

  // Returns the smallest peak of a plan of these strategies. Tries small passes first: with their low peaks
  // as a bound, larger passes are rejected early.
  int64_t smallest_memory(const std::vector<const Strategy*>& strategies) {
    int64_t smallest = std::numeric_limits<int64_t>::max();
    auto sizes = pass_sizes(request_.max_tokens_per_pass);
    std::ranges::reverse(sizes);
    for (const auto* strategy : strategies) {
      if (is_left_out(strategy, strategies)) continue;
      for (const LayerRecompute layers : ways())
        for (const int64_t size : sizes) {
          try {
            if (const auto priced = strategy->price(batch_, {size, layers}, {smallest - 1}))
              smallest = std::min(smallest, priced->simulation.peak_bytes);
          } catch (const UserError&) {  // a path is longer than a pass
          }
        }
    }
    return smallest;
  }

  void time_in_stages(Candidate& candidate) {
    candidate.plan = finish(std::move(candidate));
    candidate.seconds = pipeline_seconds(*candidate.plan, *request_.costs, request_.pipeline);
  }

  Plan finish(Candidate&& candidate) {
    if (candidate.plan) return std::move(*candidate.plan);
    const auto& strategy = *candidate.strategy;
    return candidate.priced.draft ? strategy.finish(batch_, std::move(*candidate.priced.draft))
                                  : strategy.make(batch_, candidate.passes);
  }

  const PlanRequest& request_;
  Batch batch_;
};

}  // namespace

int64_t room_for_passes(const PlanRequest& request, int64_t num_loss_rows, int64_t stack_capacity) {
  if (!request.memory_bytes) return std::numeric_limits<int64_t>::max();
  const auto& costs = *request.costs;
  return *request.memory_bytes - num_loss_rows * costs.row_bytes() - stack_capacity * costs.stack_row_bytes();
}

void choose_what_is_kept(Plan& plan, const PassCosts& costs, int64_t budget, const RecomputeRules& rules) {
  int64_t num_loss_rows = 0;
  for (const auto& planned : plan.trees)
    for (const auto& block : planned.blocks) num_loss_rows += block.num_loss_rows;
  budget -= num_loss_rows * costs.row_bytes();
  for (auto& planned : plan.trees)
    choose_recompute_policies(planned.blocks, costs,
                              budget - planned.stack_capacity * costs.stack_row_bytes(), rules);
}

PlanRequest part_of(const PlanRequest& whole, std::span<const int64_t> sequences) {
  std::vector<size_t> offsets = {0};
  for (const TokenSpan& sequence : whole.sequences) offsets.push_back(offsets.back() + sequence.size());
  PlanRequest part = whole;
  part.sequences.clear();
  part.trained.clear();
  for (const int64_t s : sequences) {
    const auto index = static_cast<size_t>(s);
    part.sequences.push_back(whole.sequences.at(index));
    if (!whole.trained.empty())
      part.trained.insert(part.trained.end(), whole.trained.begin() + static_cast<int64_t>(offsets[index]),
                          whole.trained.begin() + static_cast<int64_t>(offsets[index + 1]));
  }
  return part;
}

Plan make_plan(std::string_view strategy, const PlanRequest& request) {
  if (request.max_tokens_per_pass < 1)
    throw UserError(
        str("max_tokens_per_mb: got ", request.max_tokens_per_pass, ", expected at least 1 token a pass"));
  BOUGH_CHECK(!request.memory_bytes || request.costs, "a memory budget needs a cost model");
  check_packer("packer", request.packer);
  std::vector<const Strategy*> strategies;
  if (strategy == kAuto)
    for (const auto name : kAutoTries) strategies.push_back(find_strategy(name));
  else if (const auto* found = find_strategy(strategy)) strategies = {found};
  else check_strategy("tree_training_mode", strategy);
  return Planner(request).best(strategies);
}

std::span<const std::string_view> strategy_names() {
  return kNames;
}

void check_strategy(const std::string& option, std::string_view name) {
  if (std::ranges::find(kNames, name) == kNames.end())
    throw UserError(str(option, ": got ", quoted(name), ", expected ", format_choices(kNames)));
}

int64_t num_planned_tokens(const Plan& plan) {
  int64_t sum = 0;
  for (const auto& planned : plan.trees)
    for (const auto& block : planned.blocks) sum += block.num_tokens;
  return sum;
}

double effective_reuse_ratio(int64_t num_computed_tokens, int64_t num_flat_tokens) {
  return num_flat_tokens > 0
             ? 1 - static_cast<double>(num_computed_tokens) / static_cast<double>(num_flat_tokens)
             : 0;
}

}  // namespace bough
