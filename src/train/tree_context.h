// The stack of keys and values that a planned tree is walked with, and what a training pass answers when the
// model asks a token to attend: the stack below it and the pass itself (engine.md 3, "Prefix KV stack").
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels/tree_attention/tree_attention_segments.h"
#include "kernels/tree_attention/tree_attention_sparse.h"
#include "models/config.h"
#include "models/model.h"
#include "train/context_parallel.h"
#include "train/host_copies.h"

namespace bough {

// Keys, values and their gradients of the tokens on the current root-to-leaf chain of interior blocks.
//
// One buffer a layer for k and v (model dtype) and one for each gradient (accumulator type), allocated once
// for the plan's deepest chain. Only the executor moves the top. Forward writes at the plan's offsets and is
// idempotent; gradient rows are zeroed when they are reserved, never by a recompute. Ops keep (stack, layer,
// offset, length), never views across passes: a view would trip autograd's version check when a sibling
// writes other rows.
class KvStack {
 public:
  KvStack(const ModelConfig& config, int64_t capacity, at::ScalarType dtype, at::Device device,
          bool with_gradients);

  int64_t num_rows() const { return static_cast<int64_t>(tokens_.size()); }
  const std::vector<int32_t>& tokens() const {
    return tokens_;
  }  // tree tokens of the rows, one path from the root

  // Reserves rows for these tokens on top and zeroes their gradients.
  void push(int32_t first_token, int32_t end_token);
  // Zeroes the gradients of so many rows from `begin` on, above the top, which a pass of several ranks uses
  // without leaving them.
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
  std::vector<at::Tensor> k_, v_, d_k_, d_v_;  // [capacity, G, H] a layer
  std::vector<int32_t> tokens_;
};

// Of the lists of pages that queries chose, by layer and key/value head: those that were kept by generation,
// and of these those that would be others if they were chosen again.
struct ReplayCounts {
  int64_t lists = 0, replayed = 0, different = 0;
};

// An interior pass writes its keys and values to the stack. Its backward reads what descendants have added to
// the gradients of its rows, so it must run in every layer even where nothing above asks for it: a prompt
// without a loss of its own still passes its descendants' gradients on. Each layer's attention therefore has
// a second, empty output, the *anchor*, and backward takes all anchors as roots; without them those gradients
// vanish silently.
class TreeContext : public AttentionContext {
 public:
  struct Pass {
    KvStack* stack;
    int64_t stack_rows;     // P: keys and values below the pass
    bool interior;          // writes its rows at [stack_rows, stack_rows + T)
    bool verify_recompute;  // what is written must be what stands there, bit for bit
    KeyEnds ends;           // of the pass, on its device
    double scale;
    // Attention of a batch-invariant model goes by these pages, and that of queries that choose; others have
    // none.
    std::optional<TreePages> pages;
    bool is_batch_invariant = false;
    // Where long runs of queries go to a GPU vendor's kernel; empty: the pass is attended whole.
    std::vector<QuerySegment> segments = {};
    bool same_bits = false;  // twice the same bits: of runs' gradients, too
    // Where some of the pass's queries choose pages: who does, and by layer what, written by its forward; a
    // recompute has it from there.
    struct Choice {
      PageChooser chooser;
      std::vector<PageChooser::Lists> chosen;
      // By query: what generation kept of its choices (PageChoices), which stand in for these; empty: none.
      std::vector<std::span<const uint16_t>> replays = {};
      ReplayCounts* counts = nullptr;  // or null: not counted

      // Puts what generation chose in this layer in the place of `lists`.
      void replay(int64_t layer, PageChooser::Lists& lists);
    };
    std::optional<Choice> choice;
    // Where several ranks make the pass, each with some of its tokens; null: it has all. Dense attention
    // only.
    std::shared_ptr<ContextPass> shared = nullptr;
    // Attention's outputs, one a layer: a first forward that keeps them appends, its recompute takes them
    // from there instead of computing them again. Either may be null.
    std::vector<TreeAttentionOutput>* keep_outputs = nullptr;
    const std::vector<TreeAttentionOutput>* kept_outputs = nullptr;
    // Of each layer the graph holds the input alone, and with `layers_keep_attention` attention's output; a
    // layer is computed again just before its backward.
    bool recomputes_layers = false;
    bool layers_keep_attention = false;
    bool layers_on_host = false;  // the layers' inputs wait in the host's memory
    bool verify_layers = false;   // what is computed again of them must be the same, bit for bit
  };

  // It and the model must outlive backward.
  explicit TreeContext(Pass pass);
  TreeContext(const TreeContext&) = delete;
  TreeContext& operator=(const TreeContext&) = delete;

  at::Tensor layer(int64_t index, const at::Tensor& x_TD, const Layer& compute) override;

  at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override;

  // What the pass's queries chose, by layer; empty where none does. Afterwards the pass does not have it.
  std::vector<PageChooser::Lists> take_choices();

  // An empty tensor for each layer, to be passed to backward as roots beside the hidden states.
  const std::vector<at::Tensor>& anchors() const { return anchors_; }

 private:
  friend struct LayerFunction;
  void begin_backward();

  Pass pass_;
  std::vector<at::Tensor> anchors_;
  // Where layers are computed again: how, until that is done; and attention's outputs, where they are kept.
  std::vector<Layer> layers_;
  std::vector<TreeAttentionOutput> layer_outputs_;
  HostCopies layer_inputs_;  // where they wait on the host
};

// [T, V], model dtype: logits of one sequence by itself, all tokens at once and without a tree. For
// comparisons with others; records no graph.
at::Tensor sequence_logits(const Model& model, const std::vector<int32_t>& ids);

}  // namespace bough
