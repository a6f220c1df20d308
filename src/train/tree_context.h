// The prefix KV stack, and the attention of a training pass to the stack rows of its ancestor blocks and to
// the pass's own tokens (engine.md 3, "Prefix KV stack").
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "data/trajectory.h"
#include "kernels/tree_attention/tree_attention_segments.h"
#include "kernels/tree_attention/tree_attention_sparse.h"
#include "models/config.h"
#include "models/expert_routes.h"
#include "models/model.h"
#include "train/context_parallel.h"
#include "train/host_copies.h"
#include "train/router_losses.h"

namespace bough {

// Keys, values and their gradients of the tokens on the current root-to-leaf chain of interior blocks. One
// row of the prefix KV stack is one token.
//
// One buffer per layer for k and v (model dtype) and for each gradient (accumulator type), allocated once for
// the plan's deepest chain. Only the executor pushes and pops rows. Forward writes at the plan's offsets and
// is idempotent. Gradient rows are zeroed when they are reserved, never by a recompute: by then they hold the
// gradients from descendant blocks. Ops keep (stack, layer, offset, length), never tensor views across
// passes: a view would fail autograd's version check when a sibling block writes other rows.
class PrefixKvStack {
 public:
  PrefixKvStack(const ModelConfig& config, int64_t capacity, at::ScalarType dtype, at::Device device,
                bool with_gradients);

  int64_t num_rows() const { return static_cast<int64_t>(tokens_.size()); }
  const std::vector<int32_t>& tokens() const {
    return tokens_;
  }  // tree token of each row: one path from the root

  // Reserves rows for these tokens at the top and zeroes the rows' gradients.
  void push(int32_t first_token, int32_t end_token);
  // Zeroes the gradients of rows [begin, begin + num_rows), which lie above the top. A context-parallel pass
  // uses these rows without pushing them.
  void clear_above(int64_t begin, int64_t num_rows);
  void pop(int64_t num_rows);

  at::Tensor k(int64_t layer, int64_t begin, int64_t count) const {
    return k_[layer].narrow(0, begin, count);
  }
  at::Tensor v(int64_t layer, int64_t begin, int64_t count) const {
    return v_[layer].narrow(0, begin, count);
  }
  at::Tensor d_k(int64_t layer, int64_t begin, int64_t count) const {
    return d_k_[layer].narrow(0, begin, count);
  }
  at::Tensor d_v(int64_t layer, int64_t begin, int64_t count) const {
    return d_v_[layer].narrow(0, begin, count);
  }

 private:
  int64_t capacity_;
  std::vector<at::Tensor> k_, v_, d_k_, d_v_;  // [capacity, G, H] per layer
  std::vector<int32_t> tokens_;
};

// Counts of page lists. A query has one list per sparse layer and key/value head.
// lists: all lists. replayed: those taken from generation. different: those of the replayed lists for which
// training would select other pages.
struct ReplayCounts {
  int64_t lists = 0, replayed = 0, different = 0;
};

// An interior pass writes its keys and values to the stack. Its backward reads the gradients that descendant
// blocks have added to its rows. So its backward must run in every layer, even if the layer's output has no
// gradient: a prompt without a loss still passes its descendants' gradients on. Each layer's attention
// therefore has a second, empty output, the *anchor*, and backward takes all anchors as roots. Without
// anchors these gradients would be lost without an error.
class TreeContext : public AttentionContext {
 public:
  struct Pass {
    PrefixKvStack* stack;
    int64_t stack_rows;     // P: keys and values below the pass
    bool interior;          // writes its rows at [stack_rows, stack_rows + T)
    bool verify_recompute;  // throws InternalError if a recompute is not bit-identical to the first forward
    KeyEnds ends;           // where each key's subtree ends, on the pass's device
    double scale;
    // Pages of the keys. Set if the model is batch-invariant or if queries select pages, otherwise nullopt.
    std::optional<TreePages> pages;
    bool is_batch_invariant = false;
    // Long runs of queries use the GPU vendor's kernel. Empty: one kernel call computes all queries.
    std::vector<QuerySegment> segments = {};
    // Block selection of the pass's queries: which queries select, and the lists by layer. The first forward
    // writes the lists and a recompute reads them.
    struct Choice {
      BlockChooser chooser;
      std::vector<BlockChooser::Lists> chosen;
      // By query: blocks that generation recorded (PageChoices), used in place of the selected ones. Empty:
      // the query selects its blocks.
      std::vector<std::span<const uint16_t>> replays = {};
      ReplayCounts* counts = nullptr;  // nullptr: not counted

      // Replaces `lists` by the blocks that generation recorded for this layer.
      void replay(int64_t layer, BlockChooser::Lists& lists);
    };
    std::optional<Choice> choice;
    // A mixture's experts. The first forward sets them and a recompute reads them.
    ExpertRoutes experts = ExpertRoutes();
    std::optional<RouterLosses> router_losses = std::nullopt;  // nullopt: the routers have no losses
    // Context parallelism: the ranks split the tokens of the pass. nullptr if this rank has all tokens.
    // Dense attention only.
    std::shared_ptr<ContextPass> shared = nullptr;
    // Attention outputs, one per layer. The first forward appends to *keep_outputs. The recompute reads
    // *kept_outputs instead of computing attention again. Each is nullptr if the pass does not use it.
    std::vector<TreeAttentionOutput>* keep_outputs = nullptr;
    const std::vector<TreeAttentionOutput>* kept_outputs = nullptr;
    // If true, the graph holds only each layer's input, and with `layers_keep_attention` also attention's
    // output. Each layer is recomputed just before its backward.
    bool recomputes_layers = false;
    bool layers_keep_attention = false;
    bool layers_on_host = false;  // the layers' inputs are offloaded to host memory until backward
    bool verify_layers = false;   // throws InternalError if a recomputed layer is not bit-identical
  };

  // This object and the model must outlive backward.
  explicit TreeContext(Pass pass);
  TreeContext(const TreeContext&) = delete;
  TreeContext& operator=(const TreeContext&) = delete;

  at::Tensor layer(int64_t index, const at::Tensor& x_TD, const Layer& compute) override;

  at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override;

  at::Tensor route(int64_t layer, const at::Tensor& logits_TE, int64_t num_chosen) override;

  // Moves out the block lists that the pass's queries selected, by layer. Empty if no query selects pages.
  std::vector<BlockChooser::Lists> take_choices();
  const ExpertRoutes& experts() const { return pass_.experts; }

  // Empty tensors. Pass them to backward as roots in addition to the hidden states.
  std::vector<at::Tensor> anchors() const;

 private:
  friend struct LayerFunction;
  void begin_backward();

  Pass pass_;
  std::vector<at::Tensor> anchors_;  // by layer
  // By layer: RouterLosses::anchor(). Undefined if the layer's router has no loss, and without a graph.
  std::vector<at::Tensor> router_anchors_;
  // With recomputes_layers: the function of each layer until its backward, and the kept attention outputs.
  std::vector<Layer> layers_;
  std::vector<TreeAttentionOutput> layer_outputs_;
  HostCopies layer_inputs_;  // with layers_on_host
};

// Returns logits [T, V], model dtype, of one sequence in a single pass without a tree. Used for comparison
// with other implementations. Tokens with a row in `routed` use its experts. Records no autograd graph.
at::Tensor sequence_logits(const Model& model, const std::vector<int32_t>& ids,
                           const RoutedExperts& routed = {});

}  // namespace bough
