// Context parallelism: a process group splits the tokens of each pass. Only attention communicates.
// - Forward: the pass's keys and values are all-gathered, so every rank's prefix KV stack has the rows of all
//   tokens. Each rank computes attention for its shard of the queries.
// - Backward: each rank adds what its queries contribute to the key and value gradients on its stack. The
//   gradients of the pass's tokens are then summed over ranks, and each rank continues with its shard.
// So a pass needs one all-gather and one all-reduce of its keys and values per layer, whatever the depth of
// the prefix KV stack.
//
// The tokens are cut into 2 · size runs. Rank k has run k from the left and run k from the right. This
// balances the FLOPs, because along a path later queries attend to more keys ("The Llama 3 Herd of Models",
// 3.3.2).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "kernels/tree_attention/tree_attention_segments.h"
#include "plan/pass_costs.h"

namespace bough {

class PrefixKvStack;

// context_runs() returns the runs of tokens that `rank` has in a pass of `num_tokens` tokens: at most two
// runs, none of them empty. A rank without tokens has no run.
struct TokenRun {
  int64_t begin = 0, end = 0;
};
std::vector<TokenRun> context_runs(int64_t num_tokens, int64_t rank, int64_t size);

class ContextPass {
 public:
  // end_local: [stack_rows + T] of the whole pass (kernels/tree_attention). stack_rows: tokens on the prefix
  // KV stack before the pass.
  // least_run: for cut_into_segments() (kernels/tree_attention/tree_attention_segments.h); 0: no segments.
  // The object may be used only after the caller has sent `upload`.
  ContextPass(Communicator& ranks, int64_t stack_rows, const std::vector<int32_t>& end_local,
              int64_t least_run, HostToDeviceBatch& upload);
  ContextPass(const ContextPass&) = delete;
  ContextPass& operator=(const ContextPass&) = delete;

  // Indices of this rank's tokens in the pass, int64 [T_own]. A rank without tokens computes token 0 instead;
  // nothing reads the result, and its gradient is 0.
  const at::Tensor& own_tokens() const { return own_tokens_; }
  // All-gathers every rank's [T_own, ...] to [T, ...].
  at::Tensor gather(const at::Tensor& own) const;
  // Selects the entries of this rank's tokens, [T_own, ...], from [T, ...].
  at::Tensor own_of(const at::Tensor& whole) const;

  // Queries, keys and values of this rank's tokens in one layer.
  struct LayerInput {
    const PrefixKvStack& stack;
    int64_t layer;
    const at::Tensor &q_TNH, &k_TGH, &v_TGH;
    double scale;
  };
  // Attention of this rank's queries. Writes all ranks' keys and values to the stack, from row stack_rows on.
  // verify_rows: throws InternalError if these keys and values differ from those of the first forward.
  TreeAttentionOutput forward(const LayerInput& in, bool verify_rows);
  // Call before the first forward() if other passes may overwrite the pass's stack rows between its forward
  // and backward. forward() then copies the keys and values, and backward() first writes the copy to the
  // stack.
  void keep_rows() { keeps_rows_ = true; }
  // Adds this rank's contribution to the key and value gradients on the stack. Returns d_q, d_k and d_v of
  // this rank's tokens; d_k and d_v are sums over the ranks. An undefined d_o means that no rank's queries
  // have a gradient; d_q is then undefined too.
  TreeAttentionGradient backward(const LayerInput& in, const TreeAttentionOutput& out,
                                 const at::Tensor& d_o) const;

 private:
  struct Piece {
    TokenRun run;
    int64_t at = 0;                      // index of its first token among this rank's
    KeyEnds ends;                        // of the keys up to its last token, for its queries
    std::vector<QuerySegment> segments;  // or empty
  };
  TreeAttentionInput input_of(const Piece& piece, const LayerInput& in) const;
  bool has_tokens() const { return !pieces_.empty(); }

  Communicator& ranks_;
  int64_t stack_rows_, num_tokens_;
  std::vector<Piece> pieces_;
  at::Tensor own_tokens_;
  at::Tensor places_;  // int64 [T]: each token's index in the gathered tensor [size * most_, ...]
  int64_t most_ = 0;   // largest number of tokens of a rank
  bool keeps_rows_ = false;
  std::vector<at::Tensor> kept_rows_;  // by layer: all ranks' keys and values, [T, 2, G, H]
};

// The costs of a pass for each of `size` context-parallel ranks: 1/size of the seconds and activations, but
// prefix KV stack rows of all tokens. Communication is not counted. Returns `whole` if size is 1.
std::shared_ptr<const PassCosts> context_costs(std::shared_ptr<const PassCosts> whole, int64_t size);

}  // namespace bough
