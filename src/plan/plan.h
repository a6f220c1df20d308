// Plans: how a batch goes through the model (engine.md 2).
//
// A plan is a list of trees, each cut into blocks. A block is the tokens of one pass through the model.
//   - An *interior* block is a run of consecutive tokens of one path that have descendants in other blocks.
//     Its keys and values lie on the prefix KV stack while the descendants run.
//   - A *leaf* block is a forest of pieces that hang off tokens of the stack. Its backward runs directly
//     after its forward.
// The steps of a block b are in post-order: forward(b), then all descendants, then backward(b). Before
// backward(b), all activations of b that were not kept are recomputed. Memory holds the blocks of one path
// from a root block to a leaf block, never the tree.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "plan/pass_costs.h"
#include "tree/prefix_tree.h"

namespace bough {

struct TokenRange {
  int32_t begin, end;  // tree tokens [begin, end)
  int32_t size() const { return end - begin; }
};

// Whether blocks may hold only their layer inputs and recompute their layers (RecomputePolicy).
enum class LayerRecompute {
  kWherePays,  // if, under a memory budget, the plan is then the fastest one or the only one that fits
  kAlways,     // all blocks
  kNever,      // no block
};

// Whether blocks that recompute their layers may hold the layer inputs in host memory.
enum class ActivationOffload {
  kWhereNeeded,  // if the block does not fit otherwise
  kAlways,       // all such blocks
  kNever,
};

struct Block {
  bool interior = false;
  RecomputePolicy keep = RecomputePolicy::
      kActivations;    // an interior block starts with kKeysValues; choose_recompute_policies() may change it
  int32_t above = -1;  // parent: the interior block directly below it on the stack; -1: none
  int64_t stack_rows = 0;          // P: tokens on the stack below this block, the length of its prefix
  std::vector<TokenRange> ranges;  // its tokens in pre-order; an interior block has one range
  int64_t num_tokens = 0;
  int64_t num_pairs = 0;        // (query, key) pairs that attention visits, keys on the stack included
  int64_t num_stack_pairs = 0;  // (query, key) pairs with a key on the stack
  int64_t num_pieces = 0;       // runs of consecutive tokens; in a run, each token is the parent of the next
  int64_t num_head_rows = 0;    // rows of the lm_head: tokens that at least one sequence trains
  int64_t num_loss_rows = 0;    // loss rows: the same tokens, each once per sequence that trains it
  int64_t num_boundary_tokens =
      0;               // boundary hidden states: tokens whose final hidden state other blocks read
  bool needed = true;  // false: no token here or in a descendant is trained, so it never runs

  PassShape shape() const {
    return {.tokens = num_tokens,
            .stack_rows = stack_rows,
            .pairs = num_pairs,
            .head_rows = num_head_rows,
            .stack_pairs = num_stack_pairs,
            .pieces = num_pieces,
            .loss_rows = num_loss_rows};
  }
};

struct Step {
  enum class Kind {
    kForward,          // interior: push keys and values
    kForwardBackward,  // leaf
    kBackward,         // interior: recompute what was not kept, backward, pop
  };
  Kind kind;
  int32_t block;
};

struct PlannedTree {
  std::shared_ptr<const PrefixTree> tree;
  std::vector<int64_t> sequences;  // batch index of each sequence of the tree
  std::vector<Block> blocks;
  std::vector<Step> steps;
  int64_t stack_capacity = 0;  // most tokens that interior blocks put on the stack at once
};

struct Plan {
  std::string strategy;             // dense | packed | path | blocks; for `auto`, the chosen one
  int64_t max_tokens_per_pass = 0;  // of this plan; at most the request's, except with fixed_micro_batches
  std::vector<PlannedTree> trees;
};

// How pipeline stages execute a plan. Each stage has some of the layers (plan/pipeline_schedule.h).
struct Pipeline {
  int64_t num_stages = 1;
  bool backward = true;          // false: forward only; a backward step then only pops its interior block
  bool leaves_on_stack = false;  // context parallelism: a leaf block's tokens lie on the stack while it runs
};

struct PlanRequest {
  std::vector<TokenSpan> sequences;
  // One flag per token of the flat batch, sequence after sequence: 1 if the sequence trains the token. A
  // sequence's first token never trains. Empty: all other tokens train.
  std::vector<uint8_t> trained;
  // B: the most tokens whose activations are held at once, in the current pass and in interior blocks
  // together. If memory_bytes is set, B bounds only the tokens of a pass.
  int64_t max_tokens_per_pass = 1024;
  // Memory budget in bytes, in addition to weights and gradients. Needs `costs`.
  std::optional<int64_t> memory_bytes;
  // The cost model, not owned. It decides pass sizes, recompute policies, and which paths are computed again.
  // If nullptr, passes have at most B tokens, and recompute policies follow from `layers` and `offload`
  // alone.
  const PassCosts* costs = nullptr;
  // `dense`: the least number of micro-batches (one pass each). A batch of fewer sequences has one
  // micro-batch per sequence. With fixed_micro_batches the number is exact; then sequences stay in batch
  // order, and B does not apply.
  int64_t num_micro_batches = 1;
  bool fixed_micro_batches = false;
  // How `packed` cuts the batch into trees: a name of packer_names() (plan/packing.h).
  std::string packer = "auto";
  LayerRecompute layers = LayerRecompute::kWherePays;
  ActivationOffload offload = ActivationOffload::kWhereNeeded;
  // If num_stages > 1, plans are compared by the time at which the last stage finishes.
  Pipeline pipeline;
};

// Returns the request for a subset of the sequences of `whole`, given by their indices.
PlanRequest part_of(const PlanRequest& whole, std::span<const int64_t> sequences);

// memory_bytes is too small. `smallest`: bytes that would do.
struct MemoryTooSmall : UserError {
  MemoryTooSmall(const std::string& message, int64_t smallest) : UserError(message), smallest(smallest) {}
  int64_t smallest;
};

// Makes a plan by the name of its strategy:
//   dense   No common prefixes. AReaL's dynamic allocation packs sequences into passes of at most B tokens:
//           longest first, each into the pass with the fewest sequences among those with room. A sequence
//           longer than B is cut into even chunks. All chunks but the last are interior blocks.
//   packed  Tree Packing (plan/packing.h): trees of at most B tokens, one pass each, made by the request's
//           packer. Throws UserError if a path is longer than B.
//   path    DTA (arXiv 2602.00482, Algorithms 1 to 3): one path at a time, children in backward depth-first
//           order. Each run between branch points is cut into even chunks of at most B tokens. A leaf's last
//           chunk runs forward once, directly before its backward; DTA runs its forward twice.
//   blocks  The general form. Leaf blocks are forests, filled from branches along the whole stack. Interior
//           blocks hold as many activations as the memory allows. A short common path is computed again in
//           several trees if a pass of its own costs more.
//   auto    The plan of blocks, packed or dense that has the least predicted time within the memory. dense is
//           left out if the flat batch has more than 16 times the tree's tokens. If there is no cost model:
//           blocks.
// With a cost model, the pass size is chosen for the least predicted time. Among plans within kAsFast of the
// fastest, the one with the least predicted peak memory is taken. Under memory_bytes, passes may recompute
// their layers (RecomputePolicy) if that is fastest or nothing else fits.
// Throws UserError if
//   - the strategy or the packer is unknown,
//   - max_tokens_per_pass is below 1,
//   - memory_bytes is too small for the strategy (MemoryTooSmall); the message has the smallest sufficient
//     value.
Plan make_plan(std::string_view strategy, const PlanRequest& request);

// All names, `auto` first.
std::span<const std::string_view> strategy_names();
// Throws UserError if there is no strategy of this name. The message names the option and the strategies.
void check_strategy(const std::string& option, std::string_view name);

// Number of tokens in the plan's trees. A token that several trees contain counts once per tree. Recomputed
// tokens count once.
int64_t num_planned_tokens(const Plan& plan);

// ERR, the effective reuse ratio (Tree Training, arXiv 2511.00413, section 3.1): the fraction of the flat
// batch's tokens that is not computed. One tree of all sequences reaches the maximum, which is POR
// (TreeStatistics::potential_overlap_ratio). If the batch is split into several trees, 1 / (1 - ERR) is DTA's
// effective compression (arXiv 2602.00482, section 5.3). 1 - ERR is AReaL's tree_token_ratio. Returns 0 if
// there are no tokens.
double effective_reuse_ratio(int64_t num_computed_tokens, int64_t num_flat_tokens);

// Predicted times count as equal up to this factor, because the error of predictions is larger.
constexpr double kAsFast = 1.02;

// Checks the rules of engine.md 2. Throws InternalError unless
//   - each sequence ends in exactly one tree, and the tokens on its path spell the sequence,
//   - each token lies in one block of at most B tokens,
//   - the steps run each block's forward before another block reads it, and its backward once.
void validate(const Plan& plan, const std::vector<TokenSpan>& sequences);

// Prediction of a plan execution, computed without a model.
struct Simulation {
  int64_t num_passes = 0;         // a leaf block counts 1, an interior block 2
  int64_t tokens_forwarded = 0;   // first forwards only
  int64_t tokens_recomputed = 0;  // whole blocks, or layer by layer
  int64_t num_on_host = 0;        // blocks whose layer inputs are held in host memory
  int64_t peak_stack_tokens = 0;  // keys and values held
  int64_t peak_pass_tokens = 0;   // tokens of the largest pass
  int64_t peak_kept_tokens = 0;   // most tokens with all activations held, in a pass and in open blocks
  double seconds = 0;             // predicted; 0 without a cost model
  int64_t peak_bytes = 0;         // predicted, without weights and gradients; 0 without a cost model
};
Simulation simulate(const Plan& plan, const PassCosts* costs = nullptr);

}  // namespace bough
