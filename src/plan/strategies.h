// The strategies of make_plan (plan/plan.h), each in a file of its own; make_plan.cpp has the table of them.
#pragma once

#include <limits>

#include "plan/block_sink.h"
#include "plan/indexed_tree.h"
#include "plan/kept.h"
#include "plan/packing.h"

namespace bough {

// `dense` and `packed` write to a sink, so that they are priced without their trees: those spell a shared
// token again for each tree, and a batch of ten thousand nested prefixes would take gigabytes only to learn
// that it is better shared.

// Which sequences of `dense` go through the model together.
struct DenseLayout {
  std::vector<std::vector<int64_t>> micro_batches;  // none is empty; a sequence longer than a pass is alone
  std::vector<int64_t> empty;                       // sequences without a token
  int64_t max_tokens;  // of a pass: what was asked for, or the largest of a fixed number of micro-batches

  std::vector<int64_t> order() const;  // all sequences, one micro-batch after the other
};
// By the request's num_micro_batches. O(S^1.5 log S).
DenseLayout lay_out_dense(const PlanRequest& request, int64_t max_tokens_per_pass);

// Tokens are numbered as in build_flat_forest of the sequences in the layout's order. O(N) reads of flags.
// Returns the most tokens that a pass may have.
// `layers`, here and below: what passes may keep within the request's memory, whatever the request's says.
int64_t walk_dense(const PlanRequest& request, int64_t max_tokens_per_pass, BlockSink& sink,
                   LayerRecompute layers = LayerRecompute::kNever);
Plan plan_dense(const PlanRequest& request, int64_t max_tokens_per_pass,
                LayerRecompute layers = LayerRecompute::kNever);
// Prices plan_dense; above most_bytes or most_seconds it says only that it is above.
Simulation simulate_dense(const PlanRequest& request, int64_t max_tokens_per_pass,
                          std::optional<int64_t> most_bytes = {},
                          double most_seconds = std::numeric_limits<double>::infinity(),
                          LayerRecompute layers = LayerRecompute::kNever);

// Writes the blocks of the whole batch's packing: tokens are numbered as in a tree of the bin's
// sequences. O(nodes of the bins); with flags O(N).
void walk_packed(const IndexedTree& whole, const Packing& packing, BlockSink& sink,
                 LayerRecompute layers = LayerRecompute::kNever);
Plan plan_packed(const IndexedTree& whole, int64_t max_tokens_per_pass,
                 LayerRecompute layers = LayerRecompute::kNever);
Simulation simulate_packed(const IndexedTree& whole, int64_t max_tokens_per_pass,
                           LayerRecompute layers = LayerRecompute::kNever);

Plan plan_path(const IndexedTree& whole, int64_t max_tokens_per_pass);

// Where a common path is so short that a pass of its own costs more than computing it again (engine.md 2),
// the batch is cut into several trees that each repeat it: parts to be planned as trees of their own with
// passes of at most `max_tokens_per_pass`; together they are all sequences. A part with a path either fits a
// pass or has one node. None where nothing is worth repeating.
std::vector<TreePart> split_short_roots(const IndexedTree& whole, const PassCosts& costs,
                                        int64_t max_tokens_per_pass, int64_t max_tokens_held);

// `blocks` before its trees are built, which only the plan that is chosen needs.
struct BlocksDraft {
  Plan plan;                    // its trees have blocks and steps
  std::vector<TreePart> parts;  // one a tree; none: the only tree is the whole one
  bool fits = true;             // else it was given up: its peak is above what was asked for
};
// most_bytes: where given, with the request's costs: plans of a larger peak are given up, most of them early.
BlocksDraft draft_blocks(IndexedTree& whole, int64_t max_tokens_per_pass,
                         std::optional<int64_t> most_bytes = {},
                         LayerRecompute layers = LayerRecompute::kNever);
Plan finish_blocks(BlocksDraft draft, IndexedTree& whole);

// Bytes that a pass and what interior blocks keep may take beside the stack and the loss's rows; without
// bound where the request has none.
int64_t room_for_passes(const PlanRequest& request, int64_t num_loss_rows, int64_t stack_capacity);

// Has the blocks choose what they keep (kept.h) within `budget` bytes over weights and gradients.
void choose_what_is_kept(Plan& plan, const PassCosts& costs, int64_t budget, const KeepRules& rules);

}  // namespace bough
