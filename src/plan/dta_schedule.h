// DTA's own schedule, pass by pass, without a model (papers/areal-dta.txt, Algorithms 1 to 3): what its
// tables count, beside our strategies.
//
// Leaves come one after another. A leaf's new suffix goes onto the stack of tokens; keys and values are
// materialized, without a graph, up to the next pop's last chunk (FWD-NoGrad); then the pop, down to what the
// next leaf shares, forwards each chunk with its graph and backpropagates it. A pop goes on through branch
// points that no later leaf needs, so that the last leaf of a branch shares its passes with the stretches
// above it.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "tree/prefix_tree.h"

namespace bough {

enum class DtaVariant {
  kReleased,     // the released code: first forwards end where the next pop's last chunk begins
  kWholeSuffix,  // the released code with `cut_f1_tail` off: first forwards run to the leaf, so that its last
                 // chunk is forwarded twice
  kPrinted,      // Algorithm 3 to the letter: line 18 forwards every suffix, line 31 up to the anchor again
};

enum class DtaOrder {
  kBackward,       // Algorithm 1
  kLexicographic,  // of the leaves, as the tree is built
};

struct DtaOptions {
  int64_t block_size = std::numeric_limits<int64_t>::max();  // B: tokens of a chunk
  DtaVariant variant = DtaVariant::kReleased;
  DtaOrder order = DtaOrder::kBackward;
};

struct DtaPass {
  enum class Kind { kForward, kForwardBackward };  // FWD-NoGrad, or line 18; FWD with a graph and BWD
  Kind kind;
  int32_t leaf;               // the leaf on the stack, counted in the order they come
  int64_t num_prefix_tokens;  // keys and values read
  int64_t num_tokens;         // at depths from num_prefix_tokens on
};

struct DtaSchedule {
  std::vector<DtaPass> passes;
  int64_t num_leaves = 0;
  int64_t tokens_forwarded = 0;      // by all passes
  int64_t tokens_recomputed = 0;     // forwarded beyond once a tree token
  int64_t peak_stack_tokens = 0;     // keys and values held: the longest path
  int64_t peak_pass_tokens = 0;      // activations held: the largest chunk with a graph
  double effective_compression = 1;  // tokens of the flat batch over tokens forwarded
};

// O(S log S + passes). UserError for a block size below 1.
DtaSchedule simulate_dta(const PrefixTree& tree, const DtaOptions& options = {});

}  // namespace bough
