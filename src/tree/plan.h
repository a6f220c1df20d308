// Plans: how a batch goes through the model (engine.md 2).
//
// A plan is a list of trees, each cut into blocks; a block is one pass through the model. An *interior* block is a
// run of consecutive tokens of one path that have descendants in other blocks: its keys and values lie on the stack
// while those run. A *leaf* block is any forest of pieces that hang off tokens of the stack; it runs forward and
// backward at once. Steps are in post-order: forward(b), then all descendants, then backward(b), which recomputes b
// where only its keys and values were kept. Memory is one root-to-leaf chain of blocks, never the tree.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tree/prefix_tree.h"

namespace bough {

struct TokenRange {
  int32_t begin, end;  // tree tokens [begin, end)
  int32_t size() const { return end - begin; }
};

struct Block {
  bool interior = false;
  int32_t above = -1;      // the interior block whose rows end where this one's keys begin; -1 at the bottom
  int64_t stack_rows = 0;  // P: rows of the stack below this block
  std::vector<TokenRange> ranges;  // its tokens, in pre-order; an interior block has one range
  int64_t num_tokens = 0;
};

struct Step {
  enum class Kind {
    kForward,          // interior: push keys and values, no graph
    kForwardBackward,  // leaf
    kBackward,         // interior: recompute with a graph, then backward, then pop
  };
  Kind kind;
  int32_t block;
};

struct PlannedTree {
  PrefixTree tree;
  std::vector<int64_t> sequences;  // the batch's index of each of the tree's sequences
  std::vector<Block> blocks;
  std::vector<Step> steps;
  int64_t stack_capacity = 0;  // rows of the deepest chain of interior blocks
};

struct Plan {
  std::string strategy;
  int64_t max_tokens_per_pass = 0;  // B
  std::vector<PlannedTree> trees;
};

// No sharing: sequences packed into passes of at most B tokens; a longer one goes in even chunks, the earlier of
// them interior.
Plan plan_dense(const std::vector<TokenSpan>& sequences, int64_t max_tokens_per_pass);

// DTA (papers/areal-dta.txt, Algorithms 1-3): one path at a time, children in backward depth-first order, each
// stretch between branch points in even chunks of at most B; a leaf's last chunk runs forward and backward at once,
// where DTA forwards it twice. Keys and values of at most the longest path, activations of at most B tokens.
Plan plan_path(const std::vector<TokenSpan>& sequences, int64_t max_tokens_per_pass);

// By name: dense | path. UserError for another one.
Plan make_plan(std::string_view strategy, const std::vector<TokenSpan>& sequences,
               int64_t max_tokens_per_pass);

// Throws InternalError unless each sequence ends in exactly one tree and is spelled there, each token lies in one
// block of at most B tokens, and the steps forward each block before it is read and backpropagate it once.
void validate(const Plan& plan, const std::vector<TokenSpan>& sequences);

// What a plan would do, without a model.
struct Simulation {
  int64_t num_passes = 0;        // forward and backward of a leaf counted as one, an interior block as two
  int64_t tokens_forwarded = 0;  // first forwards
  int64_t tokens_recomputed = 0;
  int64_t peak_stack_tokens = 0;  // keys and values held
  int64_t peak_pass_tokens = 0;   // activations held
};
Simulation simulate(const Plan& plan);

}  // namespace bough
