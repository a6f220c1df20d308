// The schedule of AReaL-DTA (arXiv 2602.00482, Algorithms 1 to 3), simulated pass by pass without a model. It
// reproduces the counts in DTA's tables, for comparison with Bough's strategies.
//
// Leaves come one after another. For each leaf:
//   1. The tokens below the prefix shared with the previous leaf (the suffix) go onto the stack of tokens.
//   2. FWD-NoGrad computes the suffix's keys and values without a graph, until the path's last chunk begins.
//   3. A pop removes tokens down to the prefix that the next leaf shares, in chunks of at most block_size
//      tokens. It runs each chunk forward with a graph, and then backward.
// A pop also removes branch points that no later leaf needs. So a chunk of the last leaf of a branch may also
// contain tokens above the branch point.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "tree/prefix_tree.h"

namespace bough {

enum class DtaVariant {
  kReleased,     // the released code: FWD-NoGrad ends where the path's last chunk begins
  kWholeSuffix,  // the released code with `cut_f1_tail` off: FWD-NoGrad runs to the leaf, so the last chunk
                 // is forwarded twice
  kPrinted,      // Algorithm 3 literally: line 18 forwards the suffix, line 31 again up to the anchor (the
                 // start of the path's last chunk)
};

enum class DtaOrder {
  kBackward,       // Algorithm 1
  kLexicographic,  // leaves by their token ids
};

struct DtaOptions {
  int64_t block_size = std::numeric_limits<int64_t>::max();  // B: tokens of a chunk
  DtaVariant variant = DtaVariant::kReleased;
  DtaOrder order = DtaOrder::kBackward;
};

struct DtaPass {
  enum class Kind { kForward, kForwardBackward };  // kForward: no graph (FWD-NoGrad, line 18)
  Kind kind;
  int32_t leaf;               // number of the leaf on the stack, in schedule order
  int64_t num_prefix_tokens;  // keys and values read
  int64_t num_tokens;         // the pass's tokens; the first has depth num_prefix_tokens
};

struct DtaSchedule {
  std::vector<DtaPass> passes;
  int64_t num_leaves = 0;
  int64_t tokens_forwarded = 0;      // sum over all passes
  int64_t tokens_recomputed = 0;     // tokens_forwarded minus the tree's tokens
  int64_t peak_stack_tokens = 0;     // most tokens whose keys and values are held: the longest path
  int64_t peak_pass_tokens = 0;      // most tokens whose activations are held: the largest chunk with a graph
  double effective_compression = 1;  // tokens of the flat batch / tokens_forwarded
};

// O(S log S + passes). Throws UserError if block_size is below 1.
DtaSchedule simulate_dta(const PrefixTree& tree, const DtaOptions& options = {});

}  // namespace bough
