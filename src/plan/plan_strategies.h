// The strategies of make_plan (plan/plan.h), one file each. make_plan.cpp has the table.
#pragma once

#include <limits>

#include "plan/block_sink.h"
#include "plan/indexed_tree.h"
#include "plan/packing.h"
#include "plan/recompute_policy.h"

namespace bough {

// `dense` and `packed` write to a BlockSink, so they can be priced without building their trees. Their trees
// contain a common prefix several times: for ten thousand nested prefixes they would take gigabytes.

// The micro-batches of `dense`: sequences that one pass computes together.
struct DenseLayout {
  std::vector<std::vector<int64_t>> micro_batches;  // none empty; a sequence longer than a pass has one alone
  std::vector<int64_t> empty;                       // sequences without a token
  int64_t max_tokens;  // of a pass: the requested size, or the largest micro-batch with fixed_micro_batches

  std::vector<int64_t> order() const;  // all sequences, one micro-batch after the other
};
// Reads num_micro_batches and fixed_micro_batches of the request. O(S^1.5 log S).
DenseLayout lay_out_dense(const PlanRequest& request, int64_t max_tokens_per_pass);

// Writes the blocks of `dense` to the sink. Tokens are numbered as in build_flat_forest() of the sequences in
// the layout's order. Returns the layout's max_tokens. Reads each training flag at most once.
// `layers`, here and in the functions below, replaces the request's `layers`. Unless it is kNever, the
// request must have costs, and the recompute policies of the blocks are chosen within the request's memory.
int64_t emit_dense(const PlanRequest& request, int64_t max_tokens_per_pass, BlockSink& sink,
                   LayerRecompute layers = LayerRecompute::kNever);
Plan plan_dense(const PlanRequest& request, int64_t max_tokens_per_pass,
                LayerRecompute layers = LayerRecompute::kNever);
// Predicts the plan of `dense` without building it. If bytes or seconds exceed most_bytes or most_seconds,
// the returned ones are inexact, but exceed the bound too.
Simulation simulate_dense(const PlanRequest& request, int64_t max_tokens_per_pass,
                          std::optional<int64_t> most_bytes = {},
                          double most_seconds = std::numeric_limits<double>::infinity(),
                          LayerRecompute layers = LayerRecompute::kNever);

// Writes one tree per bin to the sink. Tokens are numbered as in the prefix tree of the bin's sequences.
// O(nodes of the bins), or O(N) if the request has `trained` flags.
void emit_packed(const IndexedTree& whole, const Packing& packing, BlockSink& sink,
                 LayerRecompute layers = LayerRecompute::kNever);
Plan plan_packed(const IndexedTree& whole, int64_t max_tokens_per_pass,
                 LayerRecompute layers = LayerRecompute::kNever);
Simulation simulate_packed(const IndexedTree& whole, int64_t max_tokens_per_pass,
                           LayerRecompute layers = LayerRecompute::kNever);

Plan plan_path(const IndexedTree& whole, int64_t max_tokens_per_pass);

// Splits the batch into parts that are planned as separate trees (engine.md 2). Each part computes the path
// above it again. This pays if the path is so short that its own pass costs more. Together the parts contain
// all sequences. A part with a path fits one pass of `max_tokens_per_pass`, or its TreePart::nodes has one
// element. Returns an empty list if computing a path again never pays. max_tokens_held: if path and pass
// together have at most this many tokens, the activations of both are held, and the path needs no
// recomputation.
std::vector<TreePart> split_short_roots(const IndexedTree& whole, const PassCosts& costs,
                                        int64_t max_tokens_per_pass, int64_t max_tokens_held);

// A plan of `blocks` whose prefix trees are not built yet. Only the chosen plan needs them.
struct BlocksDraft {
  Plan plan;                    // its trees have blocks and steps, but PlannedTree::tree is nullptr
  std::vector<TreePart> parts;  // one per tree; empty: the plan has one tree, the whole tree
  bool fits = true;             // false: given up, because its peak exceeds most_bytes
};
// Makes the draft of `blocks`. most_bytes: plans with a larger peak are given up, most of them early; needs
// the request's costs. finish_blocks() builds the prefix trees.
BlocksDraft draft_blocks(IndexedTree& whole, int64_t max_tokens_per_pass,
                         std::optional<int64_t> most_bytes = {},
                         LayerRecompute layers = LayerRecompute::kNever);
Plan finish_blocks(BlocksDraft draft, IndexedTree& whole);

// Bytes for one pass and the checkpointed activations: the request's memory minus the stack and the loss
// rows. Returns the largest int64_t if the request has no memory bound.
int64_t room_for_passes(const PlanRequest& request, int64_t num_loss_rows, int64_t stack_capacity);

// Runs choose_recompute_policies() (recompute_policy.h) on each tree. budget: bytes of the whole plan, in
// addition to weights and gradients.
void choose_what_is_kept(Plan& plan, const PassCosts& costs, int64_t budget, const RecomputeRules& rules);

}  // namespace bough
