// Context parallelism: the ranks of a group make a pass together, each with some of its tokens. All but
// attention is by token, and needs nothing of the others; attention gathers the pass's keys and values, so
// that every rank's stack has the rows of all, and each rank attends with its own queries. In backward each
// rank has what its queries send to the keys of all, on its stack; a pass's rows are summed over the ranks
// where its keys were made, before its own go back into the model. So a pass costs one all-gather and one sum
// of its keys and values a layer, whatever stands below it.
//
// The tokens are cut into twice as many runs as ranks, of which a rank has the k-th from the left and the
// k-th from the right: along one path later queries see more keys (Llama 3, "The Llama 3 Herd of Models",
// 3.3.2).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "kernels/tree_attention/tree_attention_segments.h"
#include "plan/pass_costs.h"

namespace bough {

class KvStack;

// Rank k's tokens of a pass of `num_tokens`: at most two runs, none empty.
struct TokenRun {
  int64_t begin = 0, end = 0;
};
std::vector<TokenRun> context_runs(int64_t num_tokens, int64_t rank, int64_t size);

class ContextPass {
 public:
  // end_local: int32 [stack_rows + T] of the whole pass, on the CPU (kernels/tree_attention). least_run: as
  // cut_into_segments() takes it, 0: none. Not to be used before `upload` is sent.
  ContextPass(Communicator& ranks, int64_t stack_rows, const std::vector<int32_t>& end_local,
              int64_t least_run, Upload& upload);
  ContextPass(const ContextPass&) = delete;
  ContextPass& operator=(const ContextPass&) = delete;

  // The pass's tokens that are this rank's, int64 [T_own]. Where it has none, as if the pass's first one were
  // its: what is computed of that, nobody reads, and its gradient is 0.
  const at::Tensor& own_tokens() const { return own_tokens_; }
  // [T, ...] of every rank's [T_own, ...].
  at::Tensor gather(const at::Tensor& own) const;
  // [T_own, ...] of [T, ...].
  at::Tensor own_of(const at::Tensor& whole) const;

  // Attention of this rank's queries. The keys and values of all are written to the stack, from stack_rows
  // on, in forward; what is there already must be the same bits where that is asked for.
  TreeAttentionOutput forward(const KvStack& stack, int64_t layer, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, double scale, bool verify_rows);
  // Other passes may write over the pass's rows of the stack between its forward and its backward: they are
  // kept, and written again for it.
  void keep_rows() { keeps_rows_ = true; }
  // Adds to the stack's gradients of the rows below, and of the pass's; the latter are then summed over the
  // ranks. d_o undefined: this rank's queries, and so all ranks', have no gradient. Returns d_q (then
  // undefined, too) and d_k, d_v of own tokens.
  TreeAttentionGradient backward(const KvStack& stack, int64_t layer, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v, const TreeAttentionOutput& out,
                                 const at::Tensor& d_o, double scale, bool same_bits) const;

 private:
  struct Piece {
    TokenRun run;
    int64_t at = 0;                      // its first row among own tokens
    KeyEnds ends;                        // of the keys up to its last token, for its queries
    std::vector<QuerySegment> segments;  // or empty
  };
  TreeAttentionInput input_of(const Piece& piece, const KvStack& stack, int64_t layer, const at::Tensor& q,
                              const at::Tensor& k, const at::Tensor& v, double scale) const;
  bool has_tokens() const { return !pieces_.empty(); }

  Communicator& ranks_;
  int64_t stack_rows_, num_tokens_;
  std::vector<Piece> pieces_;
  at::Tensor own_tokens_;
  at::Tensor places_;  // int64 [T]: row of each token in the ranks' padded rows, one rank after the other
  int64_t most_ = 0;   // tokens of a rank
  bool keeps_rows_ = false;
  std::vector<at::Tensor> kept_rows_;  // by layer: keys and values of all, [T, 2, G, H]
};

// What a pass costs each of `size` ranks that make it together: their tokens' part of it, and the rows of all
// of its tokens on the stack. What they send is not counted. `whole` where that is one rank.
std::shared_ptr<const PassCosts> context_costs(std::shared_ptr<const PassCosts> whole, int64_t size);

}  // namespace bough
