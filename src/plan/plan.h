// Plans: how a batch goes through the model (engine.md 2).
//
// A plan is a list of trees, each cut into blocks; a block is one pass through the model. An *interior* block
// is a run of consecutive tokens of one path that have descendants in other blocks: its keys and values lie
// on the stack while those run. A *leaf* block is any forest of pieces that hang off tokens of the stack; it
// runs forward and backward at once. Steps are in post-order: forward(b), then all descendants, then
// backward(b), which recomputes of b what was not kept. Memory is one root-to-leaf chain of blocks, never the
// tree.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/pass_costs.h"
#include "tree/prefix_tree.h"

namespace bough {

struct TokenRange {
  int32_t begin, end;  // tree tokens [begin, end)
  int32_t size() const { return end - begin; }
};

// Whether blocks may keep their layers' inputs in place of all activations (Keep).
enum class LayerRecompute {
  kWherePays,  // where a memory budget makes such a plan the fastest, or the only one
  kAlways,     // all blocks do
  kNever,      // none does
};

// Whether blocks that compute their layers again may have the layers' inputs in the host's memory meanwhile.
enum class ActivationOffload {
  kWhereNeeded,  // where nothing else that such a block may keep fits
  kAlways,       // all of them do
  kNever,
};

struct Block {
  bool interior = false;
  Keep keep = Keep::kActivations;  // an interior one's is chosen last: it is made with Keep::kKeysValues
  int32_t above = -1;      // the interior block whose rows end where this one's keys begin; -1 at the bottom
  int64_t stack_rows = 0;  // P: rows of the stack below this block
  std::vector<TokenRange> ranges;  // its tokens, in pre-order; an interior block has one range
  int64_t num_tokens = 0;
  int64_t num_pairs = 0;        // (query, key) pairs that attention visits: each token sees its whole path
  int64_t num_stack_pairs = 0;  // (query, key) pairs with a key on the stack
  int64_t num_pieces = 0;       // runs of consecutive tokens, each the parent of the next
  int64_t num_head_rows = 0;    // its tokens that some sequence trains
  int64_t num_loss_rows = 0;    // its tokens once for each sequence that trains them
  int64_t num_exits = 0;        // its tokens whose hidden states other blocks' heads read; interior blocks
  bool needed = true;           // it, or something that hangs off it, trains a token; else it is never run

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
  std::vector<int64_t> sequences;  // the batch's index of each of the tree's sequences
  std::vector<Block> blocks;
  std::vector<Step> steps;
  int64_t stack_capacity = 0;  // rows of the deepest chain of interior blocks
};

struct Plan {
  std::string strategy;             // dense | packed | path | blocks; of `auto` what it took
  int64_t max_tokens_per_pass = 0;  // of this plan: at most the request's
  std::vector<PlannedTree> trees;
};

// How a walk goes through stages that have the layers between them (plan/pipeline.h).
struct Pipeline {
  int64_t num_stages = 1;
  bool backward = true;  // else forward only: a backward step then closes the block, and sends nothing
  bool leaves_on_stack = false;  // a leaf block's own rows lie on the stack while it runs (context parallel)
};

struct PlanRequest {
  std::vector<TokenSpan> sequences;
  // A flag for each flat token, sequence after sequence; a sequence's first token never counts. Empty: all
  // others train.
  std::vector<uint8_t> trained;
  // B: tokens whose activations are held at once: those of a pass, and of interior blocks that keep theirs.
  int64_t max_tokens_per_pass = 1024;
  // Bytes over weights and gradients. Where given, B bounds single passes only.
  std::optional<int64_t> memory_bytes;
  // Decides the pass size of `blocks` and `auto`, what is kept and what is replicated. Not owned; without it
  // passes are of B tokens and nothing is kept.
  const PassCosts* costs = nullptr;
  // Of `dense`: how many micro-batches, a pass each, there are at least where there are as many sequences;
  // or, `fixed`, exactly, in the batch's order and whatever their tokens: B bounds them no more.
  int64_t num_micro_batches = 1;
  bool fixed_micro_batches = false;
  // How `packed` cuts the batch into trees: a name of packer_names() (plan/packing.h).
  std::string packer = "auto";
  LayerRecompute layers = LayerRecompute::kWherePays;
  ActivationOffload offload = ActivationOffload::kWhereNeeded;
  // Of several stages the time that is least is that of the last of them to be done.
  Pipeline pipeline;
};

// The request for these of its sequences alone.
PlanRequest part_of(const PlanRequest& whole, std::span<const int64_t> sequences);

// Makes a plan by the name of its strategy:
//   dense   no sharing: sequences packed into passes of at most B tokens by AReaL's dynamic allocation:
//           longest first, each into the pass with room that has the fewest sequences; a longer one goes in
//           even chunks, the earlier of them interior.
//   packed  Tree Packing (plan/packing.h): trees of at most B tokens, one pass each, cut by the request's
//           packer. UserError for a longer path.
//   path    DTA (papers/areal-dta.txt, Algorithms 1-3): one path at a time, children in backward depth-first
//           order, each stretch between branch points in even chunks of at most B; a leaf's last chunk runs
//           forward and backward at once, where DTA forwards it twice.
//   blocks  the general form: leaf blocks are forests, filled up to the pass size from all along the stack;
//           interior blocks keep what the memory allows; short common paths are replicated where a pass of
//           their own costs more.
//   auto    of blocks, packed and dense the one of least predicted time within the memory, dense being left
//           out where the flat batch is more than 16 times the tree; `blocks` where there is no cost model.
// With a cost model each takes the pass size of least predicted time, and of choices within kAsFast of it
// that of least memory. Within memory_bytes a pass may compute its layers again (Keep), where that is the
// fastest, or nothing else fits. UserError: another name of a strategy or packer; max_tokens_per_pass < 1;
// memory_bytes too small for the strategy (with the smallest that would do).
Plan make_plan(std::string_view strategy, const PlanRequest& request);

// auto, then all of the others.
std::span<const std::string_view> strategy_names();
// UserError that names the option and the strategies.
void check_strategy(const std::string& option, std::string_view name);

// Tokens of the plan's trees; one that several trees repeat counts in each. Interior blocks that are
// forwarded again count once.
int64_t num_planned_tokens(const Plan& plan);

// ERR, the effective reuse ratio (papers/tree-training.txt, section 3.1): the part of the flat batch's tokens
// that is not computed. At most POR (TreeStatistics::potential_overlap_ratio), which one tree of all
// sequences reaches. 1 / (1 - ERR) is the effective compression that DTA (papers/areal-dta.txt, section 5.3)
// gives for split trees, and 1 - ERR what AReaL calls tree_token_ratio. 0 for no tokens.
double effective_reuse_ratio(int64_t num_computed_tokens, int64_t num_flat_tokens);

// Predicted times that differ by less are as good as equal: predictions err by more.
constexpr double kAsFast = 1.02;

// Throws InternalError unless each sequence ends in exactly one tree and is spelled there, each token lies in
// one block of at most B tokens, and the steps forward each block before it is read and backpropagate it
// once.
void validate(const Plan& plan, const std::vector<TokenSpan>& sequences);

// What a plan would do, without a model.
struct Simulation {
  int64_t num_passes = 0;         // forward and backward of a leaf counted as one, an interior block as two
  int64_t tokens_forwarded = 0;   // first forwards
  int64_t tokens_recomputed = 0;  // at once, or layer by layer
  int64_t num_on_host = 0;        // blocks whose layers' inputs wait in the host's memory
  int64_t peak_stack_tokens = 0;  // keys and values held
  int64_t peak_pass_tokens = 0;   // of one pass
  int64_t peak_kept_tokens = 0;   // all of whose activations are held: of a pass and of open blocks
  double seconds = 0;             // predicted; 0 without a cost model
  int64_t peak_bytes = 0;         // predicted, over weights and gradients; 0 without a cost model
};
Simulation simulate(const Plan& plan, const PassCosts* costs = nullptr);

}  // namespace bough
