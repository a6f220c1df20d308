// What a training pass answers when the model asks a token to attend: the stack below it and the pass itself.
//
// An interior pass writes its keys and values to the stack. Its backward reads what descendants have added to the
// gradients of its rows, so it must run in every layer even where nothing above asks for it: a prompt without a
// loss of its own still passes its descendants' gradients on. Each layer's attention therefore has a second, empty
// output, the *anchor*, and backward takes all anchors as roots; without them those gradients vanish silently.
#pragma once

#include <optional>
#include <vector>

#include "kernels/tree_attention/tree_attention_paged.h"
#include "models/model.h"
#include "train/kv_stack.h"

namespace bough {

class TreeContext : public AttentionContext {
 public:
  struct Pass {
    KvStack* stack;
    int64_t stack_rows;     // P: keys and values below the pass
    bool interior;          // writes its rows at [stack_rows, stack_rows + T)
    bool verify_recompute;  // what is written must be what stands there, bit for bit
    at::Tensor end_local;   // int32 [P + T]: kernels/tree_attention
    double scale;
    // Of a batch-invariant model: attention goes by these.
    std::optional<TreePages> pages;
    // Attention's outputs, one a layer: a first forward that keeps them appends, its recompute takes them from there
    // instead of computing them again. Either may be null.
    std::vector<TreeAttentionOutput>* keep_outputs = nullptr;
    const std::vector<TreeAttentionOutput>* kept_outputs = nullptr;
  };

  explicit TreeContext(Pass pass) : pass_(std::move(pass)) {}

  at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH) override;

  // One empty tensor a layer, to be passed to backward as roots beside the hidden states.
  const std::vector<at::Tensor>& anchors() const { return anchors_; }

 private:
  Pass pass_;
  std::vector<at::Tensor> anchors_;
};

}  // namespace bough
